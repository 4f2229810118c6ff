"""Exceptions of a request to a scorer.

    RewardError                 any of these
    |-- RewardTimeoutError      the deadline passed before the reply was complete
    |-- RewardConnectError      no server answered, or the connection broke before the reply was complete
    |-- RewardHTTPError         the server answered with an error; `.status` and `.code` say which
    `-- RewardFormatError       the reply does not follow the protocol

A failed request never becomes a score of 0: `RewardClient(on_failure=)` makes it raise or masks its samples. A scorer
that cannot judge a sample of a valid request raises no error: the reason is in `Score.abstained`.
"""

TRANSIENT_STATUSES = frozenset({408, 429})  # and all from 500


class RewardError(Exception):
    """Failure of a request.

    Args:
        message: the failure, with the URL.
        fatal: True if the setup is wrong, so that no later request can succeed; such a failure is never masked.
    """

    num_attempts = 1  # times that the request was sent

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal

    def __str__(self) -> str:
        text = super().__str__()
        return text if self.num_attempts == 1 else f"{text} (after {self.num_attempts} attempts)"


class RewardTimeoutError(RewardError):
    """The deadline passed before the reply was complete."""


class RewardConnectError(RewardError):
    """No server answered, or the connection broke before the reply was complete."""


class RewardFormatError(RewardError):
    """The reply does not follow the protocol: not JSON, not finite, too long.

    Fatal if the protocol version, scorer, request, number of samples or their order is not the expected one.
    """


class RewardHTTPError(RewardError):
    """The server answered with an error status; fatal unless it is transient (408, 429, 500 and above).

    Args:
        message: the failure, with the URL.
        status: HTTP status, such as 401 or 503.
        code: the protocol's name for the error, such as "malformed"; empty if the server is not a reward server.
        retry_after_s: seconds to wait, as the server requested.
    """

    def __init__(self, message: str, *, status: int, code: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, fatal=status < 500 and status not in TRANSIENT_STATUSES)
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
