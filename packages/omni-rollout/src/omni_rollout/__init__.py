"""Engines that turn prompts into samples.

`types` has the data types and the `Engine` contract, `model` the protocol of models, `models` a file per model,
`engines` the engines, and `testing` the checks that every engine must pass.
"""

from omni_rollout.model import Model as Model
from omni_rollout.sampler import replay as replay
from omni_rollout.types import Cond as Cond
from omni_rollout.types import Engine as Engine
from omni_rollout.types import Media as Media
from omni_rollout.types import Params as Params
from omni_rollout.types import Parts as Parts
from omni_rollout.types import Prompt as Prompt
from omni_rollout.types import Rates as Rates
from omni_rollout.types import Samples as Samples
from omni_rollout.types import Trajectory as Trajectory

__version__ = "0.1.0"
