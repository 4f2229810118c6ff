"""A run's own scorer has a server on each accelerator of the machine's ranks, all with the same scores."""

import pytest
from build_tiny_scorers import write_all
from emulated import emulated_runs as runs
from emulated.npu import build
from omni_reward.scorers import device_options


def test_a_scorer_with_a_network_has_a_server_on_each_accelerator(tmp_path, alone):
    build()
    write_all(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("from emulated.npu import load\n\nload()\n")
    options = f"--option model={tmp_path / 'clip'} --option tokenizer={tmp_path / 'clip'}"
    devices, scores = alone(runs.start_scorers, tmp_path, f"clip {options}", 3)
    assert devices == ["npu:0", "npu:1", "npu:2"]
    assert len(scores) == 3
    assert None not in scores[0]
    assert scores[0][0] != scores[0][1]
    assert scores == [scores[0]] * 3


def test_a_scorer_without_a_network_or_with_a_place_of_its_own_has_one_server(tmp_path, alone):
    build()
    write_all(tmp_path)
    (tmp_path / "sitecustomize.py").write_text("from emulated.npu import load\n\nload()\n")
    devices, scores = alone(runs.start_scorers, tmp_path, "jpeg", 3)
    assert (devices, len(scores)) == ([], 1)
    options = f"--option model={tmp_path / 'clip'} --option tokenizer={tmp_path / 'clip'} --option device=npu:1"
    devices, scores = alone(runs.start_scorers, tmp_path, f"clip {options}", 3)
    assert (devices, len(scores)) == (["npu:1"], 1)


@pytest.mark.parametrize(
    ("name", "options", "found"),
    [
        ("clip", {}, ["device"]),
        ("frames:pickscore", {"frames": "2"}, ["device"]),
        ("jpeg", {}, []),
        ("rules:number", {}, []),
        ("clip", {"device": "cpu"}, []),
        ("clip", {"device": "npu:1"}, []),
        ("clip + jpeg + python:mine.py:score", {}, ["clip.device"]),
        ("clip + pickscore", {"clip.device": "cpu"}, ["pickscore.device"]),
        ("clip + pickscore", {"clip.device": "npu:1"}, []),
    ],
)
def test_options_that_place_networks_are_those_that_nobody_has_given(name, options, found):
    assert device_options(name, options) == found
