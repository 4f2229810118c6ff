"""Short runs of the trainers beside the record of the same runs: `runs.json`, which `record.py` writes.

Where torch and the processor are those of the record, every number must be the same to the last bit, and so must the
exported weights. Elsewhere the numbers must agree within TOLERANCE, and weights are not compared.
"""

import json
from dataclasses import replace

import pytest
from helpers import sampled
from records import record
from trainer_runs import spared

RECORD = json.loads(record.FILE.read_text())
IS_SAME_MACHINE = RECORD["machine"] == record.machine()
DRAWN = {"grpo": 1, "nft": 1, "awm": 1, "dpo": 1, "srpo": 1, "distill": 1}  # of each kind, beside those of ALWAYS
ALWAYS = {"grpo-lora-ddp"}
TOLERANCE = {"rel": 1e-3, "abs": 1e-5}  # what rounding elsewhere makes of two steps; losses near 0 are differences
COARSE = 50  # times as much in bfloat16 for what scores' differences make: other kernels moved it by up to 3.4 %
SCORES = {"reward/mean", "reward/min", "reward/max", "eval/reward"}  # scores and their means, no differences


def names(kind):
    return [name for name in record.CASES if name.partition("-")[0] == kind]


def largest_error(metric, line):
    """The absolute error of a metric elsewhere; of advantages, and of their mean in a loss, that of scores by which
    they are made: dividing by the scores' deviation enlarges it as it does their range."""
    if (metric != "policy/loss" and not metric.startswith("advantage/")) or "advantage/max" not in line:
        return TOLERANCE["abs"]
    range_of = {name: line[f"{name}/max"] - line[f"{name}/min"] for name in ("advantage", "reward")}
    return TOLERANCE["abs"] * max(1.0, range_of["advantage"] / range_of["reward"])


@pytest.fixture(scope="module")
def url():
    """URL of a server in this process that scores brightness."""
    with record.scoring() as url:
        yield url


@pytest.mark.parametrize(
    "name",
    [
        case
        for kind, count in DRAWN.items()
        for case in sampled(names(kind), count, always=ALWAYS.intersection(names(kind)))
    ],
)
def test_a_short_run_is_as_recorded(name, url, capsys):
    with capsys.disabled():
        print(f" {name}: compared {'bit for bit' if IS_SAME_MACHINE else f'within {TOLERANCE}'} ", end="", flush=True)
    with spared(report=False, flops=False):  # a record has neither
        result = record.run(record.CASES[name], record.REPO, url)
    expected = RECORD["runs"][name]
    assert [line["step"] for line in result["metrics"]] == [line["step"] for line in expected["metrics"]]
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        ours = {key: ours.get(key) for key in theirs}  # a metric that is new is not in the record
        if IS_SAME_MACHINE:
            assert ours == theirs
        for key, value in theirs.items():
            rel = TOLERANCE["rel"] * (COARSE if "bfloat16" in name and key not in SCORES else 1)
            assert ours[key] == pytest.approx(value, rel=rel, abs=largest_error(key, theirs)), key
    assert result["weights"]["tensors"] == expected["weights"]["tensors"]
    if IS_SAME_MACHINE:
        assert result["weights"]["sha256"] == expected["weights"]["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("unshard", ["none", "rollout"])
def test_no_bit_depends_on_how_long_weights_stay_gathered(unshard, url):
    """Not those of a run that puts an older policy into the place of the weights either; on a CPU all stay gathered."""
    case = record.CASES["nft-full-fsdp2"]
    kept, other = (
        record.run(replace(case, settings=case.settings | {"sharding_unshard": word}), record.REPO, url)
        for word in ("all", unshard)
    )
    assert kept == other


def test_the_record_and_the_cases_have_the_same_names_of_known_kinds():
    assert RECORD["runs"].keys() == record.CASES.keys() == set().union(*map(names, DRAWN))


def test_recorded_runs_learn():
    """A net of runs whose weights stand still would catch nothing."""
    for name, run in RECORD["runs"].items():
        steps = [line for line in run["metrics"] if line["step"]]
        assert all(line["policy/grad_norm"] > 1e-4 for line in steps), name
        assert run["metrics"][0]["eval/reward"] != run["metrics"][-1]["eval/reward"], name
