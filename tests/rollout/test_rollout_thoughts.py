"""Thinking before drawing: the thought is sampled and scored alike, the picture is drawn after it, all by the seed."""

from dataclasses import replace

import build_tiny_models
import pytest
import torch
from helpers import REPO, ulps
from omni_rollout import Params, Prompt, replay
from omni_rollout.engines.thinking import ThinkingEngine, ThinkingParams, ThoughtTrajectory
from omni_rollout.models import open_thinking_model
from omni_rollout.models.bagel_think import REQUEST
from omni_rollout.tokens import TokenParams, score_tokens
from omni_train.lora import add_lora

torch.set_num_threads(1)
PARAMS = ThinkingParams(3, 32, 48, noise_level=0.7, sde_steps=(0, 1), thought=TokenParams(6, temperature=0.9))


@pytest.fixture(scope="module")
def engine():
    """An engine with weights so large that thoughts differ in their likelihood."""
    model = open_thinking_model(build_tiny_models.tiny_checkpoint("bagel", REPO / ".pytest_cache" / "tiny-models"))
    return ThinkingEngine(model, model.load(device="cpu", dtype=torch.float32))


def prompts():
    return [Prompt(text, i, i, 10 + i) for i, text in enumerate(("a red sign", "x", "a blue sign in the rain"))]


def test_a_thought_is_sampled_with_a_cache_as_it_is_scored_without(engine):
    drawn = engine.generate(prompts(), PARAMS)
    thoughts = drawn.thoughts
    with torch.no_grad():
        before = score_tokens(engine.model, engine.net, thoughts)
        own = score_tokens(engine.model, engine.net, thoughts.select([1]).trim()).log_prob
    bound = ulps(8, (thoughts.rollout_log_prob * thoughts.mask).abs().max())  # of a logit, as large as a log-prob
    assert ((before.log_prob - thoughts.rollout_log_prob) * thoughts.mask).abs().max() <= bound < 1e-4
    alone = thoughts.select([1]).trim()
    torch.testing.assert_close(
        own * alone.mask, (before.log_prob * thoughts.mask)[1:2, : own.shape[1]], atol=bound, rtol=0
    )
    assert [prompt.meta["thought"] for prompt in drawn.prompts] == list(thoughts.answers)


def test_both_parts_replay_with_gradients_bit_for_bit(engine):
    drawn = engine.generate(prompts(), PARAMS)
    with torch.no_grad():
        before = score_tokens(engine.model, engine.net, drawn.thoughts).log_prob
    engine.net.requires_grad_(True)
    now = score_tokens(engine.model, engine.net, drawn.thoughts).log_prob
    steps = [replay(engine.model, engine.net, drawn, k) for k in range(2)]
    (now.sum() + sum(step.log_prob.sum() for step in steps)).backward()
    lacking = {name for name, weight in engine.net.named_parameters() if weight.grad is None or not weight.grad.any()}
    engine.net.zero_grad()
    engine.net.requires_grad_(False)
    assert torch.equal(now, before)
    assert all(torch.equal(step.log_prob, drawn.rollout_log_prob[:, k]) for k, step in enumerate(steps))
    assert lacking == {"latent_pos_embed.pos_embed"}, "a fixed table"


def test_the_picture_is_drawn_after_request_prompt_and_thought(engine):
    """As the template has it, whose thought ends whether it was done or not; its tokens are those that were sampled."""
    model, drawn = engine.model, engine.generate(prompts()[:1], PARAMS)
    said = drawn.thoughts.tokens[0][drawn.thoughts.mask[0]].tolist()
    texts = [model.tokenizer.encode(text, add_special_tokens=False) for text in (REQUEST, "a red sign")]
    texts.append([token for token in said if token != model.end])
    wanted = [token for text in texts for token in (model.begin, *text, model.end)]
    assert drawn.cond["ids"][0].tolist() == wanted
    other = replace(drawn, cond=drawn.cond | {"ids": drawn.cond["ids"].clone()})
    other.cond["ids"][0, -2] += 1
    assert not torch.equal(replay(model, engine.net, other, 0).log_prob, drawn.rollout_log_prob[:, 0])


