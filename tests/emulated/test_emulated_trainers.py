"""Every trainer on an accelerator without float64, float8 and complex numbers: the CPU's bits, also where interrupted.

A tensor on the wrong device ends a run here, as it would on any accelerator.
"""

import pytest
from emulated import emulated_runs as runs
from emulated.npu import build, load_strict
from helpers import in_turn, sampled
from records import record
from trainer_table import cases


@pytest.fixture(scope="module")
def url():
    """URL of a server in this process that scores brightness."""
    build()
    with record.scoring() as url:
        yield url


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases("trains on an accelerator to the bit as on the CPU"))
def test_an_accelerator_trains_like_the_cpu_and_continues(tmp_path, url, fresh, case):
    """One rank with LoRA computes activations again on the accelerator, and keeps them on the CPU."""
    how = {"memory_gradient_checkpointing": True} if case[1:] == ("LoRA", "one rank") else {}
    expected = fresh(runs.run_row, case, tmp_path / "cpu", url, before=runs.compute_like_accelerators)
    found = fresh(runs.run_row, case, tmp_path / "npu", url, lives=(1, 2), before=runs.tell_algorithms, **how)
    assert "continues after step 1" in found.text
    assert "on npu" in found.text
    told = [line for line in found.text.splitlines() if line.endswith(" algorithms")]
    assert sorted(told) == ["backward by deterministic algorithms", "forward by warned algorithms"]  # as an NPU is set
    assert found.lines == expected.lines
    assert found.weights == expected.weights


HALVES = [
    ("flowgrpo", "LoRA", "one rank"),
    ("nft", "LoRA", "ddp"),
    ("sft", "all weights", "fsdp2"),
    ("sft of texts", "LoRA", "one rank"),
    ("gspo", "LoRA", "one rank"),
]


@in_turn(0, 2)
@pytest.mark.parametrize("case", sampled(HALVES, 1))
def test_without_bfloat16_a_loss_in_float16_is_scaled_and_a_run_continues_with_its_factor(tmp_path, url, fresh, case):
    how = {"before": runs.tell_factors, "memory_gradient_checkpointing": True}
    whole = fresh(runs.run_row, case, tmp_path / "whole", url, dtype="float16", **how)
    found = fresh(runs.run_row, case, tmp_path / "found", url, lives=(1, 2), dtype="float16", **how)
    told = [line for line in whole.text.splitlines() if line.startswith("times ")]
    assert told[0] == "times 65536" != told[len(told) // 2]
    assert [line for line in found.text.splitlines() if line.startswith("times ")] == told[len(told) // 2 :]
    assert found.lines == whole.lines
    assert found.weights == whole.weights
    other = fresh(runs.run_row, case, tmp_path / "plain", url, dtype="float32", **how)
    assert whole.lines[1] != other.lines[1]
    for name in ("policy/grad_norm", "policy/loss") if case[0] != "gspo" else ():  # which draws other answers
        assert whole.lines[1][name] == pytest.approx(other.lines[1][name], rel=0.05, abs=1e-4)


@in_turn(1, 2)
def test_by_any_algorithms_two_runs_differ(tmp_path, url, fresh):
    case, how = ("nft", "all weights", "one rank"), {"before": load_strict, "deterministic": False}
    found = [fresh(runs.run_row, case, tmp_path / name, url, **how) for name in ("one", "other")]
    assert found[0].weights != found[1].weights
