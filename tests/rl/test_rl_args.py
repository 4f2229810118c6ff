"""Settings that no run can use are refused before torch is imported, by one line that names flag, rule and value."""

import importlib
import math
import re
import subprocess
import sys
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import pytest
import torch
from helpers import REPO
from omni_rl.run.media import with_sliced_decoding
from omni_rl.settings.args import RunArgs, num_batches, sharding_mode, without_secrets
from omni_rl.settings.fields import (
    Bound,
    build,
    change,
    check_bounds,
    flag_of,
    flags_by_name,
    leaves,
    map_error_names,
    strip_metadata,
    type_metadata,
    values_of,
)
from omni_rl.settings.groups import Data, Lora, Policy, ScoredScorer
from omni_rl.settings.rules import check_media
from omni_rl.settings.saved import weights_digest
from omni_rl.settings.toml import to_toml
from omni_train.kernels import BACKENDS

import train_dpo
import train_gspo
import train_sft


@pytest.fixture
def good(tmp_path: Path) -> train_dpo.Args:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"prompt {i}\n" for i in range(32)))
    places = {"model": "some/model", "prompts": str(prompts), "eval.prompts": str(prompts)}
    args = build(train_dpo.Args, places | {"scorer.url": "http://a:1"})
    check_media(args)
    return args


def test_the_learning_rate_and_the_scale_of_lora_follow_from_its_rank_unless_given():
    def settled(args: RunArgs) -> tuple[float | None, int]:
        printed = tomllib.loads(to_toml(without_secrets(args)))
        assert (args.lr, args.lora.alpha) == (printed["lr"], printed["lora"]["alpha"])
        return args.lr, args.lora.alpha

    assert [settled(train_dpo.Args(lora=Lora(rank))) for rank in (0, 8, 64)] == [(1e-5, 0), (3e-4, 16), (3e-4, 128)]
    assert [settled(train_gspo.Args(lora=Lora(rank))) for rank in (0, 32)] == [(1e-6, 0), (3e-6, 64)]
    assert settled(train_dpo.Args(lora=Lora(8, 8), lr=0.0)) == (0.0, 8)


UNUSABLE = {
    "seed": [2**63, -1],
    "lr": [float("inf"), float("nan"), 1e30, -1e-9],
    "optim_weight_decay": [float("inf")],
    "optim_max_grad_norm": [float("inf"), 0.0],
    "optim_adam_beta1": [1.0, -0.1],
    "optim_adam_beta2": [1.0],
    "optim_adam_epsilon": [0.0, float("nan")],
    "guidance_scale": [float("inf"), 1e39],
    "scorer_timeout_s": [1e10, 0.0],
    "hang_timeout_s": [1e10],
    "height": [10**12, 0],
    "eval_num_inference_steps": [10**12, 1],
    "num_inference_steps": [10**12],
    "lora_alpha": [10**400, -1],
    "train_steps": [2**31],
    "group_size": [1],
    "model": [""],
    "prompts": ["", "gone.txt", "prompts.csv"],
    "eval_prompts": ["", "gone.jsonl"],
    "prompts_per_step": [0],
    "name": ["", "/run", "../run", "a\nb", "a\x1b[2J"],
    "scorer_url": ["ftp://host", "host:1", "http://", "http://a:1,host", "http://a:x"],
    "scorer_watch_url": ["host"],
    "scorer_token_file": ["gone"],
    "init_weights": ["gone"],
    "guidance": ["audio", "audio=x", "audio=1,audio=2", "audio=inf", "audio=1e31"],
    "sharding_mode": ["fsdp2"],
    "dtype": ["bfloat16"],
    "lora_init": ["gaussian"],
    "lora_targets": ["to_q"],
    "ema_decay": [1.0, 0.999999],
    "memory_keep_products_gb": [-1.0, 1.0],
    "profile": [-1, 301],
}


NAMES = {name.replace(".", "_"): name for name in leaves(train_dpo.Args)}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_setting_that_no_run_can_use_is_refused_by_its_flag(good: train_dpo.Args, name: str):
    for value in UNUSABLE[name]:
        with pytest.raises(ValueError, match="^" + flag_of(NAMES.get(name, name))) as caught:
            check_media(change(good, **{name: value}))
        assert "\n" not in str(caught.value)


