"""Noise schedules, single denoising steps with their log-probabilities, solvers, step windows and reproducible noise.

Time runs from sigma = 1 (noise) to sigma = 0 (data); `velocity = dx/dsigma = noise - data`. Every name here is a pure
function (or the frozen record one of them returns): no state, no registry, no model.
"""

from omni_sched.schedules import (
    exponential_shift_sigmas,
    linear_sigmas,
    resolution_mu,
    sde_window,
    shift_sigmas,
    stretch_sigmas,
)
from omni_sched.solvers import compress_sigmas, dpmpp_2m_step
from omni_sched.steps import (
    INITIAL_NOISE,
    Transition,
    add_noise,
    cps_step,
    dance_step,
    euler_step,
    gaussian_log_prob,
    sde_step,
    step_noise,
)

__all__ = [
    "INITIAL_NOISE",
    "Transition",
    "add_noise",
    "compress_sigmas",
    "cps_step",
    "dance_step",
    "dpmpp_2m_step",
    "euler_step",
    "exponential_shift_sigmas",
    "gaussian_log_prob",
    "linear_sigmas",
    "resolution_mu",
    "sde_step",
    "sde_window",
    "shift_sigmas",
    "step_noise",
    "stretch_sigmas",
]
