"""What only measures or shows a run cannot end it: each breaks in turn, and the run ends as if nothing had broken."""

import os
import re
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import omni_rl.flow.sampling
import omni_rl.run.session
import omni_train.display
import omni_train.log
import pytest
import torch
from helpers import sampled
from model_rows import ROWS
from omni_rl.report.process import ReportProcess
from omni_rl.run import costs, evaluation, run, start
from omni_rl.run.alarms import Watch
from omni_rl.run.failures import BrokenRunError
from omni_rl.settings.fields import change
from omni_rollout.models import open_model
from omni_rollout.models.routing import ExpertLoad
from omni_train.flops import FlopTable
from omni_train.prepare import Lora, Preparation, adapt_like, prepare
from row_runs import settings
from trainer_runs import exported, lose_step, recipe, tiny, train, train_on_ranks, unclocked, write_eval_prompts

import train_flowgrpo as app

TINY = tiny(
    recipe(app, "tiny-signs"), algo="flowgrpo", noise_level=0.7, window_low=0, window_high=None, prompts_per_step=2,
    group_size=2, batch_size=4, lr=1e-3, optim_lr_scheduler_type="constant", lora_rank=4, profile=1,
    train_steps=1, eval_every=1, num_inference_steps=2, width=32,
)  # fmt: skip
FAILS = "raise LookupError('a sensor is gone')"
WHY = "LookupError: a sensor is gone"
TRACKER = """
def init(**how):
    {}
    return Run()
class Run:
    def log(self, *a, **b): {}
    def finish(self): pass
class Image:
    def __init__(self, *a): pass
"""


def broken(*args, **kwargs):
    """In place of any function: it fails."""
    raise LookupError("a sensor is gone")


SINK = "a sink of the log"  # which is called again
HERE = {  # what is replaced, the name of what fails, and the metrics that the run then lacks
    "operations of a call": (FlopTable, "_record_call", "the count of operations", ".*_tflops"),
    "operations of a step": (FlopTable, "_total", "the count of operations", ".*_tflops"),
    "memory": (run, "memory", "the memory in use", ".*memory.*"),
    "costs": (costs, "rank_costs", "the count of forwards", "perf/(forwards|backwards|cpu_s|.*_tflops)"),
    "peak of the device": (start, "peak_tflops", "the peak of the device", ".*_mfu"),
    "alarms": (Watch, "update", "the alarms", ""),
    "model card": (evaluation, "model_card", "the model card", ""),
    "rows of samples": (omni_rl.flow.sampling, "_report_samples", "the samples of the report", ""),
    "samples of a step": (ReportProcess, "show_samples", "the samples of the report", ""),
    "samples of an evaluation": (ReportProcess, "show_eval", "the samples of the report", ""),
    "wait for images": (ReportProcess, "wait", "the report", ""),
    "lines for the report": (ReportProcess, "__call__", SINK, ""),
    "end of the report": (ReportProcess, "close", SINK, ""),
    "process of the report": (omni_rl.run.session, "ReportProcess", "the report", ""),
    "versions": (omni_rl.run.session, "write_versions", "the record of versions", ""),
    "progress": (omni_train.display._Lines, "update", "the progress on the terminal", ""),
    "clock": (omni_train.log, "now", "the clock of phases", "time/.*|.*_tflops"),
    "seconds": (omni_train.log, "seconds", "the clock of phases", "time/.*|.*_tflops"),
    "trace's beginning": (torch.profiler.profile, "start", "the profile", ""),
    "trace's end": (torch.profiler.profile, "stop", "the profile", ""),
    "trace's file": (torch.profiler.profile, "export_chrome_trace", "the profile", ""),
}


def trained(args, name, tracker=""):
    """The lines of a run with all that measures and shows, and its weights."""
    return train(app, change(args, name=name), report=True, flops=True), exported(name)


def warnings_of(text):
    """What failed, and the other warnings."""
    return [line for line in text.splitlines() if line.startswith(("WARNING", "Traceback", "rank"))]


def assert_alike(first, second, without=""):
    """Both runs have the same weights, to the bit, and metrics, of which the first lacks those of that pattern."""
    (lines, weights), (others, other_weights) = first, second
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert unclocked(lines) == unclocked(others)
    for line, other in zip(lines, others, strict=True):
        lacks = {name for name in other if re.fullmatch(without, name)} - {"time/step_s"}
        assert other.keys() - line.keys() == lacks


