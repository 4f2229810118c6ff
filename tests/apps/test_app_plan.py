"""The memory plan of a step: against the bytes of a real one, and the change that fits."""

import gc
import importlib
import json
import os
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from helpers import CHECKPOINT, in_turn, sampled
from model_rows import ROWS
from omni_rl.flow.scorers import LocalScorer
from omni_rl.run.failures import launch
from omni_rl.run.run import Step
from omni_rl.run.world import World
from omni_rl.settings.fields import change, leaves
from omni_rl.tools import plan
from omni_rollout import Params
from omni_rollout.engines.vllm_omni.formats import quantized_names
from omni_rollout.models import open_model
from omni_train.log import RunLog
from omni_train.lora import add_lora
from omni_train.planned import PLANNED, Meter, planned_ranks
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves
from trainer_runs import lone_run, recipe, rollout, shallow, tiny, write_eval_prompts

import train_sft

SMALL = {
    "prompts_per_step": 4,
    "group_size": 4,
    "batch_size": 8,
    "num_inference_steps": 4,
    "window_high": None,
    "memory_text_cache_mb": 0.0,
}
LORA = {"lora_rank": 8, "true_cfg_scale": 4.0}
ADAPTERS = {"lora_rank": 8, "memory_gradient_checkpointing": True}  # of "all weights": without guidance, half the time
CASES = {
    "all weights": ("train_flowgrpo", {}),
    "adapters, guidance, recomputation": ("train_flowgrpo", LORA | {"memory_gradient_checkpointing": True}),
    "adapters, two updates": ("train_flowgrpo", LORA | {"num_minibatches": 2, "ema_decay": 0.9}),
    "forwards without a backward": ("train_flowgrpo", LORA | {"num_minibatches": 2, "old_log_prob": "recompute"}),
    "fewer bits": ("train_flowgrpo", LORA | {"memory_gradient_checkpointing": True, "memory_base_dtype": "nf4"}),
    "NFT": ("train_nft", {"kl_coef": 0.1}),
    "DPO": ("train_dpo", {}),
}


@pytest.fixture(autouse=True)
def _home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write_eval_prompts(tmp_path)


def settings(case):
    """The trainer of a case, and the settings of a dry run."""
    name, changes = CASES[case]
    app = importlib.import_module(name)
    names = {name.replace(".", "_") for name in leaves(app.Args)}
    known = {key: value for key, value in (SMALL | changes).items() if key in names}
    own = {"model": str(shallow()), "dry_run": True, "memory_device_gb": 1.0, "width": 192, "height": 64}
    return app, tiny(recipe(app, "tiny-signs"), **(own | known))


@cache
def measured(app, args, ranks, cache_forwards):
    """The plan of a trainer with those settings, made once."""
    return plan.measure(app.main, args, ranks, cache_forwards=cache_forwards)


def planned(case, ranks=1, *, cache_forwards=True, **changes):
    """The plan of a case with those changes."""
    app, args = settings(case)
    return measured(app, change(args, **changes), ranks, cache_forwards)


def really(app, args, monkeypatch):
    """The most bytes of all tensors in each phase of two real steps on the CPU."""
    meter, phase = Meter(torch.device("cpu")), RunLog.phase

    @contextmanager
    def counted(log, name):
        with phase(log, name), meter.phase(name):
            yield

    monkeypatch.setattr(RunLog, "phase", counted)
    scorer = LocalScorer(plan._grader([]))
    monkeypatch.setattr(World, "connect", lambda *_, **__: (scorer, ""))
    gc.collect()
    with meter:
        args = change(
            args, dry_run=False, memory_device_gb=0.0, async_save=False, train_steps=2, scorer_url="http://a:1"
        )
        app.main(change(args, eval_every=100, save_every=100), World.join(args))
    return meter


