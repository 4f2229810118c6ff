"""The page is the program: how near the loss of a training step is to its loop, and how much code the step runs."""

import pytest
from arch import step_trace
from records import record

MAX_FRAMES = 2
LOOP_FILES, LOOP_LINES = 21, 1159  # of the loop's own thread
RECIPE_FILES, RECIPE_LINES = 26, 1268  # the same with LoRA, KL, group std and two ranks
ALL_FILES, ALL_LINES = 24, 1402  # with the threads that send images to the scorer


RECIPE = {"lora_rank": 4, "kl_coef": 0.01, "adv_std": "group", "ranks": 2}


@pytest.fixture(scope="module")
def step():
    """One FlowGRPO step with all weights trained."""
    with record.scoring() as url:
        yield step_trace.trace(url)


@pytest.fixture(scope="module")
def recipe_step():
    """One FlowGRPO step with the settings of a recipe, on two ranks."""
    with record.scoring() as url:
        yield step_trace.trace(url, **RECIPE)


def test_the_loss_is_near_the_loop(step):
    assert step.frames <= MAX_FRAMES, " > ".join(step.chain)


@pytest.mark.parametrize("threads", ["loop", "all"])
def test_a_step_runs_few_files_and_little_code(step, threads):
    functions, most_files, most_lines = {
        "loop": (step.loop, LOOP_FILES, LOOP_LINES),
        "all": (step.loop | step.others, ALL_FILES, ALL_LINES),
    }[threads]
    lines = step_trace.code_lines(functions)
    table = "\n".join(f"{count:5}  {file}" for file, count in lines.items())
    assert len(lines) <= most_files, f"{len(lines)} files:\n{table}"
    assert sum(lines.values()) <= most_lines, f"{sum(lines.values())} lines:\n{table}"


def test_a_step_with_the_settings_of_a_recipe_runs_little_more(recipe_step):
    assert recipe_step.frames <= MAX_FRAMES, " > ".join(recipe_step.chain)
    lines = step_trace.code_lines(recipe_step.loop)
    table = "\n".join(f"{count:5}  {file}" for file, count in lines.items())
    assert len(lines) <= RECIPE_FILES, f"{len(lines)} files:\n{table}"
    assert sum(lines.values()) <= RECIPE_LINES, f"{sum(lines.values())} lines:\n{table}"


def test_a_trace_sees_the_step(step):
    """Sampling, the loss and the optimizer in the loop's thread, the reward client's transport in another."""
    loop, others = (" ".join(file for file, _, _ in functions) for functions in (step.loop, step.others))
    names = ("apps/train_flowgrpo.py", "omni_rollout/sampler.py", "omni_losses/policy.py", "omni_train/optim.py")
    assert [name for name in names if name not in loop] == []
    assert "omni_reward/transport.py" in others
    assert step.chain[-1] == "grpo_loss"
