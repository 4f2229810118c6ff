"""Noise schedules, single denoising steps with their log-probabilities, solvers, step windows and reproducible noise.

Time runs from sigma = 1 (noise) to sigma = 0 (data); `velocity = dx/dsigma = noise - data`. Every name is a pure
function or a frozen dataclass: no state, no registry, no model.
"""

from omni_sched.schedules import exponential_shift_sigmas as exponential_shift_sigmas
from omni_sched.schedules import linear_sigmas as linear_sigmas
from omni_sched.schedules import resolution_mu as resolution_mu
from omni_sched.schedules import sde_window as sde_window
from omni_sched.schedules import shift_sigmas as shift_sigmas
from omni_sched.schedules import stretch_sigmas as stretch_sigmas
from omni_sched.solvers import compress_sigmas as compress_sigmas
from omni_sched.solvers import dpmpp_2m_step as dpmpp_2m_step
from omni_sched.steps import INITIAL_NOISE as INITIAL_NOISE
from omni_sched.steps import StreamStep as StreamStep
from omni_sched.steps import Transition as Transition
from omni_sched.steps import add_noise as add_noise
from omni_sched.steps import cps_step as cps_step
from omni_sched.steps import dance_step as dance_step
from omni_sched.steps import euler_step as euler_step
from omni_sched.steps import gaussian_log_prob as gaussian_log_prob
from omni_sched.steps import ode_step as ode_step
from omni_sched.steps import renoise as renoise
from omni_sched.steps import sde_step as sde_step
from omni_sched.steps import step_noise as step_noise

__version__ = "0.1.0"