def test_a_sample_depends_on_its_seed_alone_and_batches_join(engine):
    whole = engine.generate(prompts(), PARAMS)
    again = ThoughtTrajectory.cat([engine.generate(prompts()[i : i + 1], PARAMS) for i in (2, 0)])
    picked = whole.select([2, 0])
    assert again.thoughts.answers == picked.thoughts.answers
    torch.testing.assert_close(again.x0, picked.x0, atol=1e-4, rtol=0)
    other = engine.generate([replace(prompts()[0], seed=99)], PARAMS)
    assert other.thoughts.answers != whole.thoughts.answers[:1]


def test_thoughts_of_several_lengths_empty_ones_too_are_their_own_whatever_other_ranks_write(engine):
    model = engine.model
    engine = ThinkingEngine(model, model.load(device="cpu", dtype=torch.float32))
    engine.net.get_output_embeddings().weight[model.end] *= 8  # the end is as likely as not
    asked = [
        Prompt(text, i, i, 10 + i) for i, text in enumerate(("a red sign", "x", "a blue sign", "snow", "q", "r r"))
    ]
    params = replace(PARAMS, thought=TokenParams(4, temperature=0.9))
    drawn = engine.generate(asked, params)
    thoughts = drawn.thoughts
    assert set((thoughts.lengths - thoughts.ended.long()).tolist()) == {0, 1, 4}, "empty, short and cut"
    with torch.no_grad():
        scored = score_tokens(model, engine.net, thoughts).log_prob
    bound = ulps(8, (thoughts.rollout_log_prob * thoughts.mask).abs().max())
    assert ((scored - thoughts.rollout_log_prob) * thoughts.mask).abs().max() <= bound < 1e-4
    for i, (prompt, encoded) in enumerate(zip(asked, thoughts.encoded, strict=True)):
        alone, said = engine.generate([prompt], params), thoughts.tokens[i][thoughts.mask[i]]
        assert torch.equal(alone.thoughts.tokens[0][alone.thoughts.mask[0]], said)
        torch.testing.assert_close(alone.x0[0], drawn.x0[i], atol=1e-4, rtol=0)
        read = drawn.cond["ids"][i][drawn.cond["ids_mask"][i]].tolist()
        assert read == [*encoded["input_ids"].tolist(), *said[: len(said) - int(thoughts.ended[i])].tolist(), model.end]
    engine.together = lambda ended: False
    assert torch.equal(engine.generate(asked[1:2], params).thoughts.tokens, thoughts.select([1]).trim().tokens)


def test_guidance_leads_away_from_prompt_and_thought_together(engine):
    drawn = engine.generate(prompts(), replace(PARAMS, guidance_scale=2.0))
    lengths = drawn.cond["negative_ids_mask"].sum(dim=1)
    assert lengths.tolist() == [len(engine.model.tokenizer.encode(REQUEST, add_special_tokens=False)) + 2] * 3


def test_adapters_are_on_both_halves(engine):
    assert add_lora(engine.model.empty_net(), engine.model.LORA_TARGETS, rank=2, alpha=2, seed=0) == 3 * 14


def test_what_does_not_think_is_named(engine):
    with pytest.raises(ValueError, match="params must be ThinkingParams, got Params"):
        engine.generate(prompts(), Params(3, 32, 48))
    with pytest.raises(ValueError, match="prompts must hold at least one prompt, got none"):
        engine.generate([], PARAMS)
    with pytest.raises(ValueError, match="prompts must have no initial_seed for a model that thinks"):
        engine.generate([replace(prompts()[0], initial_seed=1)], PARAMS)
    with pytest.raises(
        ValueError, match=r"model must be the folder of a BagelForConditionalGeneration, .* 'QwenImagePipeline'"
    ):
        open_thinking_model(REPO / "checkpoints" / "tiny-signs-qwen-image")
