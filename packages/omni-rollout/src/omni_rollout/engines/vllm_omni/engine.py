"""The vLLM-Omni engine: its worker, modules and kernels, inside the training process.

A batch of prompts becomes a batch of requests. The worker runs its pipeline once on all of them, and the pipeline runs
the embedded engine's denoising loop on vLLM-Omni's modules. All steps, windows and noise are therefore omni_sched's;
only the arithmetic of the transformer's other implementation differs from the trainer.

An unsharded trainer can hold its parameters in the engine's storage (`adopt`): a sync then moves no bytes.
`load_weights` copies the weights that are not adopted and requires all of them: a missing name, which vLLM-Omni would
silently skip, is an error. Names are diffusers': `to_q` is a slice of the rows of the fused `to_qkv`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor, nn

from omni_rollout.conditioning import TEXT_CACHE, TextCache
from omni_rollout.engines.vllm_omni.worker import start_worker, stop_worker
from omni_rollout.model import Model
from omni_rollout.offload import run_offloaded, to_host
from omni_rollout.sampler import Sampler
from omni_rollout.types import Cond, Params, Parts, Prompt, Trajectory

from vllm_omni.diffusion.request import OmniDiffusionRequest  # isort: skip - after the worker has set vLLM up
from vllm_omni.diffusion.sched.interface import CachedRequestData, DiffusionSchedulerOutput, NewRequestData  # isort: skip
from vllm_omni.inputs.data import OmniDiffusionSamplingParams  # isort: skip
from vllm_omni.platforms import current_omni_platform  # isort: skip

from omni_rollout.engines.vllm_omni.pipelines import PIPELINES  # isort: skip
from omni_rollout.engines.vllm_omni.quantized import QuantizedLayer, is_quantized  # isort: skip

PROBES = 32  # most elements of each weight that a sync compares afterwards


class VllmOmniEngine:
    """vLLM-Omni engine, at most one per process. It begins with the checkpoint's weights as version 0.

    model: from `open_model`. device: this rank's device; its index selects the accelerator. dtype: dtype of all
    weights. together: context manager for code that may fail on only one rank; one such as `same_error` then raises on
    all ranks, so that none waits forever. With a process group, all ranks construct their engines at the same point.
    quantization: format in which vLLM-Omni holds the weights of linear layers; None for `dtype`.

    Raises:
        ValueError: vLLM-Omni's platform does not match `device`, or it has no pipeline for the model or does not
            quantize it.
    """

    shares_weights = False  # adopted weights also get a new version and are checked
    is_exact = False

    def __init__(
        self,
        model: Model,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        quantization: Literal["fp8", "int8"] | None = None,
        together: Callable[[], AbstractContextManager[None]] = nullcontext,
        texts: TextCache = TEXT_CACHE,
    ) -> None:
        device = torch.device(device)
        if current_omni_platform.device_type != device.type:
            raise ValueError(f"device must be vLLM-Omni's, {current_omni_platform.device_type}, got {device}")
        kind = model.config["_class_name"]
        if kind not in PIPELINES:
            raise ValueError(f"model must be a {' or '.join(PIPELINES)} for the vLLM-Omni engine, got a {kind}")
        self.weight_version = self.moved_bytes = 0
        local_rank = device.index or 0
        options: dict[str, Any] = {"dtype": dtype, "quantization": quantization, "together": together}
        self._worker = start_worker(PIPELINES[kind], model.path, local_rank=local_rank, **options)
        self.pipeline: Any = self._worker.model_runner.pipeline
        self.pipeline.sampler = Sampler(model, self.pipeline.parts(model, dtype), texts)
        hosted: list[nn.Module] = [getattr(self.parts, name) for name in model.encoders] if model.host_encoders else []
        for encoder in hosted:
            run_offloaded(encoder.to("cpu"), device)
        self._hosted = {id(t) for encoder in hosted for t in [*encoder.parameters(), *encoder.buffers()]}
        self._layers = {name: QuantizedLayer(part) for name, part in self.net.named_modules() if is_quantized(part)}
        if quantization and not self._layers:
            stop_worker(self._worker)
            raise ValueError(
                f"quantization must be None for a {kind}, which vLLM-Omni does not quantize, got {quantization}"
            )
        self._quantized = {  # by diffusers' name: the layer, and the rows, on the meta device
            view_name: (layer, view)
            for name, layer in self._layers.items()
            for view_name, view in self._views({f"{name}.weight": layer.form}).items()
        }
        self._adopted: dict[str, nn.Parameter] = {}  # the trainer's parameters in the engine's storage
        self._asleep: list[Tensor] = []  # the tensors that `sleep` has freed
        # By a tensor's id: its values on the host, or only its shape if a sync brings the values.
        self._kept: dict[int, Tensor] = {}
        self._dropped = False  # True if the weights are invalid until the next sync
        self._calls = count()

    @property
    def parts(self) -> Parts:
        """Modules of the pipeline."""
        parts: Parts = self.pipeline.sampler.parts
        return parts

    @property
    def net(self) -> nn.Module:
        """Transformer that samples."""
        return self.parts.net

    def generate(self, prompts: Sequence[Prompt], params: Params) -> Trajectory:
        """Return one sample per prompt, in order, all in one batch; only the steps in `params.sde_steps` are kept.

        Raises:
            ValueError: there are no prompts, or the model does not support their size.
            RuntimeError: the engine sleeps, or waits for the weights that it has dropped.
        """
        if not prompts:
            raise ValueError("prompts must hold at least one prompt, got none")
        self._check_awake()
        if self._dropped:
            raise RuntimeError("the engine has slept and has no weights: call load_weights() first")
        call = next(self._calls)
        requests = [_request(f"{call}-{i}", p, params, self.weight_version) for i, p in enumerate(prompts)]
        outputs = self._worker.execute_model_batch(_schedule(call, requests), self._worker.od_config).runner_outputs
        trajectory = Trajectory.cat([output.result.output for output in outputs])
        # Inference-mode tensors cannot be used in training. Concatenation has copied all except this one.
        return replace(trajectory, sigmas=trajectory.sigmas.clone())

    def prepare(self, prompts: Sequence[Prompt], params: Params) -> None:
        """Sample the initial noise of the next batch, while the device is busy."""
        self.pipeline.sampler.prepare(prompts, params)

    def condition(self, prompts: Sequence[Prompt], params: Params) -> Cond:
        """Return the conditioning of `generate`; distinct texts and images are encoded once and cached."""
        self._check_awake()
        cond: Cond = self.pipeline.sampler.condition(prompts, params)
        return cond

    def weights(self) -> dict[str, Tensor]:
        """Return views of the transformer's unquantized weights under diffusers' names.

        Raises:
            RuntimeError: the engine sleeps.
        """
        self._check_awake()
        whole = {name: param.data for name, param in self.net.named_parameters()}
        names = [name for name in whole if name.endswith(".bias") or name.rpartition(".")[0] not in self._layers]
        return self._views({name: whole[name] for name in names})

    def _views(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return diffusers_views(self.net, params, self.pipeline.diffusers_names, self.pipeline.packed)

    @torch.no_grad()
    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Move a trainer's parameters into the engine's storage; return the number of bytes deduplicated.

        The trainer then updates the engine's weights in place. The values must equal the engine's, which reveals a
        wrong name or another checkpoint; they may be on the host. Earlier adoptions end. Quantized weights are not
        adopted.

        Raises:
            ValueError: the engine has no such weight, or one of another shape, dtype or value.
        """
        weights, self._adopted = self.weights(), {}
        for name, param in params:
            if name in self._quantized:
                continue
            view = _find_weight(weights, name, param)
            if param.dtype != view.dtype or not torch.equal(param.to(view.device), view):
                raise ValueError(
                    f"params must equal the engine's weights, but {name} ({param.dtype}) has other values, or "
                    f"another dtype, than the engine's ({view.dtype})"
                )
            param.data = view
            self._adopted[name] = param
        return sum(param.nbytes for param in self._adopted.values())

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy weights into the engine, one at a time, as `version`.

        tensors: full tensors under diffusers' names, with every weight of the transformer that is not adopted. Adopted
        ones may be included, and are not moved. `named_weights` of omni_train merges LoRA. No tensor is kept alive.
        After an error, some weights are new and some old: the engine must not be used any more.

        Raises:
            ValueError: the transformer has no such name or shape, a weight is missing, or another tensor is given for
                an adopted weight, which would overwrite the trainer's.
            RuntimeError: the engine sleeps, or its values differ afterwards.
        """
        weights, probes, moved, arrived = self.weights(), {}, 0, set[str]()
        targets = weights | dict(self.net.named_buffers()) | {name: rows for name, (_, rows) in self._quantized.items()}
        for layer in self._layers.values():
            layer.begin()
        for name, tensor in tensors:
            view = _find_weight(targets, name, tensor)
            if name in self._quantized:
                self._quantized[name][0].put(view, tensor)
                arrived.add(name)
                moved += tensor.nbytes
                continue
            probes[name] = _probe(tensor, version).to(view)
            is_there = view.data_ptr() == tensor.data_ptr()
            if name not in weights:  # a buffer, such as a table of positions: moved only if it differs
                is_there = torch.equal(probes[name], _probe(view, version))
            if not is_there:
                if name in self._adopted:
                    raise ValueError(f"tensors must not replace adopted weights, got another for {name}")
                view.copy_(tensor)
                moved += view.nbytes
            del tensor  # before the next one is gathered
        expected = weights.keys() | self._quantized.keys()
        missing = sorted(expected - probes.keys() - arrived - self._adopted.keys())
        if missing:
            summary = f"{len(missing)} of {len(expected)}: {missing[:4]}"
            raise ValueError(f"tensors must hold every weight that is not adopted, missing {summary}")
        self._check_arrival(probes, version)
        self.moved_bytes, self.weight_version, self._dropped = moved, version, False

    def sleep(self) -> None:
        """Free every tensor on the device that the trainer has not adopted; do nothing on a CPU.

        The net's weights are dropped, because the next sync has all of them; other tensors never change and are copied
        to the host once. vLLM's memory pool is not used: it would free adopted weights too, and torch's statistics do
        not include it.
        """
        if self._worker.device.type != "cpu" and not self._asleep:
            self._free()
            torch.accelerator.empty_cache()

    def wake(self) -> None:
        """Undo `sleep`; the next `load_weights` brings dropped weights."""
        device = self._worker.device
        for tensor in self._asleep:
            values = self._kept[id(tensor)]
            self._dropped |= values.is_meta
            tensor.data = (
                torch.empty_like(values, device=device) if values.is_meta else values.to(device, non_blocking=True)
            )
        self._asleep = []

    def _free(self) -> None:
        """Free the memory of tensors that are not adopted."""
        synced = {id(param) for param in self.net.parameters()}
        adopted = {param.untyped_storage().data_ptr() for param in self._adopted.values()}
        for tensor in [*self.pipeline.parameters(), *self.pipeline.buffers()]:
            if id(tensor) in self._hosted or tensor.untyped_storage().data_ptr() in adopted:
                continue
            if id(tensor) not in self._kept:
                self._kept[id(tensor)] = tensor.data.to("meta") if id(tensor) in synced else to_host(tensor.data)
            self._asleep.append(tensor)
            tensor.data = tensor.data.new_empty(0)

    def _check_awake(self) -> None:
        if self._asleep:
            raise RuntimeError("the engine sleeps: call wake() first")

    def close(self) -> None:
        """Free the engine; keep the process group and the weights that the trainer adopted."""
        self.pipeline = None
        self._adopted, self._asleep, self._kept = {}, [], {}
        stop_worker(self._worker)

    def _check_arrival(self, probes: dict[str, Tensor], version: int) -> None:
        """Raise RuntimeError unless some elements of each weight in the sampling modules equal the trainer's.

        Quantized weights are not compared. An adopted weight must also have the address of the trainer's parameter.
        """
        weights = self.weights() | dict(self.net.named_buffers())
        moved_away = [name for name, param in self._adopted.items() if param.data_ptr() != weights[name].data_ptr()]
        if moved_away:
            raise RuntimeError(f"the engine's storage is no longer the trainer's: {moved_away[:4]}")
        expected = probes | {name: _probe(param, version) for name, param in self._adopted.items()}
        actual = {name: _probe(weights[name], version) for name in expected}
        if not torch.equal(torch.cat(list(expected.values())), torch.cat(list(actual.values()))):
            differing = [name for name, probe in expected.items() if not torch.equal(probe, actual[name])]
            raise RuntimeError(f"the engine has other weights than it received, or NaN: {differing[:4]}")


def diffusers_views(
    transformer: Any, params: Mapping[str, Tensor], renamed: dict[str, str], packed: dict[str, list[str]]
) -> dict[str, Tensor]:
    """Return views of the weights of a vLLM-Omni transformer, given by its own names, under diffusers' names.

    A fused layer has the rows of its original layers in the order of `packed`, or of the transformer's
    `packed_modules_mapping`. renamed: parts of names, vLLM-Omni's -> diffusers'.
    """
    views: dict[str, Tensor] = {}
    fused = packed or transformer.packed_modules_mapping
    for name, param in params.items():
        layer, _, kind = name.rpartition(".")
        parent, _, leaf = layer.rpartition(".")
        if leaf in fused:
            rows = transformer.get_submodule(layer).output_sizes
            parts = zip(fused[leaf], param.split(rows), strict=True)
            views |= {f"{parent}.{part}.{kind}": piece for part, piece in parts}
            continue
        for old, new in renamed.items():
            name = name.replace(old, new)
        views[name] = param
    return views


def _request(name: str, prompt: Prompt, params: Params, weight_version: int) -> OmniDiffusionRequest:
    """Return vLLM-Omni's request for one sample, with the prompt and parameters as extra arguments."""
    sampling = OmniDiffusionSamplingParams(
        height=params.height,
        width=params.width,
        num_inference_steps=params.num_inference_steps,
        seed=0,  # unused: noise comes from omni_sched, from the prompt's seed
        extra_args={"prompt": prompt, "params": params, "weight_version": weight_version},
    )
    return OmniDiffusionRequest(prompt={"prompt": prompt.text}, sampling_params=sampling, request_id=name)


def _schedule(call: int, requests: list[OmniDiffusionRequest]) -> DiffusionSchedulerOutput:
    """Return a schedule of all requests as one batch."""
    return DiffusionSchedulerOutput(
        step_id=call,
        scheduled_new_reqs=[NewRequestData(request.request_id, request) for request in requests],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        finished_req_ids=set(),
        num_running_reqs=len(requests),
        num_waiting_reqs=0,
    )


def _find_weight(weights: dict[str, Tensor], name: str, tensor: Tensor) -> Tensor:
    """Return the weight of that name; raise ValueError unless it has the tensor's shape."""
    if name not in weights or weights[name].shape != tensor.shape:
        actual = tuple(weights[name].shape) if name in weights else "no such weight"
        raise ValueError(f"names and shapes must be the transformer's, got {name} {tuple(tensor.shape)}, have {actual}")
    return weights[name]


def _probe(tensor: Tensor, version: int) -> Tensor:
    """Return a copy of up to PROBES evenly spaced elements, which does not keep the tensor alive.

    The first element depends on the version, so that consecutive syncs eventually compare every element.
    """
    stride = max(1, -(-tensor.numel() // PROBES))
    return tensor.flatten()[version % stride :: stride].clone()
