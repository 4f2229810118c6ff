"""vLLM-Omni worker inside a training rank.

The worker is a guest of the process; see `omni_rollout.engines.guest`. Sampling calls no collectives, so ranks may have
different prompts, batches and numbers of steps.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import nn

from omni_rollout.engines.guest import ensure_process_group, keep_process_group, preserve_process_state
from omni_rollout.engines.versions import check_vllm_omni
from omni_rollout.engines.vllm_omni.quantized import is_quantized
from omni_rollout.model import Model
from omni_rollout.sampler import Sampler
from omni_rollout.types import Parts

check_vllm_omni()
if not torch.accelerator.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # vLLM reads it when it is imported
with patch.dict(os.environ, VLLM_CONFIGURE_LOGGING="0"):  # otherwise it changes the format of every log line
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
    from vllm_omni.diffusion.distributed.parallel_state import destroy_distributed_env, model_parallel_is_initialized
    from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker
    from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
    from vllm_omni.platforms import current_omni_platform


class RolloutPipeline:
    """Mixin for vLLM-Omni pipelines that answers a batch of requests by one call of our sampler on its modules.

    diffusers_names: parts of the transformer's parameter names -> diffusers'. packed: fused layers with their original
    layers, in the order of their rows, if vLLM-Omni's transformer has no `packed_modules_mapping`. sampler: set by the
    engine.
    """

    supports_request_batch = True
    diffusers_names: ClassVar[dict[str, str]] = {}
    packed: ClassVar[dict[str, list[str]]] = {}
    transformer: Any
    sampler: Sampler

    @property
    def net(self) -> nn.Module:
        """Module that samples."""
        net: nn.Module = self.transformer
        return net

    def parts(self, model: Model, dtype: torch.dtype) -> Parts:
        """Return the pipeline's modules in the form that the model takes, in the transformer's dtype."""
        names = [name for name in model.config if hasattr(self, name) and name not in model.nets.values()]
        parts = Parts(net=self.net, **{name: getattr(self, name) for name in names})
        for part in vars(parts).values():
            if isinstance(part, nn.Module) and part is not parts.net and not any(map(is_quantized, part.modules())):
                part.to(dtype)  # vLLM-Omni leaves them in the dtype of the checkpoint's files
        return parts

    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput]:
        """Return one DiffusionOutput per request, whose `output` is a Trajectory of one sample."""
        extras = [params.extra_args for params in req.sampling_params_list]
        trajectory = self.sampler.sample(
            [extra["prompt"] for extra in extras], extras[0]["params"], weight_version=extras[0]["weight_version"]
        )
        return [DiffusionOutput(output=sample) for sample in trajectory.split(1)]


def start_worker(
    pipeline: type[RolloutPipeline],
    model: str,
    *,
    local_rank: int,
    dtype: torch.dtype,
    quantization: str | None,
    together: Callable[[], AbstractContextManager[None]],
) -> DiffusionWorker:
    """Return a worker with the pipeline's checkpoint loaded, on the device of `local_rank`.

    With a process group, all ranks must call this at the same point, because it creates groups. After an error, the
    trainer's group is unchanged, and another worker can be started.

    quantization: vLLM-Omni's name for the format of the transformer's linear layers, such as "fp8". together: context
    manager for code without collectives that may fail on only one rank, so that the caller can raise on every rank.

    Raises:
        RuntimeError: the process already has a worker.
    """
    if model_parallel_is_initialized():
        raise RuntimeError("this process has an engine already, and vLLM-Omni allows only one: close() it first")
    group = torch.distributed
    world = group.get_world_size() if group.is_initialized() else 1
    with preserve_process_state(), ensure_process_group(current_omni_platform.dist_backend), keep_process_group():
        with together():
            config = OmniDiffusionConfig.from_kwargs(
                model=model,
                dtype=dtype,
                num_gpus=world,
                parallel_config={"data_parallel_size": world},  # every rank holds the whole model
                enforce_eager=True,
                quantization_config=quantization,
                extras={},  # the default is a placeholder that breaks some pipelines
            )
            config.enrich_config()
        worker_class = resolve_obj_by_qualname(current_omni_platform.get_diffusion_worker_cls())
        try:
            # Both arguments only select the device: the process group has the global rank.
            worker = worker_class(local_rank=local_rank, rank=local_rank, od_config=config, skip_load_model=True)
            # This would transfer an autoregressive stage's KV cache: a broadcast of pickled objects per request.
            worker.model_runner.kv_transfer_manager = None
            with together():
                worker.load_model(load_format="custom_pipeline", custom_pipeline_name=pipeline)
        except BaseException:
            destroy_distributed_env()
            raise
    return worker


def stop_worker(worker: DiffusionWorker) -> None:
    """End the worker and its groups; keep the trainer's process group."""
    with keep_process_group():
        worker.shutdown()
