"""Every recipe of a real model takes a training step through its program, in its own dtype, before a user does.

`make test` runs one or more of each trainer, of other models, dtypes and shardings each time, `make test-all` all.
"""

import json
import math
import random
from contextlib import ExitStack
from pathlib import Path

import pytest
import released_folder
from apps.recipe_steps import CASES, KINDS, families, folder_of, scorer_of, take_step
from helpers import TEST_SEED, TEXT_TRAINERS, sampled
from omni_reward.serving import serving_in_thread
from omni_rollout.models.hub import released_models
from omni_train.files import load_metrics
from safetensors import safe_open

FAMILIES = families()
FIRST = [random.Random(TEST_SEED).choice(cases) for cases in FAMILIES.values()]  # one of each family
BY_TRAINER = {app: [case for case in FIRST if case.app == app] for app in {case.app: 0 for case in FIRST}}
OTHERS = [pytest.param(case, id=str(case), marks=pytest.mark.slow) for case in CASES if case not in FIRST]
DRAWN = [param for cases in BY_TRAINER.values() for param in sampled(cases, 1 + len(cases) // 12)] + OTHERS
CUT_FIELDS = {
    *released_folder.HEAD_COUNTS, *released_folder.OTHER_HEAD_COUNTS, *released_folder.WIDTHS, *released_folder.DEPTHS,
    *released_folder.LAYER_NUMBERS, *released_folder.CHANNEL_COUNTS, *released_folder.VAE_DEPTHS,
    *released_folder.NAMED_TOKENS, *(field for reads in released_folder.READS.values() for field in reads),
    "num_key_value_heads", "num_experts", "num_shared_expert", "moe_topk", "vocab_size", "output_dim",
    "out_hidden_size", "eos_token_id", "model_type", "image_base_size",
}  # fmt: skip


@pytest.fixture(scope="module")
def urls():
    """By the kind of media, URLs of servers in this process whose scores name the parts of any recipe."""
    with ExitStack() as open_servers:
        yield {kind: open_servers.enter_context(serving_in_thread(scorer_of(kind), name="any")) for kind in KINDS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", DRAWN)
def test_a_recipe_takes_a_step(case, tmp_path, monkeypatch, urls):
    monkeypatch.chdir(tmp_path)
    life = take_step(case, tmp_path, urls)
    codes, text = life.wait(500), life.text()
    assert codes == [0] * case.ranks, text
    assert "switched off" not in text, "operations and memory are measured too"
    assert "failed: " not in text, "the report is written too"
    args = case.args
    line = load_metrics(tmp_path / "runs" / args.run.name / "metrics.jsonl")[-1]
    assert line["step"] == 1
    assert (
        line["policy/first_ratio_max_dev"] == 0
        if "policy/first_ratio_max_dev" in line
        else case.app != "train_flowgrpo"
    )
    assert line["policy/grad_norm"] > 0
    assert math.isfinite(line["policy/loss"])
    assert case.app in TEXT_TRAINERS or line["perf/update_tflops"] > 0  # texts have many shapes, and are not counted
    files = [*(tmp_path / "runs" / args.run.name / "weights").rglob("*.safetensors")]
    assert any(map(tensor_changes, files)), "the experts that a step reaches move"


def tensor_changes(file: Path) -> bool:
    """Whether some exported tensor is not zero: a factor B of an adapter is until a step moves it."""
    with safe_open(file, "pt") as opened:
        names = [name for name in opened.keys() if "lora_A" not in name]  # noqa: SIM118 - no mapping
        return any(opened.get_tensor(name).any() for name in names)


@pytest.mark.parametrize("name", sorted(released_models()))
def test_a_cut_folder_has_each_other_field_as_released(name):
    released, cut = released_models()[name], folder_of(name)
    changed = set()
    for file in released.rglob("*.json"):
        if file.name in ("tokenizer_config.json", "ae.json"):  # other words; in no release, which has it in weights
            continue
        own = json.loads((cut / file.relative_to(released)).read_text())
        changed |= changed_fields(json.loads(file.read_text()), own)
    assert changed <= CUT_FIELDS


def changed_fields(released, cut):
    """The fields of a configuration that another one has with other values."""
    changed: set[str] = set()
    for name, value in released.items():
        if name == "thinker_config":
            return changed_fields(value, cut)
        texts = cut.get("text_config", cut)  # of a configuration that is written flat
        rope = texts.get("rope_parameters", {})  # by which the library writes what it reads as rope_scaling
        own = {**rope, "rope_scaling": {**rope, "type": rope.get("rope_type")}, **texts, **cut}.get(name)
        if isinstance(value, dict):
            changed |= changed_fields(value, own)
        elif own != value:
            changed.add(name)
    return changed
