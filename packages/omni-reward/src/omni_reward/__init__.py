"""Reward models behind HTTP: a client without torch, a server, scorers.

A trainer needs only `RewardClient`; `python -m omni_reward.server` starts a scorer.
"""

from omni_reward.client import RewardClient as RewardClient
from omni_reward.errors import RewardConnectError as RewardConnectError
from omni_reward.errors import RewardError as RewardError
from omni_reward.errors import RewardFormatError as RewardFormatError
from omni_reward.errors import RewardHTTPError as RewardHTTPError
from omni_reward.errors import RewardTimeoutError as RewardTimeoutError
from omni_reward.wire import Score as Score
from omni_reward.wire import Scorer as Scorer

__version__ = "0.1.0"
