"""Prompts in, trajectories out.

`types` holds the data and the `Engine` contract, `diffusers_engine` the embedded engine, `models` one file per model,
`testing` the checks that any engine must pass.
"""

from omni_rollout.types import Engine, Prompt, SamplingParams, Trajectory

__all__ = ["Engine", "Prompt", "SamplingParams", "Trajectory"]
