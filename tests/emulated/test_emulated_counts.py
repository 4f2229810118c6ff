"""How often a training step makes the host wait for the device, and ranks for each other: bounds that may only fall.

One step of rank 0 of 2: two batches of 4 pictures with guidance, 10 steps, 2 of them trained, LoRA, DDP.
"""

from collections import Counter

import pytest
from emulated import count_waits


@pytest.fixture(scope="module")
def phases(fresh):
    return fresh(count_waits.measure)


def test_the_host_waits_for_nothing_but_images_the_gate_the_norm_and_the_metrics(phases):
    waits = sum((phase.waits() for phase in phases), Counter())
    assert waits == {
        "sampling.py draw": count_waits.BATCHES,
        "run.py check_ratio": 1,
        "optim.py _norms": 1,
        "run.py policy_metrics": 1,
    }


def test_only_gradients_go_from_device_to_device_and_ranks_talk_little(phases):
    sent = [each for phase in phases for each in phase.events if each.kind == "collective"]
    assert [each.place for each in sent] == ["optim.py reduce_gradients"]
    assert sum(phase.count("host collective") for phase in phases) <= 8


def test_copies_to_the_device_are_few(phases):
    assert sum(phase.count("to device") for phase in phases) <= 18
