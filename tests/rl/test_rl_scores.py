"""Scores that fail to come, on one rank or all."""

from concurrent.futures import Future

import pytest
from omni_reward import RewardClient, RewardError, Score, Scorer
from omni_reward.rules import open_rules
from omni_reward.serving import serving_in_thread
from omni_rl.flow.scorers import Pending, future_of_rules
from omni_rl.flow.scoring import collect
from omni_rl.flow.tokens import RuleScorer
from omni_rollout import Prompt
from trainer_runs import place


@pytest.mark.parametrize("error", [RewardError("broken"), ValueError("meta must hold JSON values only")])
def test_what_cannot_be_sent_fails_on_every_rank_as_what_is_not_answered(error):
    """A ValueError of one rank would leave the others waiting for it, and the steps before unsaved."""
    pending: Pending = Future()
    pending.set_exception(error)
    with pytest.raises(RewardError, match=f"scores of rank 0: {error}"):
        collect(place(), [pending])


def test_what_a_server_says_of_texts_is_a_term_beside_rules_and_may_be_a_gate():
    def lengths(media, prompts, meta):
        return [Score(float(len(text)), parts={"half": len(text) / 2}) for text in media["text"]]

    prompts = [Prompt("p", group=0, index=i, seed=0, meta={"answer": "7"}) for i in range(3)]
    rules = open_rules("0.5*scorer + 2*exact if scorer as long >= 3 else -1", remote=True)
    with serving_in_thread(Scorer(lengths, media=("text",))) as url, RewardClient(url) as client:
        [pending] = RuleScorer(rules, client).submit(["7", "is 7", " 7 "], prompts)
        scores = pending.result(10)
    assert [score.value for score in scores] == [-1.0, 2.0, 3.5]
    parts = {"scorer": 3.0, "long": 3.0, "scorer.half": 1.5, "exact": 1.0, "gate": 1.0}
    assert scores[2].parts == scores[2].details == parts


@pytest.mark.parametrize("fault", [SystemExit(3), ZeroDivisionError(3), StopIteration(3)])
def test_a_rule_that_fails_in_any_way_is_a_failed_reward_that_names_its_flag(fault):
    def fail():
        raise fault

    asked = future_of_rules(fail, "--reward")
    with pytest.raises(RewardError, match=f"^a rule of --reward fails: {type(fault).__name__}: 3$") as caught:
        asked.result()
    assert caught.value.__cause__ is fault
    assert future_of_rules(lambda: [1.0], "--reward").result() == [1.0]
