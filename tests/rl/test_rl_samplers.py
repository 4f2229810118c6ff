"""Signs of life of the first rank, for ranks that only sample."""

import time
from types import SimpleNamespace

from omni_rl.run.samplers import Samplers
from omni_train import progress
from trainer_runs import place


def test_signs_of_life_are_sent_while_the_program_goes_on_and_no_longer():
    sent = []
    roles = SimpleNamespace(
        dist=place(), timeout_s=0.2, send_heartbeat=lambda: sent.append(time.monotonic()), announce=lambda message: None
    )
    progress.mark_alive()
    samplers, begun = Samplers(roles, SimpleNamespace()), time.monotonic()
    while time.monotonic() < begun + 0.6:  # works
        progress.advance()
        time.sleep(0.01)
    assert sent[-1] > begun + 0.4
    time.sleep(0.5)  # hangs
    count = len(sent)
    assert sent[-1] < begun + 0.6 + 0.3
    time.sleep(0.2)
    assert len(sent) == count
    samplers.close()
