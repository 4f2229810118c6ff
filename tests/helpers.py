"""What several tests share."""

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
    """What float32 sums in another order may differ by: units in the last place of terms as large as `largest`.

    Kernels of other CPUs add in another order, so a bound is made of the largest term and not of what one CPU gave.
    """
    return count * 2.0**-23 * float(largest)


def public_names(package):
    """What a package's __init__ imports for its users."""
    return {name for name, value in vars(package).items() if name[0] != "_" and not inspect.ismodule(value)}


def absolute_paths(folder):
    """What the JSON files of a folder say of places on the machine that wrote them."""
    files = sorted(Path(folder).rglob("*.json"))
    assert files, folder
    return [(file.name, found) for file in files for found in re.findall(r'": "(/.+)"', file.read_text("utf-8"))]


def names(folder):
    """The names of what is in a folder, in order."""
    return sorted(path.name for path in folder.iterdir())


def filled(value):
    """A net with all weights equal."""
    import torch

    net = torch.nn.Linear(2, 3)
    for p in net.parameters():
        torch.nn.init.constant_(p, value)
    return net


def load_newest(checkpoints, *parts):
    """What `Checkpoint.latest` finds, loaded into the parts."""
    checkpoints.load(saved := checkpoints.latest(), *parts)
    return saved


def capture_graphs(monkeypatch):
    """Compile nothing; return the graphs that are captured, and the numbers of those that have run."""
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
    """The recipes of a trainer by name, read once."""
    from omni_rl.settings.toml import recipes

    return recipes(app)


def in_turn(number, count):
    """A decorator of one of `count` long tests that show alike: TEST_SEED draws one, and the others are marked slow."""
    drawn = random.Random(f"{TEST_SEED} turns").randrange(math.factorial(8))
    return (lambda test: test) if drawn % count == number else pytest.mark.slow


def sampled(cases, count, *, always=()):
    """The cases as test parameters, marked slow but for those of `always` and `count` others that TEST_SEED draws."""
    assert not isinstance(cases, set), "cases must have an order, which is the same for all workers of pytest"
    others = sorted(case for case in cases if case not in always)
    chosen = {*always, *random.Random(f"{TEST_SEED} {others}").sample(others, count)}
    return [pytest.param(case, id=str(case), marks=() if case in chosen else pytest.mark.slow) for case in cases]
