"""Scorers asleep: no byte of their networks is on the accelerator, and awake they score as before."""

import pytest
from build_tiny_scorers import write_all
from emulated import emulated_runs as runs
from emulated.npu import build
from helpers import sampled

OPTIONS = {  # of the tiny checkpoints, by scorer; the kind of media; most bytes that stay, of small heads
    "clip": ({"model": "clip", "tokenizer": "clip"}, "image", 0),
    "pickscore": ({"model": "clip", "tokenizer": "clip"}, "image", 4),
    "aesthetic": ({"head": "aesthetic.pth", "model": "clip"}, "image", 100_000),
    "imagereward": ({"model": "imagereward", "tokenizer": "bert"}, "image", 100_000),
    "hpsv3": ({"instruction": "instruction.txt", "model": "hpsv3", "base": "qwen2-vl"}, "image", 100_000),
    "videoalign": (
        {"instruction": "instruction-of-videoalign.txt", "model": "videoalign", "base": "qwen2-vl"}, "video", 10_000,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    write_all(folder)
    return folder


@pytest.mark.parametrize("name", sampled(OPTIONS, 1))
def test_a_scorer_asleep_leaves_the_accelerator_and_awake_it_scores_as_before(tiny, alone, name):
    build()
    options, kind, left = OPTIONS[name]
    (loaded, asleep, awake, again), scores, alike = alone(
        runs.scorer_naps, name, {key: str(tiny / file) for key, file in options.items()}, kind
    )
    assert loaded == awake
    assert loaded - asleep > 50_000  # of its networks
    assert asleep == again <= left
    assert alike
    assert None not in scores
