"""Every model takes a training step in bfloat16, with LoRA and with all weights, and so does every algorithm.

`make test` has some of each; a recipe of each trainer takes a step in test_app_recipe_steps.py. Each run is as a
user's, with the count of operations, in a forked process. tests/emulated has float16.
"""

import pytest
import torch
import trainer_table
from helpers import sampled
from model_rows import ROWS, built
from omni_rl.settings.fields import change
from omni_rollout.models import open_model
from omni_rollout.models.tokens import open_token_model
from omni_train.weights.full import PEFT_FILE
from row_runs import (
    ALGORITHMS,
    KINDS,
    ONE_STEP,
    assert_clean,
    assert_trained,
    exported,
    run_alone,
    settings,
    write_chats,
)
from safetensors.torch import load_file

import train_gspo

BFLOAT16 = {"dtype": "bfloat16"}
CHATS = {"qwen3": "", "qwen2.5-vl": "-silent", "qwen3-omni": "-seen"}  # the ends of the names of their prompts' files
WHOLE = [(each, "all weights") for each in ("nft", "dpo", "srpo", "sft", "distill")]  # one of each trainer
STEPS = [*((each, "LoRA") for each in ALGORITHMS), *WHOLE]
TEXT_STEPS = [
    *((model, "gspo", kind) for model in CHATS for kind in KINDS),
    *(("qwen3", algo, "LoRA") for algo in train_gspo.ALGOS if algo != "gspo"),
]


@pytest.mark.parametrize("case", sampled([(name, kind) for name in ROWS for kind in KINDS], 3))
def test_every_model_takes_a_step_in_bfloat16(case, tmp_path, bright_urls):
    name, kind = case
    args = settings(name, "flowgrpo", tmp_path, bright_urls, **ONE_STEP, **KINDS[kind], **BFLOAT16)
    lines, text = run_alone("train_flowgrpo", args, tmp_path)
    assert_clean(lines, text)
    assert lines[1]["perf/rollout_tflops"] > 0 == lines[1]["policy/first_ratio_max_dev"]
    assert_trained(name, kind, tmp_path, lines)


@pytest.mark.parametrize("case", sampled(STEPS, 2))
def test_every_algorithm_takes_a_step_in_bfloat16(case, tmp_path, bright_urls):
    algorithm, kind = case
    args = settings("qwen-image", algorithm, tmp_path, bright_urls, **ONE_STEP, **KINDS[kind], **BFLOAT16)
    lines, text = run_alone(ALGORITHMS[algorithm][0].__name__, args, tmp_path, counts_flops=False)
    assert_clean(lines, text, counts_flops=False)
    assert_trained("qwen-image", kind, tmp_path, lines)


CHAT_STEP = ONE_STEP | BFLOAT16 | {"group_size": 8, "batch_size": 8, "max_new_tokens": 5, "lr": 1e-3, "reward": "regex"}


@pytest.mark.parametrize("case", sampled(TEXT_STEPS, 2))
def test_every_language_model_and_algorithm_of_texts_takes_a_step_in_bfloat16(case, tmp_path):
    model, algorithm, kind = case
    write_chats(tmp_path)
    args = change(train_gspo.Args(), prompts=f"train{CHATS[model]}.jsonl", eval_prompts=f"eval{CHATS[model]}.jsonl")
    folder = built(model)()
    args = change(args, model=str(folder), algo=algorithm, prompts_per_step=4, **CHAT_STEP, **KINDS[kind])
    lines, text = run_alone("train_gspo", args, tmp_path)
    assert_clean(lines, text, counts_flops=False)  # of texts, whose lengths differ, no operations are counted
    weights = tmp_path / "runs" / "run" / "weights"
    if kind == "LoRA":
        ups = [tensor for name, tensor in load_file(weights / PEFT_FILE).items() if ".lora_B." in name]
        assert ups
        assert all(tensor.any() for tensor in ups)
        return
    before, after = (open_token_model(each).load_net(device="cpu", dtype=torch.float32) for each in (folder, weights))
    frozen = tuple(f"{part}." for part in open_token_model(folder).FROZEN)
    for name, tensor in after.named_parameters():
        assert torch.equal(tensor, before.get_parameter(name)) == name.startswith(frozen), name


@pytest.mark.parametrize("kind", sampled(KINDS, 1))
def test_thoughts_and_pictures_take_a_step_in_bfloat16(kind, here, bright_url):
    own = ONE_STEP | BFLOAT16 | KINDS[kind] | {"num_minibatches": 1}
    _, args = trainer_table.settings("unigrpo", bright_url, **own)
    lines, text = run_alone("train_unigrpo", args, here)
    assert_clean(lines, text)
    assert lines[1]["policy/thought_ratio_max_dev"] == 0
    after = exported(here / "runs" / "run" / "weights", {"": "transformer"})
    if kind == "LoRA":
        assert all(tensor.any() for name, tensor in after.items() if ".lora_B." in name)
        return
    before = load_file(open_model(args.policy.model).weight_files()[0])
    moved = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert {"language_model.lm_head.weight", "llm2vae.weight"} <= moved
