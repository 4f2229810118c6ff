"""vLLM-Omni's pipelines as rollout pipelines, one file per model.

A file subclasses one of vLLM-Omni's pipelines, names the family of `omni_rollout.models` whose functions sample with
it, and tells how its transformer's parameter names differ from diffusers'.
"""

from omni_rollout import vllm_omni_worker as vllm_omni_worker  # has to come before a model file imports vLLM
