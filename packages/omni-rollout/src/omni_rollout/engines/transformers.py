"""The embedded engine of language models: transformers' generation in the training process, on the trained module.

It samples with a KV cache, and therefore with other shapes than the update: log-probabilities agree within rounding,
5e-7 in float32. Trainers compute the old policy's log-probabilities with `score_tokens`, and use this engine's only to
report the gap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from omni_sched import INITIAL_NOISE, step_noise
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationConfig

from omni_rollout.tokens import TokenModel, TokenParams, TokenTrajectory, token_log_probs
from omni_rollout.tool import Tool, ToolCalls
from omni_rollout.types import Cond, Prompt


class TransformersEngine:
    """Engine that samples with a language model's net, as returned by `TokenModel.load_net`.

    synced: True if the net is sharded: all ranks call it until the answers on all ranks have ended. tool: tool that
    answers may call.
    """

    shares_weights = True
    is_exact = True
    moved_bytes = 0

    def __init__(self, model: TokenModel, net: nn.Module, *, synced: bool = False, tool: Tool | None = None) -> None:
        self.model, self.net, self.synced, self.tool = model, net, synced, tool
        self.weight_version = 0

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], params: TokenParams) -> TokenTrajectory:
        """Return one answer per prompt, in order, in one batch. A sample's random numbers depend only on its seed.

        Raises:
            ValueError: there are no prompts, or the model does not support one.
        """
        encoded = encode_prompts(self.model, prompts)
        device, empty = next(self.net.parameters()).device, torch.empty(len(prompts), 0, dtype=torch.long)
        inputs = self.model.inputs(encoded, empty.to(device), empty.bool().to(device))
        inputs.pop("position_ids", None)  # generation computes them from the mask
        calls = ToolCalls(self.tool, self.model, len(prompts)) if self.tool else None
        sampler = TokenSampler([prompt.seed for prompt in prompts], self.model.suppressed, params, calls=calls)
        ends, max_new_tokens = [*self.model.ends], params.max_new_tokens
        config = GenerationConfig(
            max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=ends, pad_token_id=ends[0], use_cache=True
        )
        self.net.generation_config = GenerationConfig()  # type: ignore[assignment]  # the net's would fill in defaults
        head: nn.Module = self.net.get_output_embeddings()  # type: ignore[operator]  # all transformers models have it
        last = head.register_forward_pre_hook(lambda _, args: (args[0][:, -1:],))  # logits of all positions are large
        try:
            whole = self.net.generate(  # type: ignore[operator]
                **inputs, generation_config=config, logits_processor=[sampler], synced_gpus=self.synced
            )
        finally:
            last.remove()
        tokens = whole[:, inputs["input_ids"].shape[1] :]
        trajectory = build_trajectory(
            tokens, sampler.log_probs, self.model.ends, self.model.decode, prompts, encoded, params, self.weight_version
        )
        return (
            replace(trajectory, forced=torch.stack(sampler.forced, dim=1).cpu() & trajectory.mask)
            if calls
            else trajectory
        )

    def adopt(self, params: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Return 0: this engine uses the trainer's parameters."""
        return 0

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]], *, version: int) -> None:
        """Set the version: the engine uses the trainer's weights."""
        self.weight_version = version

    def sleep(self) -> None:
        """Do nothing: all of the engine's weights are trained."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: the caller owns the net."""


def encode_prompts(model: TokenModel, prompts: Sequence[Prompt]) -> tuple[Cond, ...]:
    """Return the result of `model.encode` for each prompt; equal prompts share one result.

    Raises:
        ValueError: there are no prompts, or the model does not support one.
    """
    if not prompts:
        raise ValueError("prompts must hold at least one prompt, got none")
    chats = [repr([prompt.meta.get(key) for key in ("system", "messages")]) for prompt in prompts]
    keys = [(p.text, chat, *map(id, (*p.images, p.audio, p.video))) for p, chat in zip(prompts, chats, strict=True)]
    known = {key: model.encode(prompt) for key, prompt in dict(zip(keys, prompts, strict=True)).items()}
    return tuple(known[key] for key in keys)