@pytest.mark.parametrize("case", sampled(CASES, 1))
def test_a_plan_agrees_with_a_real_step(case, monkeypatch):
    app, args = settings(case)
    monkeypatch.setattr(plan, "_fuse", lambda *_: None)  # a CPU's optimizer takes one parameter after the other
    found = plan.measure(app.main, args, 1)
    real = really(app, args, monkeypatch)
    assert max(found.peaks[name] for name in ("rollout", "decode")) == pytest.approx(real.peaks["rollout"], rel=0.05)
    assert found.peaks["update"] == pytest.approx(real.peaks["update"], rel=0.05)
    assert found.flops["update"] == pytest.approx(real.flops["update"], rel=0.01)


@in_turn(0, 2)
@pytest.mark.parametrize("case", sampled([case for case in CASES if case != "fewer bits"], 1))
def test_one_forward_of_each_shape_tells_what_all_do(case):
    first, every = planned(case), planned(case, cache_forwards=False)
    assert first.flops == every.flops
    for name, peak in every.peaks.items():
        assert first.peaks[name] == pytest.approx(peak, rel=5e-3), name


@pytest.mark.parametrize("sizes", [(8, 8), (32, 8, 32)])
def test_forwards_of_one_backward_are_told_apart(sizes):
    """Bytes and operations of four backwards through several forwards, each of its number of samples."""

    class Pairs:
        boundary, BLOCK_NAMES = 0.0, ()

    def taken(cache_forwards):
        with planned_ranks(1) as dist, plan.PlannedDevice() as device:
            predict, planned = lambda net, x, *_: net(x), plan.PlannedWorld(dist, None, device)
            if cache_forwards:
                predict = planned._cache_velocities(predict, Pairs)
            net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(PLANNED)
            planned._trained[:] = net.parameters()
            params = Params(num_inference_steps=1, height=16, width=16)
            for number in range(4):
                with device.phase(f"{number}"):
                    xs = [torch.ones(size, 16, 64).to(PLANNED) for size in sizes]
                    outs = [predict(net, x, x[:, 0, 0], {}, params) for x in xs]
                    torch.stack([out.sum() for out in outs]).prod().backward()
        planned.clear_cache()
        return device.peaks, device.flops

    first, every = taken(True), taken(False)
    assert first[1] == every[1]
    for number, peak in every[0].items():
        assert first[0][number] == pytest.approx(peak, rel=0.02), number


def test_a_plan_counts_the_samples_of_steps_that_wait():
    """The bytes that a real step keeps, once more for each step, and the same operations of a step."""
    changes = {"lora_rank": 8, "batch_size": 4, "correction_level": "step", "train_steps": 3, "eval_every": 3}
    now, ahead = (planned("all weights", draw_ahead=number, **changes) for number in (0, 4))  # 4 are never ahead of 3
    app, args = settings("all weights")
    run = lone_run(change(args, **changes))
    batches, _ = rollout(run, app.step_params(run, Step(0)))
    kept = [t for batch in batches for t in tree_leaves([batch.cond, batch.x, batch.x_next, batch.x0])]
    size = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}.values())
    for name in ("rollout", "update"):
        assert ahead.peaks[name] - now.peaks[name] == pytest.approx(2 * size, rel=0.05), name
    assert ahead.peaks["save"] == now.peaks["save"]
    assert ahead.num_steps == 4
    assert ahead.flops["update"] / 4 == pytest.approx(now.flops["update"] / 2, rel=1e-6)


def test_sharded_weights_take_a_rank_s_share():
    how = {"model": str(CHECKPOINT), "sharding_mode": "fsdp2", "sharding_unshard": "none"}
    two, four = (planned("all weights", ranks, **how) for ranks in (2, 4))
    assert two.peaks["sync"] / four.peaks["sync"] > 1.5
    assert four.peaks["update"] < two.peaks["update"]


