"""Answers that call a tool go on with its result, whose tokens are in the context and are not sampled."""

import sys

import build_tiny_models
import pytest
import torch
from helpers import REPO, ulps
from omni_rollout import Prompt
from omni_rollout.engines.transformers import TransformersEngine
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenParams, TokenTrajectory, score_tokens
from omni_rollout.tool import MAX_CHARACTERS, Tool


@pytest.fixture(scope="module")
def plain():
    """An engine of random weights without a tool."""
    model = open_token_model(build_tiny_models.tiny_checkpoint("qwen3", REPO / ".pytest_cache" / "tiny-models"))
    return TransformersEngine(model, model.load_net(device="cpu", dtype=torch.float32))


PROMPTS = [Prompt(text="hi", group=i, index=i, seed=10 + i) for i in range(4)]


def called(plain, function, *, after=None, most=16):
    """The answers without a tool, the mark that the first one has in its middle, and the answers with the tool."""
    before = plain.generate(PROMPTS, TokenParams(most))
    texts = [plain.model.decode(token[None]) for token in before.tokens[0]]
    place, mark = next((i, text) for i, text in enumerate(texts) if i >= 2 and text.isascii() and text.isprintable())
    engine = TransformersEngine(plain.model, plain.net, tool=Tool(function, ("?", after or mark, "[", "]")))
    return before, place, engine.generate(PROMPTS, TokenParams(most))


def test_an_answer_goes_on_with_the_result_of_its_call(plain):
    asked = []
    before, place, found = called(plain, lambda text: asked.append(text) or "ab")
    result = plain.model.tokenize("[ab]")
    forced = found.forced[0].nonzero()[:, 0].tolist()
    assert forced[: len(result)] == [*range(place + 1, place + 1 + len(result))]
    assert found.tokens[0, forced[: len(result)]].tolist() == result
    assert torch.equal(found.tokens[0, : place + 1], before.tokens[0, : place + 1])
    assert asked[0] == plain.model.decode(before.tokens[0, :place]).rpartition("?")[2]
    assert "[ab]" in found.answers[0]
    assert (found.forced & ~found.mask).sum() == 0
    assert (found.rollout_log_prob[found.forced] == 0).all()
    assert torch.equal(found.sampled, found.mask & ~found.forced)


def test_the_log_probs_after_a_result_are_those_of_its_context(plain):
    *_, found = called(plain, lambda text: "ab")
    with torch.no_grad():
        scored = score_tokens(plain.model, plain.net, found).log_prob
    rows = found.forced.any(dim=1)
    assert (found.sampled & (found.forced.cumsum(dim=1) > 0))[rows].any()  # some are sampled after a result
    gap = ((scored - found.rollout_log_prob) * found.sampled).abs().max()
    assert gap <= ulps(8, (found.rollout_log_prob * found.mask).abs().max()) < 1e-5


def test_batches_of_other_lengths_keep_what_is_forced(plain):
    *_, found = called(plain, lambda text: "ab")
    short = plain.generate(PROMPTS, TokenParams(16)).select([1]).trim()
    both = TokenTrajectory.cat([short, found])
    assert torch.equal(both.forced[1:], found.forced)
    assert not both.forced[0].any()


def test_a_result_ends_no_answer(plain):
    """Texts of special tokens in it are left out."""
    end = plain.model.tokenizer.convert_ids_to_tokens(plain.model.ends[0])
    _, place, found = called(plain, lambda text: f"a{end}b")
    result = plain.model.tokenize("[ab]")
    assert found.tokens[0, place + 1 : place + 1 + len(result)].tolist() == result
    assert found.mask[0, place + 1 : place + 1 + len(result)].all()


def test_an_exception_is_a_result_and_a_long_one_is_cut():
    def fail(text):
        raise KeyError(text)

    assert Tool(lambda text: sys.exit(3)).run_call("<tool>x</tool>") == "<result>SystemExit: 3</result>"
    assert Tool(fail).run_call("so <tool>x</tool>") == "<result>KeyError: 'x'</result>"
    long = Tool(lambda text: text * 10_000).run_call("<tool>x</tool>")
    assert long == f"<result>{'x' * MAX_CHARACTERS}</result>"


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("1 + 1 = <tool>1 + 1</tool>", "<result>[1 + 1]</result>"),
        ("<tool>a</tool><result>b</result> <tool>c</tool>", "<result>[c]</result>"),
        ("<tool>a</tool> and on", ""),
        ("<tool>a", ""),
    ],
)
def test_a_call_is_the_text_before_the_mark_at_an_answers_end(answer, result):
    assert Tool(lambda text: f"[{text}]").run_call(answer) == result


@pytest.mark.parametrize("marks", [("a", "b", "c"), ("a", "", "c", "d"), ("a", "b", "c", "db")])
def test_marks_that_would_call_again_are_refused(marks):
    with pytest.raises(ValueError, match="marks must be four texts, and the last must not end with the second"):
        Tool(str, marks)