def build_trajectory(
    tokens: Tensor,
    log_probs: Sequence[Tensor],
    ends: Sequence[int],
    decode: Callable[[Tensor], str],
    prompts: Sequence[Prompt],
    encoded: tuple[Cond, ...],
    params: TokenParams,
    weight_version: int,
) -> TokenTrajectory:
    """Return the answers, on the host, from sampled tokens [B, T] and their log-probabilities, T times [B].

    ends: tokens that end an answer; those after the first are masked. decode: returns the text of an answer's tokens.
    """
    is_end = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    mask = is_end.cumsum(dim=1) - is_end.long() == 0
    log_prob = torch.where(mask, torch.stack(list(log_probs), dim=1), 0.0).cpu()
    tokens, mask, ended = tokens.cpu(), mask.cpu(), is_end.any(dim=1).cpu()
    answers = tuple(decode(row[kept]) for row, kept in zip(tokens, mask, strict=True))
    return TokenTrajectory(
        prompts=tuple(prompts),
        media={},
        rates={},
        weight_version=weight_version,
        encoded=encoded,
        tokens=tokens,
        mask=mask,
        forced=torch.zeros_like(mask),
        rollout_log_prob=log_prob,
        ended=ended,
        answers=answers,
        params=params,
    )


def trajectory_from_texts(
    model: TokenModel, prompts: Sequence[Prompt], texts: Sequence[str], params: TokenParams, *, weight_version: int = 0
) -> TokenTrajectory:
    """Return given answers to prompts as if sampled: each text with the end token, and a rollout_log_prob of 0.

    Raises:
        ValueError: an answer has more than `max_new_tokens` tokens, or the model does not support a prompt.
    """
    rows = [torch.tensor([*model.tokenize(text), model.ends[0]]) for text in texts]
    if (longest := max(map(len, rows))) > params.max_new_tokens:
        raise ValueError(f"an answer must have at most {params.max_new_tokens} tokens with its end, got {longest}")
    tokens = torch.stack([pad(row, [0, longest - len(row)], value=model.ends[0]) for row in rows])
    log_probs = [torch.zeros(len(rows))] * longest
    encoded = encode_prompts(model, prompts)
    return build_trajectory(tokens, log_probs, model.ends, model.decode, prompts, encoded, params, weight_version)


UNITS = 2**31  # per unit of probability; its square fits int64


class TokenSampler:
    """Sampler of next tokens by inverse transform sampling, with uniform numbers from each sample's seed.

    transformers calls it with logits [B, V], and selects the only token whose result is not -inf. log_probs: those of
    the tokens so far, [B] each. calls: tool calls, whose results replace sampled tokens. forced: for each token so far,
    True where it is from a tool, [B] each; empty without `calls`. stream: noise stream of a sample; each use of a seed
    has its own.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        suppressed: Sequence[int],
        params: TokenParams,
        *,
        calls: ToolCalls | None = None,
        stream: int = INITIAL_NOISE,
    ) -> None:
        normal = step_noise(seeds, stream, (params.max_new_tokens,))
        self.places = (torch.special.ndtr(normal.double()) * UNITS).long()  # [B, T]
        self.suppressed, self.params = suppressed, params
        self.calls, self.log_probs, self.forced = calls, list[Tensor](), list[Tensor]()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores in which one token can be sampled."""
        log_probs = token_log_probs(scores, self.suppressed, self.params)
        ordered, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
        counts = (ordered * UNITS).long()  # sums of integers are exact on every device
        kept = counts.cumsum(dim=-1) - counts < self.params.top_p * UNITS  # always keeps the first one
        share = (counts * kept).cumsum(dim=-1)
        place = self.places[:, len(self.log_probs)].to(share.device) * share[:, -1] // UNITS
        rank = torch.searchsorted(share, place[:, None], right=True).clamp(max=share.shape[-1] - 1)
        token = order.gather(-1, rank)
        log_prob = log_probs.gather(-1, token)
        if self.calls:
            forced = self.calls.next(input_ids[:, input_ids.shape[1] - len(self.log_probs) :])[:, None]
            is_forced = forced >= 0
            token, log_prob = torch.where(is_forced, forced, token), torch.where(is_forced, 0.0, log_prob)
            self.forced.append(is_forced[:, 0])
        self.log_probs.append(log_prob[:, 0])
        return torch.full_like(scores, -torch.inf).scatter(-1, token, 0.0)