def test_weights_that_a_phase_gathers_are_freed_at_its_end():
    """Gradients too, which are of the gathered weights until they are summed into rows."""
    how = {"model": str(CHECKPOINT), "sharding_mode": "fsdp2", "num_inference_steps": 3}
    none, whole, every = (
        planned("all weights", 4, sharding_unshard=phases, cache_forwards=cache_forwards, **how)
        for phases, cache_forwards in (("none", True), ("all", True), ("all", False))
    )
    assert whole.peaks["rollout"] > 1.2 * none.peaks["rollout"]
    assert whole.peaks["sync"] == none.peaks["sync"]
    assert whole.peaks["update"] == pytest.approx(every.peaks["update"], rel=5e-3)


def test_a_frozen_net_under_adapters_is_sharded_before_a_rank_holds_it(monkeypatch):
    """What a rank loads is the text encoder, the decoder, and its share of the net."""
    app, args = settings("adapters, guidance, recomputation")
    args = change(args, model=str(CHECKPOINT), sharding_mode="fsdp2")

    def load_alone(planned, run, left):
        planned.figures.append(plan.Figures(planned.device.peaks, *[Counter()] * 3, (), ()))
        return iter(())

    monkeypatch.setattr(plan.PlannedWorld, "steps", load_alone)
    one, two, four = (plan.measure(app.main, args, ranks).peaks["load"] for ranks in (1, 2, 4))
    assert plan.measure(app.main, change(args, sharding_size=2), 4).peaks["load"] == pytest.approx(two, rel=0.001)
    assert one - two == pytest.approx(10.5e6 / 2, rel=0.01)  # half of 2.6 million weights in float32
    assert two - four == pytest.approx(10.5e6 / 4, rel=0.01)


def run(app, args, capsys, measure=plan.measure):
    """The exit code of the program, what it prints of its plan, and the first one that was made."""
    found = []

    def kept(*given, **options):
        found.append(measure(*given, **options))
        return found[-1]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plan, "measure", kept)
        with pytest.raises(SystemExit) as ended:
            launch(app.main, args)
    return ended.value.code, re.findall(r"^plan: (.+)$", capsys.readouterr().out, re.MULTILINE), found[0]


def test_a_dry_run_says_whether_a_step_fits_and_what_would(capsys):
    app, args = settings("adapters, two updates")
    code, lines, found = run(app, args, capsys)
    assert code == 0
    assert lines[-1].startswith("fits --memory.device-gb 1, with ")
    assert lines[lines.index("start: new run, in runs/tiny-signs") + 1].startswith("a step without weights runs now, ")
    assert any(line.endswith(": rollout 128 of 60, update 64 of 60") for line in lines)  # both halves of guidance
    assert lines[-1].endswith(" GB left beside 0.08 GB for context, NCCL and fragmentation")
    peak = found.peak / 1e9
    assert float(re.search(r"with ([\d.]+) GB left", lines[-1])[1]) == pytest.approx(0.92 - peak, rel=0.01)
    for share, expected in ((0.93, 1), (0.91, 0)):
        small = change(args, memory_device_gb=peak / share)
        assert run(app, small, capsys, measure=lambda *_, **__: found)[0] == expected
    code, lines, _ = run(app, change(args, memory_device_gb=0.8 * peak), capsys)  # the third plan fits
    assert code == 1
    assert any("is too little: by" in line for line in lines)
    rung = "fit with --memory.decode-batch-size 4 --memory.offload encoder,engine,optimizer"
    assert f"does not {rung}: " in lines[-2]
    assert lines[-1].startswith(f"{rung} --memory.gradient-checkpointing: ".replace("fit", "fits", 1))


def test_a_plan_counts_the_tokens_of_videos():
    app, args = settings("all weights")
    args = change(args, model=str(ROWS["wan22"].checkpoint()), height=32, width=64, num_frames=5)
    told = plan.measure(app.main, change(args, prompts_per_step=1, batch_size=4), 1).describe()
    assert ": rollout 16 of 16, update 8 of 16\n" in told  # 2 latent frames of 2 x 4 patches


