"""Ranks that only sample notice a first rank that hangs, and not one that is busy."""

import time
from pathlib import Path

import pytest
from omni_train.roles import pack, split


def wait_for(path):
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def test_an_only_trainer_that_gives_no_sign_of_life_is_noticed(run_ranks, tmp_path):
    noticed = Path(tmp_path, "noticed")

    def work(dist):
        roles = split(dist, 1, timeout_s=0.5)
        if not dist.rank:
            wait_for(noticed)  # hangs as long as the other rank waits
            return noticed.exists()
        with pytest.raises(RuntimeError):
            roles.next_order()
        noticed.touch()
        return True

    assert run_ranks(work) == [True, True]


def test_a_trainer_that_gives_signs_of_life_may_take_its_time(run_ranks):
    def work(dist):
        roles = split(dist, 1, timeout_s=0.6)
        if dist.rank:
            return roles.next_order()[0]
        for _ in range(6):
            time.sleep(0.2)
            roles.send_heartbeat()
        roles.announce(pack([3, 2], {}))
        return None

    assert run_ranks(work) == [None, [3, 2]]
