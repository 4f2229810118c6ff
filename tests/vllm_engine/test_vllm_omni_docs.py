"""What docs/engines.md, docs/evidence/performance.md and READMEs say: commands run, names exist, traps are tested.

The tests of traps that no other file has are here too. Output is captured below Python (capfd), since vLLM-Omni wants a
stdout with a file descriptor.
"""

import os
import re
import shlex

import pytest
import setproctitle
import torch
from helpers import REPO
from omni_rollout import Prompt
from vllm_omni_helpers import PARAMS, open_engine

PAGE = (REPO / "docs" / "engines.md").read_text("utf-8")
TRAPS = (REPO / "tests" / "vllm_engine" / "README.md").read_text("utf-8")
README = (REPO / "packages" / "omni-rollout" / "README.md").read_text("utf-8")
PROMPTS = [Prompt('a red sign that says "AB"', group=0, index=0, seed=0)]


def commands(page):
    """The words of every command of the page's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", page.replace("\\\n", " "), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def traps():
    """The cells of the rows of the table of traps."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TRAPS.splitlines() if line.startswith("| ")
    ][1:]


@pytest.fixture
def benchmark(monkeypatch):
    """benchmarks/engines.py."""
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    import engines

    return engines


def rows(capfd):
    """The rows of the one table that was printed."""
    _, _, *lines = capfd.readouterr().out.splitlines()
    assert all(line.startswith("| ") for line in lines)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_class_of_a_model_is_shown_as_it_is():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    source = REPO / "packages" / "omni-rollout" / "src" / "omni_rollout" / "engines" / "vllm_omni" / "pipelines.py"
    assert block in source.read_text("utf-8")


def test_the_example_of_the_readme_runs(monkeypatch, capfd):
    monkeypatch.chdir(REPO)
    exec(re.findall(r"```python\n(.*?)```", README, re.DOTALL)[1], {})
    assert re.fullmatch(r"\d{7} bytes adopted, 0 moved, version 1\n", capfd.readouterr().out)


def test_variables_that_are_set_keep_their_values(monkeypatch):
    """Those of the table; the values are none that vLLM-Omni would set."""
    names = re.findall(r"`([A-Z_]+)`", traps()[0][0])
    assert len(names) == 7
    for i, name in enumerate(names):
        monkeypatch.setenv(name, "" if name == "LD_PRELOAD" else f"{70 + i}")
    before = dict(os.environ)
    open_engine().close()
    assert {name: os.environ.get(name) for name in names} == {name: before[name] for name in names}


def test_the_title_of_the_process_is_put_back(monkeypatch):
    """Of a stand-in, as the real functions do nothing in a process whose environment has grown, as it has here."""
    titles = ["a training run"]
    monkeypatch.setattr(setproctitle, "getproctitle", lambda: titles[-1])
    monkeypatch.setattr(setproctitle, "setproctitle", titles.append)
    open_engine().close()
    assert titles == ["a training run", "vLLM-Omni::DiffusionWorker", "a training run"]


def test_a_second_engine_at_the_same_time_is_refused():
    engine = open_engine()
    before = engine.generate(PROMPTS, PARAMS)
    with pytest.raises(RuntimeError):
        open_engine()
    assert torch.equal(engine.generate(PROMPTS, PARAMS).x0, before.x0)
    assert not torch.distributed.is_initialized()
    engine.close()


def test_torchvision_imports_without_its_kernels():
    from torchvision.transforms import v2

    assert v2.Resize(4)(torch.zeros(3, 8, 8)).shape == (3, 4, 4)


def test_the_parity_benchmark_prints_its_table(benchmark, capfd):
    benchmark.parity(benchmark.Parity(num_inference_steps=2, batch_size=2, dtype="float32", random=1, random_heads=1))
    found = rows(capfd)
    assert [row[:3] for row in found] == [
        ["float32", step, guidance] for step in ("sde", "cps", "dance") for guidance in ("off", "4")
    ]
    for row in found:
        before, early, stale, lora, full, x0 = map(float, row[3:])
        assert early <= before
        assert max(before, lora, full) <= 2e-6 < 1e-5 < stale
        assert x0 <= 1e-5


def test_the_speed_benchmark_prints_its_table(benchmark, capfd):
    benchmark.speed(benchmark.Speed(num_inference_steps=2, batch_size=2, rounds=1))
    found = {row[0]: row[1:] for row in rows(capfd)}
    moved = [float(found[f"sync, {what}, MB moved"][1]) for what in ("all weights copied", "all weights shared")]
    assert moved[0] > 9
    assert moved[1] == 0
    assert all(float(found[f"images/s, {guidance}"][2]) > 0 for guidance in ("no guidance", "guidance 4"))
