"""Failures between a trainer and a scorer, as one small tree.

    RewardError                 anything below; catch this to drop or stop
    |-- RewardTimeoutError      the deadline passed before the whole reply was here
    |-- RewardConnectError      no server answered, or the connection broke before the whole reply was here
    |-- RewardHTTPError         the server answered with an error; `.status` and `.code` say which
    `-- RewardFormatError       the server answered with something that is not the protocol

A failed request is never a score of 0: with `RewardClient(on_failure=)` it raises or leaves its samples out. A scorer
that cannot judge one sample of a good request is no error: that sample has its reason in `Score.abstained`.
"""

TRANSIENT_STATUSES = frozenset({408, 429})  # besides those from 500 on


class RewardError(Exception):
    """A scoring request that brought no scores.

    Args:
        message: what happened, with the URL.
        fatal: whether something is set up wrongly, so that no later request can do better; it is never masked.
    """

    num_attempts = 1  # how often the request was sent before this ended it

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.num_attempts == 1 else f"{text} (after {self.num_attempts} attempts)"


class RewardTimeoutError(RewardError):
    """The deadline passed before the whole reply was here."""


class RewardConnectError(RewardError):
    """No server answered, or the connection broke before the whole reply was here."""


class RewardFormatError(RewardError):
    """The reply is not the protocol: not JSON, not finite, too long.

    Fatal when it speaks another version, or answers another request, another number of samples or another order.
    """


class RewardHTTPError(RewardError):
    """The server answered with an error status; fatal unless that status passes by itself: 408, 429, 500 and above.

    Args:
        message: what happened, with the URL.
        status: HTTP status, such as 401 or 503.
        code: the protocol's word for the error, such as "malformed"; empty when something else than a scorer answered.
        retry_after_s: seconds that the server asked to wait.
    """

    def __init__(self, message: str, *, status: int, code: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, fatal=status < 500 and status not in TRANSIENT_STATUSES)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
