"""A ratio that is not 1 before the first update: devices whose kernels differ with gradients, or do not repeat."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from helpers import sampled
from omni_rl.run.failures import advise
from omni_rl.settings.fields import change, leaves
from omni_rollout.models import bagel_sequence
from torch.nn import functional
from trainer_runs import train, train_on_ranks
from trainer_table import settings as row_settings

ATTENTION = functional.scaled_dot_product_attention
ENDS = {"eval_every": 9, "eval_first": False}
OWN = {"flowgrpo": {"clip_range": 1e-4, "num_inner_epochs": 1, "optim_lr_scheduler_type": "constant"}}
TRAINERS = ["flowgrpo", "awm", "gspo", "unigrpo"]
CASES = [f"{name} on {ranks}" for name in TRAINERS for ranks in (1, 2)]
ON_RANKS = sampled(CASES, 1)


def by_gradients(*args, **kwargs):
    """Attention as by a device that has another kernel where a gradient is wanted."""
    out = ATTENTION(*args, **kwargs)
    return out * (1 + 2**-20) if torch.is_grad_enabled() else out


def noisy(*args, **kwargs):
    """Attention as by a device that adds in any order."""
    out = ATTENTION(*args, **kwargs)
    return out * (1 + 2**-17 * torch.randn_like(out))


@pytest.fixture
def settings(here, bright_url):
    """`settings(name, **changes)`: a trainer and its settings, in a working folder of their own."""
    return lambda name, **changes: row_settings(name, bright_url, **(ENDS | OWN.get(name, {}) | changes))


def give_attention(monkeypatch, attention):
    for place in (functional, bagel_sequence):
        monkeypatch.setattr(place, "scaled_dot_product_attention", attention)


def then_changed(sample, *, by):
    """The function, after which the weights are others."""

    def changed(run, *args, **options):
        result = sample(run, *args, **options)
        with torch.no_grad():
            for param in run.policy.params:
                param.mul_(1 + by)
        return result

    return changed


def run_on(ranks, app, args):
    return train(app, args) if ranks == 1 else train_on_ranks(app, args, ranks=ranks)


def gates(name="run"):
    """The class that each checkpoint of a run names."""
    places = sorted(Path(f"runs/{name}/checkpoints").glob("step-*/checkpoint.json"))
    return [json.loads(place.read_text())["config"].get("gate") for place in places]


@pytest.mark.parametrize("case", ON_RANKS)
def test_a_run_goes_on_where_kernels_differ_with_gradients(settings, monkeypatch, case):
    name, _, ranks = case.partition(" on ")
    app, args = settings(name, save_every=1)
    give_attention(monkeypatch, by_gradients)
    first, second = run_on(int(ranks), app, args)[-2:]
    assert 0 < first["policy/gap_by_gradients"] < 1e-4
    assert "policy/gap_by_gradients" not in second
    assert first["policy/grad_norm"] > 0 < second["policy/grad_norm"]
    assert gates()[-2:] == ["by-gradients"] * 2


@pytest.mark.parametrize("case", ON_RANKS)
def test_a_run_goes_on_where_kernels_do_not_repeat_themselves(settings, monkeypatch, case):
    name, _, ranks = case.partition(" on ")
    app, args = settings(name, save_every=1)
    give_attention(monkeypatch, noisy)
    first, second = run_on(int(ranks), app, args)[-2:]
    assert 0 < first["policy/gap_noisy"] < 1e-4
    assert first["policy/grad_norm"] > 0 < second["policy/grad_norm"]
    assert gates()[-2:] == ["noisy"] * 2


def test_all_ranks_take_the_worst_class_of_any(settings, monkeypatch):
    app, args = settings("flowgrpo", save_every=1)
    kinds = {"0": by_gradients, "1": noisy}
    give_attention(monkeypatch, lambda *args, **kwargs: kinds[os.environ["RANK"]](*args, **kwargs))
    assert train_on_ranks(app, args)[-2]["policy/gap_noisy"] > 0
    assert gates()[-2:] == ["noisy"] * 2


@pytest.mark.parametrize("case", ON_RANKS)
def test_weights_that_changed_behind_the_engine_stop_a_run(settings, monkeypatch, case):
    name, _, ranks = case.partition(" on ")
    app, args = settings(name)
    drawn = "sample_round" if name == "gspo" else "sample"
    monkeypatch.setattr(app, drawn, then_changed(getattr(app, drawn), by=1e-2))
    with pytest.raises(Exception, match=r"before the first update the ratio must be 1"):
        run_on(int(ranks), app, args)


def test_a_change_as_small_as_rounding_stops_a_run_whose_kernels_repeat_themselves(settings, monkeypatch):
    app, args = settings("flowgrpo")
    monkeypatch.setattr(app, "sample", then_changed(app.sample, by=2e-6))
    off = r"the ratio must be 1 within 0.0, but is off by \d(\.\d+)?e-0[67]:"
    with pytest.raises(RuntimeError, match=off) as stopped:
        train(app, args)
    assert "--old-log-prob recompute with --ratio-tolerance, above" in advise(stopped.value, args)
    assert train(app, change(args, name="other", old_log_prob="recompute", ratio_tolerance=1e-5))


@pytest.mark.parametrize("name", TRAINERS)
def test_the_advice_on_a_ratio_names_only_flags_of_the_trainer_that_are_not_set(settings, name):
    _, args = settings(name)
    named = advise(RuntimeError("the ratio must be 1"), args)
    flags = {found.replace("-", "_") for found in re.findall(r"--([a-z-]+)", named)}
    own = {"flowgrpo": {"old_log_prob", "ratio_tolerance"}, "awm": set()}.get(name, {"ratio_tolerance"})
    assert flags == own | {"attention"} | ({"name"} if own else set()) <= set(leaves(type(args)))
    compiled = change(args, attention="math", **({"compile": True} if "compile" in leaves(type(args)) else {}))
    named = advise(RuntimeError("the ratio must be 1"), compiled)
    assert "--attention" not in named
    assert ("--no-compile" in named) == ("compile" in leaves(type(args)))


def test_a_run_that_goes_on_keeps_its_class(settings, monkeypatch):
    app, args = settings("flowgrpo", save_every=1)
    with monkeypatch.context() as patched:
        give_attention(patched, by_gradients)
        train(app, change(args, train_steps=1))
    line = train(app, args)[-1]
    assert "policy/gap_by_gradients" not in line
    assert gates()[-1] == "by-gradients"


def test_a_tolerance_given_by_hand_is_kept(settings, monkeypatch):
    app, args = settings("flowgrpo", ratio_tolerance=0.0)
    give_attention(monkeypatch, by_gradients)
    with pytest.raises(RuntimeError, match=r"the ratio must be 1 within 0.0"):
        train(app, args)


@pytest.mark.parametrize("name", sampled(TRAINERS, 1))
def test_an_exact_run_is_not_touched(settings, name):
    app, args = settings(name)
    lines = train(app, args)
    assert not any("policy/gap_by_gradients" in line or "policy/gap_noisy" in line for line in lines)
    assert set(gates()) == {None}
