"""The trainer of thoughts and pictures: both ratios, both gradients, the report."""

import json
import zlib
from pathlib import Path

import pytest
import tiny_colors
import torch
from helpers import REPO
from omni_reward import RewardError, Score
from omni_reward.rules import open_rules
from omni_reward.serving import serving_in_thread
from omni_rl.flow.scorers import LocalScorer
from omni_rl.flow.scoring import collect
from omni_rl.flow.thinking import with_thoughts
from omni_rl.run.run import Run
from omni_rl.settings.fields import change, values_of
from omni_rollout.models import open_model
from omni_rollout.models.bagel_think import ThinkingBagel
from safetensors.torch import load_file
from trainer_runs import exported, place, recipe, train, undocumented
from trainer_table import settings

import train_unigrpo as app


@pytest.fixture
def tiny(here, bright_url):
    """`tiny(**changes)`: settings of a small run in a working folder of its own."""
    return lambda **changes: settings("unigrpo", bright_url, **changes)[1]


def test_both_ratios_are_one_before_the_first_update_and_both_parts_move(tiny):
    lines = train(app, tiny(num_minibatches=2, kl_coef=0.1, velocity_coef=0.1), report=True)
    assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0]
    assert all(0 < line["policy/thought_rollout_gap"] < 1e-5 for line in lines[1:])
    assert all(line["policy/grad_norm"] > 0 for line in lines[1:])
    assert all(line["policy/ratio_max_dev"] > 0 < line["policy/thought_ratio_max_dev"] for line in lines[1:])
    assert lines[1]["reward/mean"] == pytest.approx(lines[1]["reward/image"] + lines[1]["reward/thought"])
    assert lines[2]["eval/reward"] == pytest.approx(lines[2]["eval/image"] + lines[2]["eval/thought"])
    assert undocumented(lines) == set()
    before, after = open_model(tiny().policy.model).weight_files()[0], exported("run")
    moved = {name for name, weight in after.items() if not torch.equal(weight, load_file(before)[name])}
    assert {"language_model.lm_head.weight", "llm2vae.weight"} <= moved
    rows = json.loads(Path("runs/run/eval/000002/rows.json").read_text())
    assert all(row["file"] and row["prompt"] and isinstance(row["answer"], str) for row in rows)


def test_in_bfloat16_both_ratios_are_one_and_the_scorer_reads_thoughts_from_its_first_request_on(tiny, monkeypatch):
    decoded, decode = [], ThinkingBagel.decode
    monkeypatch.setattr(
        ThinkingBagel,
        "decode",
        lambda self, parts, x0, *given: decoded.append(len(x0)) or decode(self, parts, x0, *given),
    )
    score = lambda media, texts, meta: [zlib.crc32(each["thought"].encode()) / 2**32 for each in meta]  # noqa: E731
    with serving_in_thread(score, name="thoughts") as url:
        lines = train(app, tiny(dtype="bfloat16", lora_rank=2, memory_decode_batch_size=1, scorer_url=url, kl_coef=0.1))
    assert [line["policy/first_ratio_max_dev"] for line in lines[1:]] == [0.0, 0.0]
    assert all(line["policy/grad_norm"] > 0 < line["reward/image"] for line in lines[1:])
    assert set(decoded) == {1}


def test_each_part_adds_its_gradient(tiny, monkeypatch):
    """Both parts have one, and the thought's weight scales its own."""
    found, plain = {}, Run.optimizer_step
    for weight in (0.0, 1.0, 3.0):
        gradients = []

        def step(run, step, kept=gradients):
            kept.append([p.grad.clone() for p in run.policy.params if p.grad is not None])
            return plain(run, step)

        monkeypatch.setattr(Run, "optimizer_step", step)
        train(app, tiny(name=f"w{weight}", thought_weight=weight, train_steps=1, eval_every=1))
        found[weight] = torch.cat([grad.flatten() for grad in gradients[0]])
    torch.testing.assert_close(found[3.0] - found[0.0], 3 * (found[1.0] - found[0.0]), atol=1e-5, rtol=1e-3)
    assert (found[1.0] - found[0.0]).abs().max() > 1e-3 < found[0.0].abs().max()


def test_a_score_is_the_sum_of_picture_and_thought_or_none():
    pictures = [Score(0.25, details={"seen": "red"}), Score(None, abstained="too dark")]
    scorer = with_thoughts(LocalScorer(lambda media, texts: pictures), open_rules("0.5*exact"))
    metas = [{"thought": "red", "answer": "red"}] * 2
    good, none = scorer.submit({}, ["a", "b"], metas).result()
    assert (good.value, good.parts) == (0.75, {"image": 0.25, "thought": 0.5})
    assert good.details == {"seen": "red", "image": 0.25, "thought": 0.5}
    assert none == pictures[1]
    assert scorer.submit({}, ["a", "b"], metas).exception() is None
    with pytest.raises(RewardError, match="a rule of --thought-reward fails: KeyError"):
        collect(place(), [scorer.submit({}, ["a"], [{"thought": "red"}])])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_shipped_model_learns_to_think_of_a_color_and_to_draw_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = recipe(app, "tiny-colors")
    places = {name: str(REPO / values_of(args)[name]) for name in ("model", "prompts", "eval.prompts")}
    with serving_in_thread(tiny_colors.color, name="color") as url:
        lines = train(app, change(args, scorer_url=url, **places))
    for part in ("eval/image", "eval/thought"):
        assert lines[-1][part] >= lines[0][part] + 0.15
