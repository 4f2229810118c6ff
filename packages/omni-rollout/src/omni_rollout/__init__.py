"""Prompts in, samples out.

`types` holds the data and the `Engine` contract, `model` the door to a model, `models` one file per model, `engines`
what samples, `testing` the checks that any engine must pass.
"""

from omni_rollout.model import Model
from omni_rollout.sampler import replay
from omni_rollout.types import Cond, Engine, Media, Params, Parts, Prompt, Rates, Samples, Trajectory

__all__ = ["Cond", "Engine", "Media", "Model", "Params", "Parts", "Prompt", "Rates", "Samples", "Trajectory", "replay"]