def test_rungs_come_by_what_they_cost():
    _, args = settings("adapters, two updates")
    args = change(args, prompts_per_step=16, group_size=8, batch_size=8)
    found = [flags for _, _, flags in plan.propose_changes(args, 2, args.memory.OFFLOAD.split(), ["decode", "update"])]
    recomputed = (
        "--memory.decode-batch-size 4 --memory.offload encoder,engine,optimizer --memory.gradient-checkpointing"
    )
    on_host = recomputed.replace("optimizer", "optimizer,activations")
    blocks = on_host.replace("activations", "activations,blocks")
    assert found == [
        "--memory.decode-batch-size 4 --memory.offload encoder,engine,optimizer",
        recomputed,
        on_host,
        f"{on_host} --batch-size 4",
        f"{on_host} --batch-size 2",
        f"{blocks} --batch-size 2",
        f"{blocks} --batch-size 2 --memory.base-dtype nf4",
        f"{on_host} --batch-size 2 --sharding.mode fsdp2 8 ranks",
    ]
    wide = change(
        args, sharding_mode="fsdp2", memory_gradient_checkpointing=True, batch_size=4, memory_offload="engine"
    )
    found = [(ranks, flags) for _, ranks, flags in plan.propose_changes(wide, 8, ["engine"], ["update"])]
    assert found[0] == (8, "--sharding.unshard none")
    assert found[-1][0] == 16
    threes = [
        ranks
        for _, ranks, _ in plan.propose_changes(
            change(args, batch_size=4, prompts_per_step=27, sharding_context_parallel=3), 3, ["engine"], ["update"]
        )
    ]
    assert threes[-1] == 9
    assert next(plan.propose_changes(args, 2, ["engine"], ["decode"]))[2] == "--memory.decode-batch-size 4"


@pytest.mark.parametrize(("batches", "minibatches", "counts"), [(16, 1, [2, 3]), (16, 2, [2, 4]), (3, 1, [3])])
def test_a_line_goes_through_two_small_steps_of_the_same_form(batches, minibatches, counts):
    _, args = settings("adapters, two updates")
    args = change(args, prompts_per_step=batches, group_size=8, batch_size=8, num_minibatches=minibatches)
    assert plan._prompt_counts(args, 1) == counts


@in_turn(1, 2)
@pytest.mark.parametrize("case", sampled(["adapters, two updates", "NFT", "DPO"], 1))
def test_the_line_leads_to_what_all_batches_take(case, monkeypatch):
    app, args = settings(case)
    args = change(args, prompts_per_step=16, memory_text_cache_mb=1.0)
    by_line = plan.measure(app.main, args, 1)
    monkeypatch.setattr(plan, "_prompt_counts", lambda args, ranks: [args.data.prompts_per_step])
    whole = plan.measure(app.main, args, 1)
    assert by_line.flops == whole.flops
    assert by_line.forwards == whole.forwards
    for name, peak in whole.peaks.items():
        assert by_line.peaks[name] == pytest.approx(peak, rel=0.01), name


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_plan_at_once(number):
    _, args = settings("adapters, two updates")

    def main(args, world):
        os.kill(os.getpid(), number)
        time.sleep(60)

    pid = os.fork()
    if not pid:
        plan.fit(main, args)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + number


def test_a_plan_keeps_the_encoder_on_the_host():
    _, args = settings("all weights")
    with_it, without = (planned("all weights", memory_offload=each, **ADAPTERS) for each in ("encoder", ""))
    folder = open_model(args.policy.model).load(device="cpu", dtype=torch.float32).text_encoder
    freed = sum(tensor.nbytes for tensor in (*folder.parameters(), *folder.buffers()))
    for phase in ("load", "rollout", "update"):
        assert without.peaks[phase] - with_it.peaks[phase] == pytest.approx(freed, rel=0.01)
    assert with_it.peaks["encode"] < without.peaks["encode"] - freed / 2  # a block at a time


