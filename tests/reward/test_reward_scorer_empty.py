"""Networks of scorers without values: their sizes are the published ones, and those of the files that loaders read."""

import re
from pathlib import Path

import pytest
import torch
from helpers import REPO, sampled
from omni_reward.scorers import empty_networks, load_scorer, neural
from omni_train.planned import PLANNED, PlannedDevice
from reward.scorer_table import ROWS

META = "meta"
MILLIONS = {  # weights, as their papers and pages say; Qwen2-VL's without the head of words, which is not loaded
    "aesthetic": 428, "clap": 154, "clip": 428, "editreward": 8292 - 545, "geneval": 428 + 69, "hpsv2": 986,
    "hpsv3": 8291 - 545, "imagereward": 446, "pickscore": 986, "videoalign": 2209,
}  # fmt: skip


def size(name: str, **options: str) -> int:
    """The number of weights of a scorer's networks."""
    networks = empty_networks(name, META, options).values()
    return sum(weight.numel() for each in networks for weight in each.network.parameters())


@pytest.mark.parametrize("name", sampled(MILLIONS, 3))
def test_a_scorer_is_as_large_as_published(name: str) -> None:
    assert size(name) / 1e6 == pytest.approx(MILLIONS[name], rel=0.005)


@pytest.mark.parametrize(
    "name", sampled(["clap", "clip", "editreward", "hpsv2", "hpsv3", "pickscore", "videoalign"], 2)
)
def test_a_folder_s_configuration_makes_the_network_of_its_weights(
    name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where the loader puts the network that it has read."""
    loaded: list[torch.nn.Module] = []
    load = neural.load_model

    def noted(*args: object, **more: object) -> object:
        loaded.append(load(*args, **more))
        return loaded[-1]

    monkeypatch.setattr(neural, "load_model", noted)
    options = ROWS[name].options(tiny)
    load_scorer(name, options=options)
    [network] = empty_networks(name, META, options).values()
    shapes = {key: weight.shape for key, weight in network.network.named_parameters()}
    words = {key for key in shapes if key.endswith("embed_tokens.weight")}  # which a reward model adds to
    assert shapes.keys() == {key for key, _ in loaded[0].named_parameters()}
    assert all(weight.shape == shapes[key] for key, weight in loaded[0].named_parameters() if key not in words)


@pytest.mark.parametrize(
    ("name", "options", "num_devices", "counted"),
    [
        ("ocr", {}, 1, []),
        ("rules:number", {}, 1, []),
        ("python:mine.py:score", {}, 1, []),
        ("frames:pickscore", {}, 1, ["pickscore"]),
        ("pickscore", {"device": "cpu"}, 1, []),
        ("pickscore", {"device": "cuda"}, 1, ["pickscore"]),
        ("pickscore", {"device": "cuda:1"}, 1, []),
        ("pickscore", {"device": "cuda:1"}, 2, ["pickscore"]),
        ("0.5*clip + ocr if pickscore >= 20 else 0", {}, 1, ["clip", "pickscore"]),
        ("0.5*clip + ocr if pickscore >= 20 else 0", {"clip.device": "cpu"}, 1, ["pickscore"]),
        ("pickscore", {"device": "cpu:0"}, 1, []),
    ],
)
def test_scorers_that_share_no_accelerator_with_the_trainer_are_left_out(
    name: str, options: dict[str, str], num_devices: int, counted: list[str]
) -> None:
    assert list(empty_networks(name, META, options, num_devices)) == counted


def test_fewer_bits_and_several_scorers_add_up() -> None:
    def taken(name: str, **options: str) -> int:
        networks = empty_networks(name, META, options).values()
        return sum(weight.nbytes for each in networks for weight in each.network.parameters())

    assert taken("pickscore", dtype="bfloat16") * 2 == taken("pickscore")
    assert taken("pickscore + clip") == taken("pickscore") + taken("clip")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("pickscore", {"dtype": "int4"}, "dtype must be one of"),
        ("clip", {"model": "/nowhere"}, "a model must be a folder, or a repository of the hub"),
        ("pickscore + clip", {"dtype": "bfloat16"}, "an option of a combination must be SCORER.OPTION"),
    ],
)
def test_what_no_server_would_take_is_refused(name: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        empty_networks(name, META, options)


@pytest.mark.parametrize("name", sampled(MILLIONS, 1))
def test_the_page_says_what_a_scorer_takes(name: str) -> None:
    with PlannedDevice() as device, torch.no_grad():
        [network] = empty_networks(name, str(PLANNED), {}).values()
        network.call()
    page = (REPO / "docs" / "scorers.md").read_text("utf-8")
    [told] = re.findall(rf"`{name}` (\d+\.\d)[ ,;.]", page)
    assert float(told) == round(max(device.peaks.values()) / 1e9, 1)
