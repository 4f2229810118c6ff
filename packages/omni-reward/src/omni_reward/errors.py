"""What can go wrong between a trainer and a scorer, as one small tree.

    RewardError                 anything below; catch this to drop or stop
    |-- RewardTimeoutError      the deadline passed before the whole reply was here
    |-- RewardConnectError      no server answered, or the connection broke before the whole reply was here
    |-- RewardHTTPError         the server answered with an error; `.status` and `.code` say which
    `-- RewardFormatError       the server answered with something that is not the protocol

A failed request is never a score of 0: the caller chooses whether to try again, leave the samples out or stop. A scorer
that cannot judge one sample of a good request is no error either; that sample's `Score.abstained` says why.
"""


class RewardError(Exception):
    """A scoring request that brought no scores."""


class RewardTimeoutError(RewardError):
    """The deadline passed before the whole reply was here."""


class RewardConnectError(RewardError):
    """No server answered, or the connection broke before the whole reply was here."""


class RewardFormatError(RewardError):
    """The reply is not the protocol: not JSON, another version or request, a wrong count, not finite, too long."""


class RewardHTTPError(RewardError):
    """The server answered with an error status.

    Args:
        message: what happened, with the URL.
        status: HTTP status, such as 401 or 503.
        code: the protocol's word for the error, such as "malformed"; empty when something else than a scorer answered.
    """

    def __init__(self, message: str, *, status: int, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
