"""Helpers of several tests."""

import inspect
import math
import os
import random
import re
from functools import cache, partial
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
CHECKPOINT = REPO / "checkpoints" / "tiny-signs-qwen-image"
TRAINERS = sorted(path.stem for path in (REPO / "apps").glob("train_*.py"))
TEXT_TRAINERS = [name for name in TRAINERS if name == "train_gspo" or name.endswith("_tokens")]
TEST_SEED = os.environ.get("TEST_SEED", "0")


def ulps(count, largest=1.0):
    """Return a bound on how much float32 sums in another order may differ, in units in the last place of `largest`.

    Kernels of other CPUs add in another order, so a bound is based on the largest term, not on one CPU's result.
    """
    return count * 2.0**-23 * float(largest)


def public_names(package):
    """Return the names that a package's __init__ exports to users."""
    return {name for name, value in vars(package).items() if name[0] != "_" and not inspect.ismodule(value)}


def absolute_paths(folder):
    """Return the absolute paths that the JSON files of a folder contain."""
    files = sorted(Path(folder).rglob("*.json"))
    assert files, folder
    return [(file.name, found) for file in files for found in re.findall(r'": "(/.+)"', file.read_text("utf-8"))]


def names(folder):
    """Return the sorted names of a folder's entries."""
    return sorted(path.name for path in folder.iterdir())


def filled(value):
    """Return a net with all weights equal."""
    import torch

    net = torch.nn.Linear(2, 3)
    for p in net.parameters():
        torch.nn.init.constant_(p, value)
    return net


def load_newest(checkpoints, *parts):
    """Load the checkpoint that `Checkpoint.latest` finds into the parts, and return it."""
    checkpoints.load(saved := checkpoints.latest(), *parts)
    return saved


def capture_graphs(monkeypatch):
    """Compile nothing; return the captured graphs and the numbers of the graphs that have run."""
    import torch

    graphs, ran = [], []

    def keep(graph, inputs, **options):
        number = len(graphs)
        graphs.append(graph)

        def run_graph(*args):
            ran.append(number)
            return graph.forward(*args)

        return run_graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    return graphs, ran


@cache
def recipe_texts(app):
    """Return a trainer's recipes by name, read once."""
    from omni_rl.settings.toml import load_recipes

    return load_recipes(app)


def in_turn(number, count):
    """Return a decorator for one of `count` long, similar tests: those that TEST_SEED does not select are slow."""
    drawn = random.Random(f"{TEST_SEED} turns").randrange(math.factorial(8))
    return (lambda test: test) if drawn % count == number else pytest.mark.slow


def sampled(cases, count, *, always=()):
    """Return the cases as test parameters, marked slow except `always` and `count` others that TEST_SEED selects."""
    assert not isinstance(cases, set), "cases must have an order, which is the same for all workers of pytest"
    others = sorted(case for case in cases if case not in always)
    chosen = {*always, *random.Random(f"{TEST_SEED} {others}").sample(others, count)}
    return [pytest.param(case, id=str(case), marks=() if case in chosen else pytest.mark.slow) for case in cases]
