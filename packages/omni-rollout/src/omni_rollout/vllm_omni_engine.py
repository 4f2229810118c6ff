"""The vLLM-Omni engine: its worker, modules and kernels, inside the training process.

A batch of prompts becomes a batch of requests, the worker runs its pipeline once on all of them, and the pipeline runs
the same denoising loop as the embedded engine, on vLLM-Omni's modules. So every step, window and noise is omni_sched's;
what differs from the trainer is the arithmetic of another implementation of the same transformer.

Weights. An unsharded trainer can hold its parameters in the engine's own storage (`share`): a sync then moves no byte.
What is not shared is copied in by `load_weights`, which wants every one of them: a name left out is an error, where
vLLM-Omni would skip it in silence. The engine keeps its transformer under diffusers' names: `to_q` is a slice of the
rows of the fused `to_qkv`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from omni_rollout.types import Prompt, SamplingParams, Trajectory
from omni_rollout.vllm_omni_worker import start_worker, stop_worker

from vllm.device_allocator.cumem import cumem_available  # isort: skip
from vllm_omni.diffusion.request import OmniDiffusionRequest  # isort: skip - after the worker has set vLLM up
from vllm_omni.diffusion.sched.interface import CachedRequestData, DiffusionSchedulerOutput, NewRequestData  # isort: skip
from vllm_omni.inputs.data import OmniDiffusionSamplingParams  # isort: skip

PROBES = 32  # elements of a weight that a sync compares after copying it


class VllmOmniEngine:
    """One per process. The transformer's weights start as the checkpoint's, and count as `weight_version`.

    pipeline: a class of `omni_rollout.vllm_omni_models`. path: folder or hub id of the diffusers pipeline. device: this
    rank's; its index picks the accelerator. dtype: of all weights. pool: load them into vLLM's own memory pool where
    there is one, so that `sleep` keeps their addresses; then nothing can be shared. together: entered around what may
    fail on one rank alone, so that a context manager that agrees with the other ranks on leaving it ends all of them,
    and none waits for ever. Where there is a process group, all ranks construct their engines at the same point.
    """

    def __init__(
        self,
        pipeline: type[nn.Module],
        path: str,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pool: bool = False,
        weight_version: int = 0,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.weight_version = weight_version
        self.moved_bytes = 0  # by the last `load_weights`
        device = torch.device(device)
        self._pool = pool and device.type == "cuda" and cumem_available
        self._worker = start_worker(
            pipeline, str(path), local_rank=device.index or 0, dtype=dtype, pool=self._pool, together=together
        )
        self.pipeline: Any = self._worker.model_runner.pipeline
        self._shared: dict[str, int] = {}  # name -> address of the storage
        self._asleep: list[tuple[Tensor, Tensor]] = []  # (weight, its values on the host)
        self._calls = count()

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> Trajectory:
        """One sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Raises:
            ValueError: no prompts, or a size the model does not draw.
        """
        if not prompts:
            raise ValueError("prompts must hold at least one prompt, got none")
        call = next(self._calls)
        requests = [_request(f"{call}-{i}", p, params, self.weight_version) for i, p in enumerate(prompts)]
        outputs = self._worker.execute_model_batch(_schedule(call, requests), self._worker.od_config).runner_outputs
        trajectory = Trajectory.cat([output.result.output for output in outputs])
        # What inference mode made cannot take part in training. Concatenation has copied all tensors but this one.
        return replace(trajectory, sigmas=trajectory.sigmas.clone())

    def weights(self) -> dict[str, Tensor]:
        """The transformer's weights where they lie, under diffusers' names."""
        return diffusers_views(self.pipeline.transformer, self.pipeline.diffusers_names)

    @torch.no_grad()
    def share(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Moves a trainer's parameters into the engine's storage; returns the bytes that no longer exist twice.

        The trainer then updates what the engine samples with. Each must have the values that the engine has, so that a
        wrong name, or another checkpoint, is found here.

        Raises:
            ValueError: the engine has no such weight, or another shape, dtype, device or value.
        """
        if self._pool:
            raise ValueError("pool must be False for an engine that shares: what the pool holds leaves in sleep")
        own, num_bytes = self.weights(), 0
        for name, param in params:
            view = _fitting(own, name, param)
            if (param.dtype, param.device) != (view.dtype, view.device) or not torch.equal(param, view):
                raise ValueError(
                    f"params must hold what the engine has loaded, but {name} ({param.dtype}, {param.device}) has "
                    f"other values, or another type or device, than the engine's ({view.dtype}, {view.device})"
                )
            param.data = view
            self._shared[name] = view.untyped_storage().data_ptr()
            num_bytes += view.nbytes
        return num_bytes

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copies weights in, one at a time, and counts as `version` from now on.

        tensors: full tensors under diffusers' names, every weight of the transformer that is not shared among them;
        shared ones may come too, and are not moved. `omni_train.weights.named_weights` brings LoRA merged.

        Raises:
            ValueError: a name or shape that the transformer lacks, or a weight left out.
            RuntimeError: the engine does not have afterwards what it was given.
        """
        own, given, moved = self.weights(), {}, 0
        for name, tensor in tensors:
            view = _fitting(own, name, tensor)
            if view.data_ptr() != tensor.data_ptr():
                view.copy_(tensor)
                moved += view.nbytes
            given[name] = _probe(tensor.to(view.dtype)).to(view.device)
        missing = sorted(own.keys() - given.keys() - self._shared.keys())
        if missing:
            some = f"{len(missing)} of {len(own)}: {missing[:4]}"
            raise ValueError(f"tensors must hold every weight that is not shared, missing {some}")
        self._check_arrival(given)
        self.moved_bytes, self.weight_version = moved, version

    def sleep(self) -> None:
        """Takes every weight that is not shared with the trainer off the accelerator; on a CPU nothing happens.

        Text encoder and VAE go to the host, and the transformer where the trainer holds its own.
        """
        if self._worker.device.type == "cpu" or self._asleep:
            return
        if self._pool:
            self._worker.sleep(level=1)
            return
        self._asleep = offload(self.pipeline, keep=set(self._shared.values()))
        torch.accelerator.empty_cache()

    def wake(self) -> None:
        """Undoes `sleep`."""
        if self._pool and self._worker.device.type != "cpu":
            self._worker.wake_up(["weights"])
        for weight, values in self._asleep:
            weight.data = values.to(self._worker.device, non_blocking=True)
        self._asleep = []

    def close(self) -> None:
        """Frees the engine; the process group and the weights that the trainer shares stay."""
        self.pipeline = None
        self._asleep = []
        stop_worker(self._worker)

    def _check_arrival(self, given: dict[str, Tensor]) -> None:
        """Reads the weights anew from the modules that sample, and compares some elements of each with what came in."""
        own = self.weights()
        moved_away = [name for name, at in self._shared.items() if own[name].untyped_storage().data_ptr() != at]
        if moved_away:
            raise RuntimeError(f"the engine's storage has moved away from the trainer's: {moved_away[:4]}")
        if given and not torch.equal(torch.cat(list(given.values())), torch.cat([_probe(own[name]) for name in given])):
            wrong = [name for name, probe in given.items() if not torch.equal(probe, _probe(own[name]))]
            raise RuntimeError(f"the engine does not have the weights it was given, or they are NaN: {wrong[:4]}")


def diffusers_views(transformer: Any, renamed: dict[str, str]) -> dict[str, Tensor]:
    """The weights of a transformer of vLLM-Omni under diffusers' names, as views of where they lie.

    The rows of a fused layer are those of the layers it stands for, in the order of `packed_modules_mapping`. renamed:
    pieces of names here -> there.
    """
    views: dict[str, Tensor] = {}
    for name, param in transformer.named_parameters():
        layer, _, kind = name.rpartition(".")
        parent, _, leaf = layer.rpartition(".")
        if leaf in transformer.packed_modules_mapping:
            rows = transformer.get_submodule(layer).output_sizes
            parts = zip(transformer.packed_modules_mapping[leaf], param.data.split(rows), strict=True)
            views |= {f"{parent}.{part}.{kind}": piece for part, piece in parts}
            continue
        for here, there in renamed.items():
            name = name.replace(here, there)
        views[name] = param.data
    return views


def offload(module: nn.Module, *, keep: set[int]) -> list[tuple[Tensor, Tensor]]:
    """Moves the module's parameters and buffers to the host, but those whose storage has an address in `keep`.

    Returns (tensor, its values on the host) pairs; each tensor is left empty, and its memory free.
    """
    moved = []
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.untyped_storage().data_ptr() not in keep:
            moved.append((tensor, tensor.data.cpu()))
            tensor.data = tensor.data.new_empty(0)
    return moved


def _request(name: str, prompt: Prompt, params: SamplingParams, weight_version: int) -> OmniDiffusionRequest:
    """One sample as vLLM-Omni asks for it; what its own fields cannot say goes along as it is."""
    sampling = OmniDiffusionSamplingParams(
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_steps,
        seed=0,  # unused: noise comes from omni_sched, by the prompt's own seed
        extra_args={"prompt": prompt, "params": params, "weight_version": weight_version},
    )
    return OmniDiffusionRequest(prompt={"prompt": prompt.text}, sampling_params=sampling, request_id=name)


def _schedule(call: int, requests: list[OmniDiffusionRequest]) -> DiffusionSchedulerOutput:
    """All requests at once, as one batch."""
    return DiffusionSchedulerOutput(
        step_id=call,
        scheduled_new_reqs=[NewRequestData(request.request_id, request) for request in requests],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        finished_req_ids=set(),
        num_running_reqs=len(requests),
        num_waiting_reqs=0,
    )


def _fitting(own: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """The weight of that name and shape, or a ValueError."""
    if name not in own or own[name].shape != tensor.shape:
        have = tuple(own[name].shape) if name in own else "no such weight"
        raise ValueError(f"names and shapes must be the transformer's, got {name} {tuple(tensor.shape)}, have {have}")
    return own[name]


def _probe(tensor: Tensor) -> Tensor:
    """Up to PROBES elements, evenly spread."""
    flat = tensor.flatten()
    return flat[:: max(1, flat.numel() // PROBES)][:PROBES]
