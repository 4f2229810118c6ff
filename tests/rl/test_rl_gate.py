"""The ratio gate."""

import math

import pytest
import torch
from omni_rl.run import check_ratio
from omni_train.dist import Dist

ALONE = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def test_within_the_tolerance_it_returns_the_worst():
    assert check_ratio(ALONE, [torch.tensor(0.0), torch.tensor(0.5)], tolerance=0.5, step=0) == 0.5


@pytest.mark.parametrize("bad", [1e-7, math.nan, math.inf])
def test_any_deviation_beyond_it_names_the_forward(bad):
    with pytest.raises(RuntimeError, match=r"step 3: .* in 1 of 2 forwards, first in forward 1 of rank 0"):
        check_ratio(ALONE, [torch.tensor(0.0), torch.tensor(bad)], tolerance=0.0, step=3)
