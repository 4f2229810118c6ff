"""Scores that fail to come, on one rank or all."""

from concurrent.futures import Future

import pytest
from omni_reward import RewardError
from omni_rl.flow.scorers import Pending
from omni_rl.flow.scoring import collect
from trainer_runs import place


@pytest.mark.parametrize("error", [RewardError("broken"), ValueError("meta must hold JSON values only")])
def test_what_cannot_be_sent_fails_on_every_rank_as_what_is_not_answered(error):
    """A ValueError of one rank would leave the others waiting for it, and the steps before unsaved."""
    pending: Pending = Future()
    pending.set_exception(error)
    with pytest.raises(RewardError, match=f"scores of rank 0: {error}"):
        collect(place(), [pending])