def test_the_bounds_themselves_are_allowed(good: train_dpo.Args):
    for number, past in ((0, -math.inf), (1, math.inf)):
        for name, field in leaves(train_dpo.Args).items():
            for bound in type_metadata(field.type):
                if isinstance(bound, Bound) and math.isfinite(end := (bound.low, bound.high)[number]):
                    kind = type(values_of(good)[name])
                    check_bounds(change(good, **{name: kind(end)}))
                    wrong = int(end) + (1, -1)[past < 0] if kind is int else math.nextafter(end, past)
                    with pytest.raises(ValueError, match=f"{flag_of(name)} must be [<>]= "):
                        check_bounds(change(good, **{name: wrong}))


def test_a_step_cannot_take_more_prompts_than_there_are(good: train_dpo.Args):
    with pytest.raises(ValueError, match=r"--prompts-per-step must be between 1 and .* \(32\), got 33"):
        check_media(change(good, prompts_per_step=33))


def test_several_ranks_need_a_way_to_spread_the_weights(good: train_dpo.Args, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"--sharding\.mode none does not fit 2 ranks"):
        check_media(change(good, sharding_mode="none"))
    assert [sharding_mode(good, 1), sharding_mode(good, 2), sharding_mode(change(good, lora_rank=4), 2)] == [
        "none",
        "fsdp2",
        "ddp",
    ]
    check_media(change(good, dtype="bfloat16"))
    with pytest.raises(ValueError, match=r"--dtype bfloat16 needs --lora\.rank"):
        check_media(change(good, dtype="bfloat16", sharding_mode="ddp"))
    monkeypatch.setenv("WORLD_SIZE", "1")
    check_media(change(good, sharding_mode="ddp"))
    monkeypatch.setenv("RANK", "0")
    check_media(change(good, sharding_mode="fsdp2"))


