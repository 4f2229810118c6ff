"""A guest that expects a process of its own."""

import random

import numpy as np
import torch
from omni_rollout.engines.guest import preserve_process_state


def test_what_a_guest_seeds_is_put_back():
    def draws():
        return random.random(), np.random.rand(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    undisturbed = draws()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    with preserve_process_state():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        draws()
    assert draws() == undisturbed