def test_float16_takes_as_much_as_bfloat16_and_half_of_the_vae_more():
    half, other = (planned("all weights", dtype=dtype, **ADAPTERS) for dtype in ("float16", "bfloat16"))
    parts = open_model(settings("all weights")[1].policy.model).load(device="cpu", dtype=torch.float16)
    vae = sum(tensor.nbytes for tensor in (*parts.vae.parameters(), *parts.vae.buffers()))
    assert half.peaks["rollout"] - other.peaks["rollout"] == pytest.approx(vae / 2, rel=0.01)
    assert half.peaks["decode"] - other.peaks["decode"] > vae / 2  # in float32
    assert half.peaks["update"] - other.peaks["update"] < vae / 2 + 1e6  # torch's fake scaler copies the gradients


def test_what_a_text_encoder_keeps_in_float32_is_planned():
    encoders = []
    for reads in (True, False):
        model = open_model(ROWS["wan22"].checkpoint())
        model.reads_weights = reads
        encoders.append(model.load(device="cpu", dtype=torch.float16).text_encoder)
    dtypes = [{name: param.dtype for name, param in each.named_parameters()} for each in encoders]
    assert dtypes[0].items() <= dtypes[1].items()  # the library gives only one of two names to a tied weight
    assert {*dtypes[0].values()} == {torch.float16, torch.float32}


def test_another_engine_has_a_second_copy_of_what_lora_changes():
    """In 8 bits of half the bytes; in an update it takes nothing, nor do the text encoder and the VAE."""
    _, args = settings(case := "all weights")
    how = ADAPTERS | {"engine": "vllm-omni", "dtype": "bfloat16", "memory_rollout_dtype": "fp8"}
    own = planned(case, dtype="bfloat16", **ADAPTERS)
    half, whole = planned(case, **how), planned(case, **how | {"memory_rollout_dtype": "auto"})
    parts = open_model(args.policy.model).load(device="cpu", dtype=torch.bfloat16)
    others = sum(p.nbytes for part in (parts.text_encoder, parts.vae) for p in part.parameters())
    adapted = sum(parts.net.get_parameter(name).nbytes for name in quantized_names(open_model(args.policy.model)))
    tables = parts.net.pos_embed.pos_freqs.nbytes + parts.net.pos_embed.neg_freqs.nbytes
    assert whole.peaks["rollout"] - own.peaks["rollout"] == pytest.approx(adapted + tables, rel=0.01)
    assert whole.peaks["rollout"] - half.peaks["rollout"] == pytest.approx(adapted / 2, rel=0.01)
    assert own.peaks["update"] + tables - whole.peaks["update"] == pytest.approx(others, rel=0.02)
    assert half.peaks["update"] == pytest.approx(whole.peaks["update"], rel=1e-3)


def test_a_model_that_the_other_engine_lacks_is_refused():
    model = SimpleNamespace(config={"_class_name": "BagelForConditionalGeneration"})
    with pytest.raises(ValueError, match=r"model must be a FluxPipeline or .* for the vLLM-Omni engine, got a B"):
        quantized_names(model)


def test_a_plan_counts_what_one_compiled_block_keeps_in_a_rollout():
    """As it samples by the graph that is trained; recomputed blocks have as much in an update without a compiler."""
    plain, compiled = (planned("all weights", compile=each, **ADAPTERS) for each in (False, True))
    assert compiled.peaks["rollout"] > 1.05 * plain.peaks["rollout"]
    assert compiled.peaks == plain.peaks | {"rollout": compiled.peaks["rollout"]}
    assert compiled.flops == plain.flops


def test_a_plan_counts_what_waits_on_the_host():
    """The text encoder and AdamW's moments, and the net's weights before they are quantized."""
    case, model = "all weights", str(CHECKPOINT)
    how = ADAPTERS | {"model": model}
    bare, offloaded = (planned(case, memory_offload=each, **how) for each in ("", "encoder,optimizer"))
    quantized = planned(case, memory_base_dtype="nf4", **how)
    parts = open_model(model).load(device="cpu", dtype=torch.float32)
    encoder = sum(tensor.nbytes for tensor in (*parts.text_encoder.parameters(), *parts.text_encoder.buffers()))
    net = sum(p.nbytes for p in parts.net.parameters())
    add_lora(parts.net, open_model(model).LORA_TARGETS, rank=8, alpha=16, seed=0)
    moments = 2 * sum(p.nbytes for p in parts.net.parameters() if p.requires_grad)
    assert offloaded.host - bare.host == pytest.approx(encoder + moments, rel=0.1)
    assert quantized.host - bare.host == pytest.approx(net, rel=0.05)
    assert f"GB: {quantized.host / 1e9:.3g}\n" in quantized.describe()


