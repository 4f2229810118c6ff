"""vLLM inside the training process, for policies over tokens: each rank has a separate engine on its device.

It samples with other kernels than the update. The trajectory has its log-probabilities; the trainer logs their distance
from its own and corrects it by importance weights. Weights arrive as full tensors with merged adapters, one at a time,
the way vLLM reads a checkpoint's files.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from omni_rollout.engines.guest import ensure_process_group, keep_process_group, preserve_process_state
from omni_rollout.engines.transformers import build_trajectory, encode_prompts
from omni_rollout.engines.versions import check_vllm
from omni_rollout.models.tokens.qwen3_omni import Qwen3Omni
from omni_rollout.tokens import TokenModel, TokenParams, TokenTrajectory
from omni_rollout.types import Cond, Prompt

Sent = dict[str, tuple[int, int, Tensor]]  # by name in files: a column's index, the number of columns, its values


class VllmEngine:
    """vLLM engine, at most one per process. It begins with the checkpoint's weights as version 0.

    model: from `open_token_model`. device: this rank's device; vLLM uses that of LOCAL_RANK. memory_share: share of the
    device's memory for weights, KV cache and activations. max_tokens: limit of a prompt with its answer; 0 for the
    checkpoint's. All ranks construct their engines at the same point.

    Raises:
        ImportError: vLLM is not installed in the supported version.
    """

    shares_weights = False
    is_exact = False

    def __init__(
        self,
        model: TokenModel,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        memory_share: float = 0.3,
        max_tokens: int = 0,
    ) -> None:
        check_vllm()
        self.model, self.net = model, nn.Module()  # a trainer's hooks do not see vLLM's calls
        self.weight_version = self.moved_bytes = 0
        self.can_sleep = torch.device(device).type != "cpu"
        self._dropped = False  # True if the weights are invalid until the next sync
        if not self.can_sleep:
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # vLLM reads it when it is imported
        ranks = {name: os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK")}  # torchrun's, or a single rank's
        threads = patch.object(torch, "set_num_threads", torch.set_num_threads)  # vLLM disables it on a CPU
        with preserve_process_state(), patch.dict(os.environ, ranks), threads:
            from vllm import LLM
            from vllm.platforms import current_platform

            with ensure_process_group(current_platform.dist_backend), keep_process_group():
                self.llm: Any = LLM(
                    model=str(model.folder),
                    load_format="safetensors",
                    trust_remote_code=False,
                    dtype=str(dtype).removeprefix("torch."),
                    distributed_executor_backend="external_launcher",
                    logprobs_mode="processed_logprobs",  # after temperature, like the trainer's
                    gpu_memory_utilization=memory_share,
                    max_model_len=max_tokens or None,
                    mm_processor_cache_gb=0,  # the trainer prepares media
                    enable_sleep_mode=self.can_sleep,
                    enforce_eager=not self.can_sleep,  # no compilation on a CPU
                )

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], params: TokenParams) -> TokenTrajectory:
        """Return one answer per prompt, in order; vLLM schedules the batches. An answer depends only on its prompt.

        Raises:
            ValueError: there are no prompts, the model or vLLM does not support a prompt, or it is too long to answer.
            RuntimeError: the engine waits for weights that it has dropped.
        """
        if self._dropped:
            raise RuntimeError("the engine has slept and has no weights: call load_weights() first")
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        encoded = encode_prompts(self.model, prompts)
        longest, limit = max(len(item["input_ids"]) for item in encoded), self.llm.model_config.max_model_len
        if longest + params.max_new_tokens > limit:
            raise ValueError(f"prompt and answer must have at most {limit} tokens, got a prompt of {longest}")
        requests = {key: self._prepare_request(item) for key, item in {id(item): item for item in encoded}.items()}
        engine, done = self.llm.llm_engine, dict[int, Any]()
        try:
            for i, (item, prompt) in enumerate(zip(encoded, prompts, strict=True)):
                sampling = SamplingParams(
                    seed=prompt.seed,
                    max_tokens=params.max_new_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    logprobs=0,  # only the sampled token's
                    stop_token_ids=[*self.model.ends],
                    ignore_eos=True,  # `stop_token_ids` are the ends
                    logit_bias=dict.fromkeys(self.model.suppressed, -torch.inf) or None,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(str(i), requests[id(item)], sampling)
            while engine.has_unfinished_requests():
                done |= {int(output.request_id): output.outputs[0] for output in engine.step() if output.finished}
        except BaseException:
            engine.abort_request([str(i) for i in range(len(prompts))])  # later requests reuse their numbers
            raise
        answers = [done[i] for i in range(len(prompts))]
        tokens = [torch.tensor(answer.token_ids) for answer in answers]
        chosen = [
            torch.tensor([place[token].logprob for place, token in zip(a.logprobs, a.token_ids, strict=True)])
            for a in answers
        ]
        padded, texts = pad_sequence(tokens, True, self.model.ends[0]), (self.model.ends, self.model.decode)
        log_probs = pad_sequence(chosen).unbind()
        return build_trajectory(padded, log_probs, *texts, prompts, encoded, params, self.weight_version)

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Return 0: vLLM stores weights in other layouts."""
        return 0

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copy weights into the engine as `version`, and drop the caches of older ones.

        tensors: all weights as full tensors under the net's names; at most those of one layer are alive at a time.

        Raises:
            RuntimeError: a weight did not arrive or has other values; the engine must not be used any more.
        """
        self.moved_bytes, sent = 0, Sent()
        missing: list[list[str]] = self.llm.collective_rpc(
            _reload, args=(self._checkpoint_weights(tensors, sent, version),)
        )
        if any(missing):
            raise RuntimeError(f"vLLM must receive all of its weights, missing {len(missing[0])}: {missing[0][:4]}")
        differing: list[list[str]] = self.llm.collective_rpc(_find_differences, args=(sent,))
        if any(differing):
            raise RuntimeError(f"vLLM has other weights than it received, or NaN: {differing[0][:4]}")
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.weight_version, self._dropped = version, False

    def sleep(self) -> None:
        """Drop weights and KV cache (vLLM's level 2); the next sync has every weight. Do nothing on a CPU."""
        if self.can_sleep:
            self.llm.sleep(level=2)
            self._dropped = True

    def wake(self) -> None:
        """Undo `sleep`; the next `load_weights` brings the weights."""
        if self.can_sleep:
            self.llm.wake_up()

    def close(self) -> None:
        """Free the engine; keep the trainer's process group."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        with keep_process_group():
            self.llm.llm_engine.engine_core.shutdown()
            destroy_model_parallel()
            destroy_distributed_environment()
        self.llm = None

    def _prepare_request(self, encoded: Cond) -> Any:
        """Return a prompt as vLLM's processor would, with the trainer's tokens and media tensors."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids, media = encoded["input_ids"].tolist(), media_inputs(encoded, self.model.config)
        if not media:
            return tokens_input(ids)
        fields = self.llm.llm_engine.renderer.mm_processor._get_mm_fields_config(media, {})
        items = MultiModalKwargsItems.from_hf_inputs(media, fields)
        kinds = {self.model.config[f"{kind}_token_id"]: kind for kind in self.model.MEDIA}
        places: dict[str, list[Any]] = {kind: [] for kind in items}
        end = 0
        for token, run in groupby(ids):
            start, end = end, end + len([*run])
            if token in kinds:
                # vLLM counts the token before the thinker's media as part of them.
                early = isinstance(self.model, Qwen3Omni)
                is_embed = torch.tensor([False] * early + [True] * (end - start))
                places[kinds[token]].append(PlaceholderRange(start - early, len(is_embed), is_embed))
        if any(len(places[kind]) != len(items[kind]) for kind in items):
            raise ValueError("media in prompts for vLLM must be separated by a token")
        digest = sha256(b"".join(tensor.numpy().tobytes() for tensor in media.values())).hexdigest()
        names = {kind: [f"{digest} {kind} {i}" for i in range(len(items[kind]))] for kind in items}
        return mm_input(ids, items, names, places)

    def _checkpoint_weights(
        self, tensors: Iterable[tuple[str, Tensor]], sent: Sent, version: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield weights under their names in files, one per expert, and put a column of each into `sent`."""
        for name, tensor in tensors:
            self.moved_bytes += tensor.nbytes
            layer, _, kind = f"{self.model.prefix}{name}".rpartition(".")
            if not layer.endswith(".experts"):
                if tensor.ndim <= 2:
                    matrix = tensor if tensor.ndim == 2 else tensor[:, None]
                    column = version % matrix.shape[1]
                    sent[f"{layer}.{kind}"] = column, matrix.shape[1], matrix[:, column].clone()
                yield f"{layer}.{kind}", tensor
                continue
            kinds = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            for i, expert in enumerate(tensor):
                for projection, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                    yield f"{layer}.{i}.{projection}.weight", part


def media_inputs(encoded: Cond, config: Mapping[str, Any]) -> Cond:
    """Return the tensors of a prompt's media under vLLM's names.

    Raises:
        ValueError: a video's temporal positions are not whole numbers.
    """
    media = {name: tensor for name, tensor in encoded.items() if name != "input_ids"}
    if "video_second_per_grid" in media:
        rate = config["position_id_per_seconds"]
        step = media.pop("video_second_per_grid").item() * rate
        if abs(step - round(step)) > 1e-5:  # vLLM rounds positions down, transformers does not
            raise ValueError(f"{rate} positions per second times a video's 2 / fps must be whole for vLLM, got {step}")
        # in double precision and slightly larger, or vLLM would round some whole positions down
        media["second_per_grid_ts"] = torch.tensor([(round(step) + 1e-6) / rate], dtype=torch.float64)
    if "input_features" in media:
        mask = media["feature_attention_mask"]
        media["audio_feature_lengths"] = mask.sum(dim=1)
        media["input_audio_features"] = media.pop("input_features").transpose(1, 2)[mask.bool()].T
    return media


def _reload(worker: Any, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
    """Load weights into a vLLM worker; return the names of those that did not arrive, for which vLLM only warns."""
    net, arrived = worker.get_model(), set[str]()
    load = net.load_weights
    for layer in net.modules():  # on a CPU, vLLM packs experts only while it creates the kernel
        method = getattr(layer, "quant_method", None)
        if worker.device.type == "cpu" and method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None

    def record(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        arrived.update(load(weights))
        return arrived

    expected = {name.replace(".routed_experts.", ".") for name, _ in net.named_parameters()}  # as loaded
    with patch.object(net, "load_weights", record):
        worker.reload_weights(weights_iterator=tensors)
    return sorted(expected - {name.replace(".routed_experts.", ".") for name in arrived})


def _find_differences(worker: Any, sent: Sent) -> list[str]:
    """Return the names of weights that differ from the sent column; each version sends another column.

    On a CPU, layers pack their weights, so a column is the product with a one-hot row. Experts, and towers whose layers
    have other names, are not compared.
    """
    net, differing = worker.get_model(), []
    layers = dict(net.named_modules())
    fused = {part: (whole, parts) for whole, parts in net.packed_modules_mapping.items() for part in parts}
    for name, (column, columns, expected) in sent.items():
        renamed = name
        for prefix, new_prefix in net.hf_to_vllm_mapper.orig_to_new_prefix.items():
            renamed = f"{new_prefix}{renamed.removeprefix(prefix)}" if renamed.startswith(prefix) else renamed
        path, _, kind = renamed.rpartition(".")
        parent, _, leaf = path.rpartition(".")
        whole, parts = fused.get(leaf, (leaf, [leaf]))
        layer = layers.get(f"{parent}.{whole}".lstrip("."))
        weight = getattr(layer, kind, None)
        if layer is None or weight is None:
            continue
        if weight.numel():
            values = weight.reshape(-1, columns)[:, column]
        else:
            row = torch.zeros(1, columns, dtype=weight.dtype, device=weight.device)
            row[0, column] = 1
            values = layer.quant_method.apply(layer, row)[0]
        if len(parts) > 1:
            values = values.split(layer.output_sizes)[parts.index(leaf)]
        values = values[: len(expected)]  # a vocabulary is padded
        if not torch.allclose(values, expected.to(values), rtol=1e-3, atol=0):  # kernels may round
            differing.append(name)
    return differing