def test_what_waits_on_the_host_is_named(good: train_dpo.Args):
    lean = change(good, lora_rank=4, memory_gradient_checkpointing=True)
    check_media(change(lean, memory_offload="activations,encoder", memory_base_dtype="nf4", memory_decode_batch_size=2))
    wrong: dict[str, dict[str, Any]] = {
        "--memory.offload must be of encoder, engine, optimizer, activations, blocks, with commas between, got vae": {
            "memory_offload": "vae,encoder"
        },
        "--memory.offload activations needs --memory.gradient-checkpointing": {
            "memory_offload": "activations",
            "memory_gradient_checkpointing": False,
        },
        "--memory.offload blocks needs --lora.rank > 0": {"memory_offload": "blocks", "lora_rank": 0},
        "--memory.offload blocks needs .* --memory.gradient-checkpointing": {
            "memory_offload": "blocks",
            "memory_gradient_checkpointing": False,
        },
        "--memory.offload blocks does not go with --compile": {"memory_offload": "blocks", "compile": True},
        "--memory.base-dtype nf4 needs --lora.rank > 0": {"memory_base_dtype": "nf4", "lora_rank": 0},
        "--memory.base-dtype int8 needs .* --memory.gradient-checkpointing": {
            "memory_base_dtype": "int8",
            "memory_gradient_checkpointing": False,
        },
        "--memory.decode-batch-size must be >= 0": {"memory_decode_batch_size": -1},
        "--memory.rollout-dtype fp8 needs --engine vllm-omni and --dtype bfloat16, got --engine diffusers": {
            "memory_rollout_dtype": "fp8"
        },
        "--memory.decode-tile must be 0, or at least 64 pixels, got 63": {"memory_decode_tile": 63},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            check_media(change(lean, **changes))


def test_a_step_is_dealt_in_whole_batches():
    args = train_sft.Args(data=Data(prompts_per_step=4, group_size=6, batch_size=3, num_minibatches=2))
    assert num_batches(args, 2) == 4
    with pytest.raises(ValueError, match=r"the ranks \(5\) must divide a step's samples \(24\)"):
        num_batches(args, 5)
    with pytest.raises(ValueError, match=r"--batch-size times ranks \(36\) must divide .* \(24\), got 3; nearest: 2"):
        num_batches(args, 12)
    with pytest.raises(ValueError, match=r"the steps trained of each \(1 x 1\), got 2; nearest: 1"):
        num_batches(args, 8)


def test_minibatches_take_the_steps_of_a_batch_where_batches_are_few():
    """512 samples on 64 ranks: two updates with a batch of 8, which held 4 when each update had batches of its own."""
    args = train_sft.Args(data=Data(prompts_per_step=32, group_size=16, batch_size=8, num_minibatches=2))
    assert num_batches(args, 64, num_trained=2) == 1
    assert num_batches(change(args, prompts_per_step=1024, batch_size=16), 1024, num_trained=2) == 1
    with pytest.raises(ValueError, match=r"\(1 x 3\), got 2; nearest: 1"):
        num_batches(args, 64, num_trained=3)
    with pytest.raises(ValueError, match=r"\(1024\) must divide .* \(512\), got 16; nearest: 8"):
        num_batches(change(args, batch_size=16), 64, num_trained=2)


def test_what_others_may_read_holds_no_secret(good: train_dpo.Args):
    full = change(good, scorer_token_file="token", scorer_watch_url="http://b")
    assert without_secrets(full) == change(full, scorer_url="", scorer_token_file="", scorer_watch_url="")
    assert without_secrets(train_sft.Args(scorer=ScoredScorer(watch_url="http://b"))) == train_sft.Args()


def test_checking_imports_no_torch():
    code = "import sys, omni_rl.settings.args; print({'torch', 'numpy', 'requests'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_attention_may_be_any_choice_that_there_is():
    assert get_args(get_type_hints(Policy)["attention"]) == tuple(BACKENDS)


MOST_FLAT = {"train_flowgrpo": 15, "train_gspo": 13, "train_nft": 20, "train_srpo": 13}  # lower it as groups are made


@pytest.mark.parametrize("app", MOST_FLAT)
def test_a_trainer_s_settings_that_stand_in_no_group_only_become_fewer(app: str):
    own = fields(importlib.import_module(app).Args)
    groups = [field.name for field in own if is_dataclass(strip_metadata(field.type))]
    assert len(groups) <= 14
    assert len(own) - len(groups) <= MOST_FLAT[app]


@pytest.mark.parametrize(
    ("sizes", "changes", "counts"),
    [
        ([(512, 512)], {}, [16]),
        ([(512, 512), (1024, 1024)], {}, [4, 4, 4, 4]),  # as the largest of the prompts needs it
        ([(1024, 1024)], {"memory_decode_batch_size": 12}, [12, 4]),
    ],
)
def test_large_images_are_decoded_a_few_at_a_time(sizes, changes, counts):
    seen = []

    def decode(parts, x0, cond, params):
        seen.append(len(x0))
        return {"image": x0}, {}

    args = change(train_sft.Args(data=Data(batch_size=16)), **changes)
    model = with_sliced_decoding(
        args,
        SimpleNamespace(sizes=sizes, preparation=SimpleNamespace(context_mesh=None)),
        SimpleNamespace(decode=decode, encode=None),
    )
    x0 = torch.arange(16.0)
    assert torch.equal(model.decode(None, x0, {}, None)[0]["image"], x0)
    assert seen == counts


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("height and width must be even", "--height and --width must be even"),
        ("num_frames must be 1 at this height", "--num-frames must be 1 at this height"),
        ("a frame of this height must have num_frames 1", "a frame of this height must have --num-frames 1"),
        ("no seed of that name fits lora.rank or num_frames", "no seed of that name fits lora.rank or --num-frames"),
    ],
)
def test_a_message_has_flags_in_place_of_arguments_and_keeps_its_other_words(said: str, told: str):
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"), map_error_names(flags_by_name(train_dpo.Args)):
        raise ValueError(said)


def test_weights_of_a_hub_id_that_come_later_are_those_of_its_commit(tmp_path):
    """A folder's are those of its files."""
    commit = tmp_path / "snapshots" / "0123abc"
    commit.mkdir(parents=True)
    before = {place: weights_digest(place, commit) for place in ("owner/name", str(commit))}
    (commit / "model.safetensors").write_bytes(b"weights")
    after = {place: weights_digest(place, commit) for place in before}
    assert after["owner/name"] == before["owner/name"] != weights_digest("owner/name", commit.with_name("0456def"))
    assert after[str(commit)] != before[str(commit)]