def test_a_plan_keeps_all_blocks_but_one_on_the_host():
    case, model = "all weights", str(CHECKPOINT)
    how = ADAPTERS | {"model": model}
    streamed, there = (planned(case, memory_offload=each, **how) for each in ("blocks", ""))
    net = open_model(model).load(device="cpu", dtype=torch.float32).net
    *others, _ = (sum(p.nbytes for p in block.parameters()) for block in net.transformer_blocks)
    for phase in ("rollout", "update"):
        assert there.peaks[phase] - streamed.peaks[phase] == pytest.approx(sum(others), rel=0.01)
    add_lora(net, open_model(model).LORA_TARGETS, rank=8, alpha=16, seed=0)
    loaded = sum(p.nbytes for p in net.parameters())
    assert streamed.host - there.host == pytest.approx(loaded, rel=0.02)


def test_a_plan_counts_the_scorer_that_the_run_starts(capsys):
    """PickScore's 986 million weights in float32, from load to save; none of a scorer on the CPU or of another's."""
    app, args = settings("all weights")
    bare = planned("all weights")
    code, lines, scored = run(app, change(args, memory_device_gb=1e3, scorer_name="pickscore"), capsys)
    assert code == 0
    assert "of these the scorer's, GB: 4.21 (weights 3.94, a batch 0.262)" in lines
    assert scored.scorer["weights"] == pytest.approx(4 * 986_109_441, rel=1e-5)
    for phase in ("load", "rollout", "update", "save"):
        assert scored.peaks[phase] - bare.peaks[phase] == pytest.approx(scored.scorer.total(), rel=1e-3)
    for own in ("pickscore --option device=cpu", "jpeg"):
        assert plan.scorer_bytes(change(args, scorer_name=own).scorer, 1).total() == 0
    assert not plan.scorer_bytes(change(args, scorer_name="pickscore", scorer_url="http://a:1").scorer, 1)


def test_a_plan_refuses_a_scorer_that_would_not_start():
    app, args = settings("all weights")
    with pytest.raises(ValueError, match="--scorer: dtype must be one of"):
        plan.measure(app.main, change(args, scorer_name="pickscore --option dtype=int4"), 1)


def test_a_plan_reads_references_below_the_media_root(tmp_path):
    (tmp_path / "media").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "media" / "a.png")
    prompts = tmp_path / "prompts" / "a.jsonl"
    prompts.parent.mkdir()
    prompts.write_text(json.dumps({"prompt": "x", "images": str(tmp_path / "media" / "a.png")}))
    args = change(train_sft.Args(), prompts=str(prompts), media_root=str(tmp_path / "media"), prompts_per_step=2)
    assert [len(record.images) for record in plan._RepeatedPrompt(args).at(0)] == [1, 1]


def test_a_plan_needs_no_weights_and_leaves_nothing_behind(tmp_path):
    app, args = settings("all weights")
    shutil.copytree(args.policy.model, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    plan.measure(app.main, change(args, model=str(tmp_path / "model")), 1)
    assert {path.name for path in tmp_path.iterdir()} == {"eval.txt", "model"}
    assert torch.ones(2).device.index is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dry_run": False, "scorer_url": "http://a:1"}, "needs --dry-run"), ({"memory_device_gb": -1.0}, "must be >= 0")],
)
def test_settings_that_do_not_fit_are_refused(changes, message):
    app, args = settings("all weights")
    with pytest.raises(ValueError, match=message):
        app.check_args(change(args, **changes))
