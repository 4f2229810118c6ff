"""Reward models behind HTTP: a client without torch, a server, scorers.

`RewardClient` is all that a trainer needs; `python -m omni_reward.server` starts a scorer.
"""

from omni_reward.client import RewardClient
from omni_reward.errors import RewardConnectError, RewardError, RewardFormatError, RewardHTTPError, RewardTimeoutError
from omni_reward.wire import Score, Scorer

__all__ = [
    "RewardClient",
    "RewardConnectError",
    "RewardError",
    "RewardFormatError",
    "RewardHTTPError",
    "RewardTimeoutError",
    "Score",
    "Scorer",
]
