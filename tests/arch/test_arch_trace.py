"""The page is the program: how near the loss of a training step is to its loop."""

import pytest
from arch import step_trace
from records import record

MAX_FRAMES = 2


@pytest.fixture(scope="module")
def step():
    """One FlowGRPO step with all weights trained."""
    with record.scoring() as url:
        yield step_trace.trace(url)


def test_the_loss_is_near_the_loop(step):
    assert step.frames <= MAX_FRAMES, " > ".join(step.chain)


def test_a_trace_sees_the_step(step):
    """Sampling, the loss and the optimizer in the loop's thread, the reward client's transport in another."""
    loop, others = (" ".join(file for file, _, _ in functions) for functions in (step.loop, step.others))
    names = ("apps/train_flowgrpo.py", "omni_rollout/sampler.py", "omni_losses/policy.py", "omni_train/optim.py")
    assert [name for name in names if name not in loop] == []
    assert "omni_reward/transport.py" in others
    assert step.chain[-1] == "grpo_loss"