@pytest.fixture(scope="module")
def plain(bright_url, tmp_path_factory):
    """The run in which nothing breaks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("plain"))
        write_eval_prompts(Path())
        return trained(change(TINY, scorer_url=bright_url), "plain")


@pytest.mark.parametrize("what", sampled(HERE, 2))
def test_what_measures_fails_with_one_line(here, bright_url, plain, what, monkeypatch, capfd):
    owner, attribute, name, without = HERE[what]
    monkeypatch.setattr(owner, attribute, broken)
    found = trained(change(TINY, scorer_url=bright_url), "broken")
    monkeypatch.undo()
    failed = "failed" if name == SINK else "failed and is switched off"
    assert warnings_of(capfd.readouterr().err) == [f"WARNING: {name} {failed}: {WHY}"]
    assert_alike(found, plain, without)


def test_a_hook_that_counts_forwards_is_switched_off(here, bright_url, plain, monkeypatch, capfd):
    read_media = app.read_media
    monkeypatch.setattr(app, "read_media", lambda *args, **how: replace(read_media(*args, **how), count_samples=broken))
    found = trained(change(TINY, scorer_url=bright_url), "broken")
    assert warnings_of(capfd.readouterr().err) == [f"WARNING: the count of forwards failed and is switched off: {WHY}"]
    assert_alike(found, plain, HERE["costs"][3])


@pytest.mark.parametrize(
    ("taken", "name"),
    [("run/report.html/taken", "the page of the report"), ("run/eval", "the samples of the report")],
    ids=["page", "images"],
)
def test_what_the_report_s_process_cannot_write_is_a_warning(here, bright_url, plain, taken, name, capfd):
    """A file stands where a folder goes, or a folder where the page goes."""
    place = Path("runs") / taken
    place.parent.mkdir(parents=True)
    place.touch()
    found = trained(change(TINY, scorer_url=bright_url), "run")
    told = warnings_of(capfd.readouterr().err)
    assert len(told) == 1
    assert told[0].startswith(f"WARNING: {name} failed: ")
    assert_alike(found, plain)


def test_a_tracker_that_fails_is_a_warning_and_one_that_does_not_open_ends_only_a_new_run(
    here, bright_url, plain, monkeypatch, capfd
):
    monkeypatch.setenv("PYTHONPATH", str(here), prepend=os.pathsep)
    monkeypatch.syspath_prepend(here)
    args = change(TINY, scorer_url=bright_url, tracking_to="wandb")
    library = here / "wandb.py"
    library.write_text(TRACKER.format("pass", FAILS))
    assert_alike(trained(args, "logs"), plain)
    assert warnings_of(capfd.readouterr().err) == [f"WARNING: the tracker wandb failed: {WHY}"]
    library.write_text(TRACKER.format(FAILS, "pass"))
    with pytest.raises(ValueError, match=f"--tracking.to must be a tracker that opens, got wandb: {WHY}"):
        trained(args, "new")
    capfd.readouterr()
    lose_step("logs", 1)
    lines, weights = trained(args, "logs")
    assert unclocked(lines) == unclocked(plain[0])
    assert all(torch.equal(weights[name], tensor) for name, tensor in plain[1].items())
    assert warnings_of(capfd.readouterr().err) == [f"WARNING: a tracker failed and is switched off: {WHY}"]


def test_a_terminal_that_is_gone_ends_no_run(here, bright_url, plain, monkeypatch, capfd):
    """As in `omni-rl train ... | head -1`."""

    class Gone:
        def write(self, text):
            raise BrokenPipeError("Broken pipe")

        def isatty(self):
            return False

    with monkeypatch.context() as patch:
        patch.setattr(omni_rl.run.session.Session, "claim", quietly(omni_rl.run.session.Session.claim, patch, Gone()))
        found = trained(change(TINY, scorer_url=bright_url, profile=0), "gone")
    (told,) = warnings_of(capfd.readouterr().err)
    assert told == "WARNING: the progress on the terminal failed and is switched off: BrokenPipeError: Broken pipe"
    assert_alike(found, plain)


def quietly(claim, patch, terminal):
    """The first line of a run, after which its terminal is gone."""

    def claimed(*args):
        claim(*args)
        patch.setattr(sys, "stdout", terminal)

    return claimed


def test_the_load_of_experts_is_switched_off(here, bright_urls, monkeypatch, capfd):
    args = settings("hunyuan-image", "flowgrpo", here, bright_urls, train_steps=1, eval_every=1)
    args = change(args, lora_rank=2)
    plain = train(app, change(args, name="plain")), exported("plain")
    for name in ("count", "metrics"):
        with monkeypatch.context() as patch:
            patch.setattr(ExpertLoad, name, broken)
            found = train(app, change(args, name=name)), exported(name)
        told = warnings_of(capfd.readouterr().err)
        assert told == [f"WARNING: the load of experts failed and is switched off: {WHY}"]
        assert unclocked(found[0]) == [
            {name: value for name, value in line.items() if "/experts_" not in name} for line in unclocked(plain[0])
        ]
        assert all(torch.equal(found[1][name], tensor) for name, tensor in plain[1].items())


def test_a_rank_whose_counts_fail_does_not_keep_the_others_waiting(here, bright_url, monkeypatch, capfd):
    args = change(TINY, scorer_url=bright_url, batch_size=2, sharding_mode="ddp")
    plain = train_on_ranks(app, change(args, name="plain")), exported("plain")
    own_costs = costs.rank_costs
    monkeypatch.setattr(costs, "rank_costs", lambda run, cpu_s: (broken if run.dist.rank else own_costs)(run, cpu_s))
    found = train_on_ranks(app, change(args, name="broken")), exported("broken")
    told = warnings_of(capfd.readouterr().err)
    assert told == [f"WARNING: rank 1: the count of forwards failed and is switched off: {WHY}"]
    assert "perf/forwards" in plain[0][-1]
    assert not [name for line in found[0] for name in line if name in ("perf/forwards", "perf/backwards", "perf/cpu_s")]
    assert unclocked(found[0]) == unclocked(plain[0])
    assert all(torch.equal(found[1][name], tensor) for name, tensor in plain[1].items())


def test_what_a_run_s_data_depends_on_still_ends_it(here, bright_url, monkeypatch):
    monkeypatch.setattr(omni_train.log.RunLog, "_write", broken)
    with pytest.raises(BrokenRunError, match=WHY):
        trained(change(TINY, scorer_url=bright_url), "run")


def test_operations_are_counted_in_bfloat16(here, bright_urls):
    """Of a net with convolutions, which take no input of another data type than their bias."""
    args = settings("wan21", "flowgrpo", here, bright_urls, train_steps=1, eval_every=1)
    lines = train(app, change(args, lora_rank=2, dtype="bfloat16"), flops=True)
    assert lines[-1]["perf/update_tflops"] > 0


DTYPES = {
    "bfloat16": {},
    "float16": {"dtype": torch.float16},
    "adapters in float32": {"in_float32": True},
    "fewer bits": {"base_dtype": "nf4"},
    "all weights": {"rank": 0},
}


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("name", sampled(ROWS, 1))
def test_the_counted_net_has_the_data_types_of_the_real_one(name, kind):
    model = open_model(ROWS[name].checkpoint())
    own = {"dtype": torch.bfloat16, "in_float32": False, "base_dtype": "auto", "rank": 2} | DTYPES[kind]
    lora = Lora(model.LORA_TARGETS, own["rank"], 2, "default", 0, in_float32=own["in_float32"])
    host = torch.device("cpu")
    how = Preparation(
        host, model.BLOCK_NAMES, own["dtype"], lora=lora if own["rank"] else None, base_dtype=own["base_dtype"]
    )
    if how.lora:
        real = prepare(model.load_net(device=host, dtype=how.dtype), how)
    else:
        real = prepare(model.empty_net(buffers=True), how)
    counted = adapt_like(model.empty_net(), how, real)
    types, counted_types = (
        {n: t.dtype for n, t in chain(net.named_parameters(), net.named_buffers())} for net in (real, counted)
    )
    codes = {name for name in types if name.endswith((".codes", ".scales", ".table"))}
    assert bool(codes) == (kind == "fewer bits")
    assert types.keys() - codes <= counted_types.keys()
    rest = counted_types.keys() - types.keys()
    assert all(name.endswith(".weight") and f"{name.removesuffix('weight')}codes" in codes for name in rest)
    assert {n: counted_types[n] for n in types.keys() - codes} == {n: types[n] for n in types.keys() - codes}
    assert {counted_types[name] for name in rest} <= {how.dtype}
    assert {p.requires_grad for p in counted.parameters()} == {True, *[False] * bool(how.lora)}
