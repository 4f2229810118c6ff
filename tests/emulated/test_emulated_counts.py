"""How often a training step makes the host wait for the device, and ranks for each other: bounds that may only fall.

One step of rank 0 of 2: two batches of 4 pictures, LoRA, DDP. FlowGRPO and NFT have guidance.
"""

from collections import Counter

import pytest
from emulated import count_waits, emulated_runs
from helpers import sampled
from model_rows import ROWS

NEEDED = {"sampling.py sample_here": count_waits.BATCHES, "optim.py _norms": 1, "run.py Run.policy_metrics": 1}
WAITS = {  # of SRPO all scores are computed on the device; its batches hold texts of unequal lengths
    "flowgrpo": NEEDED | {"run.py Run.check_ratio": 1},
    "nft": NEEDED,
    "dgpo": NEEDED | {"run.py Run.check_ratio": 1},
    "dpo": NEEDED | {"types.py Samples.cat": 2},
    "srpo": NEEDED | {"train_srpo.py grade": 2, "qwen_image.py QwenImage.predict_velocity.predict": 10},
}
MESSAGES = {"flowgrpo": 8, "nft": 7, "dgpo": 8, "dpo": 8, "srpo": 7}  # between hosts, at most
COPIES = {"flowgrpo": 18, "nft": 36, "dgpo": 28, "dpo": 28, "srpo": 72}  # to the device, at most


@pytest.fixture(scope="module", params=sampled(MESSAGES, 1))
def counted(fresh, request):
    """A trainer, and the phases of its step."""
    return request.param, fresh(count_waits.measure, request.param)


def test_the_host_waits_for_nothing_but_images_the_gate_the_norm_and_the_metrics(counted):
    name, phases = counted
    assert sum((phase.waits() for phase in phases), Counter()) == WAITS[name]


def test_only_gradients_go_from_device_to_device_and_ranks_talk_little(counted):
    name, phases = counted
    sent = [each for phase in phases for each in phase.events if each.kind == "collective"]
    assert [each.place for each in sent] == ["optim.py reduce_gradients"]
    assert sum(phase.count("host collective") for phase in phases) <= MESSAGES[name]


def test_copies_to_the_device_are_few(counted):
    name, phases = counted
    assert sum(phase.count("to device") for phase in phases) <= COPIES[name]


@pytest.mark.slow
def test_the_host_waits_no_more_where_ranks_share_samples_but_for_padding(fresh):
    """Each of two ranks decodes one of the two batches. All texts get one more token; diffusers waits for any mask."""
    phases = fresh(count_waits.measure, "flowgrpo, context")
    masks = {"qwen_image.py QwenImage.predict_velocity.predict": count_waits.BATCHES * (10 + 2)}  # sampled and trained
    found = sum((phase.waits() for phase in phases), Counter())
    assert found == WAITS["flowgrpo"] | {"sampling.py sample_here": 1} | masks


def test_a_mixture_of_experts_waits_once_in_a_forward_and_never_in_a_backward(alone):
    """As it is and compiled; gradients or none, the bits are the same."""
    assert alone(emulated_runs.waits_of_experts) == [([1, 1, 0], True)] * 2


STILL = {  # by model, where the host waits in a guided forward: for the expert, in each of 3 layers, in diffusers
    "wan22": {"wan.py Wan._expert": 1},
    "wan22-i2v": {"wan.py Wan._expert": 1},
    "hunyuan-image": {"hunyuan_image_moe.py HunyuanImageExperts.forward": 3},
    "qwen-image-edit-plus": {"qwen_image.py QwenImage.predict_velocity.predict": 2},
}


@pytest.mark.parametrize("name", sampled(ROWS, 1))
def test_the_host_waits_for_nothing_else_in_a_forward(apart, name):
    assert apart(emulated_runs.waits_of, name) == STILL.get(name, {})
