"""Prompts that the run's own scorer cannot grade, at the start."""

import pytest
from omni_rl.flow.scorers import check_gradable
from omni_rl.settings.groups import ScoredScorer
from omni_train.prompts.files import PromptRecord


def records(*texts):
    return [PromptRecord(i, text) for i, text in enumerate(texts)]


def test_prompts_without_a_score_are_told_and_refused_where_whole_steps_are_likely_to_get_none(capfd):
    scorer_args = ScoredScorer(name="ocr --option reading=line")
    some = records('a "b"', "a cat", 'a "c"')
    check_gradable(scorer_args, {"--prompts": some, "--eval.prompts": some}, prints=True)
    why = "ocr: the prompt has no text between double quotes"
    for setting, said in zip(("--prompts", "--eval.prompts"), capfd.readouterr().out.splitlines(), strict=True):
        assert said == f"{setting}: 1 of 3 prompts get no score from --scorer ocr, first prompt 2, 'a cat': {why}"
    with pytest.raises(
        ValueError,
        match=r"^--prompts: 2 of 3 prompts get no score from --scorer ocr, first prompt 1, .*"
        r"\. Leave these lines out, or give another --scorer$",
    ):
        check_gradable(scorer_args, {"--prompts": records("a cat", "a dog", 'a "c"')}, prints=True)
    check_gradable(scorer_args, {"--eval.prompts": records("a cat", "a dog", 'a "c"')}, prints=False)
    with pytest.raises(ValueError, match=r"^eval\.sets\[1\]\.prompts: 1 of 1 prompts get no score"):
        check_gradable(scorer_args, {"--eval.prompts": some, "eval.sets[1].prompts": records("a cat")}, prints=False)
    assert capfd.readouterr().out == ""


def test_a_few_of_many_prompts_without_a_score_are_told_though_they_would_fill_a_step(capfd):
    scorer_args = ScoredScorer(name="ocr")
    check_gradable(scorer_args, {"--prompts": records("a cat", "a dog", *['a "c"'] * 8)}, prints=True)
    assert capfd.readouterr().out.startswith(
        "--prompts: 2 of 10 prompts get no score from --scorer ocr, first prompt 1"
    )


def test_a_server_of_ones_own_is_not_foretold(capfd):
    scorer_args = ScoredScorer(url="http://a:1")
    check_gradable(scorer_args, {"--prompts": records("a cat")}, prints=True)
    assert capfd.readouterr().out == ""
