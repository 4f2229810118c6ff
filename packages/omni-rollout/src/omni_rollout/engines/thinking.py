"""The embedded engine of models that think before they generate an image: a thought token by token, then the image.

The thought is sampled with a KV cache but scored without one, so its log-probabilities agree within rounding. The
denoising steps read the prompt and thought again in each forward pass, so a replayed step is bit-identical, and its
gradient reaches the layers that read the thought.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from omni_rollout.conditioning import TEXT_CACHE, TextCache
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.engines.transformers import TokenSampler, build_trajectory
from omni_rollout.sampler import check_prompts
from omni_rollout.thoughts import ThinkingModel, ThinkingParams, ThoughtTrajectory
from omni_rollout.tokens import TokenParams, TokenTrajectory
from omni_rollout.types import Cond, Params, Parts, Prompt

THOUGHT_NOISE = 1 << 20  # the noise stream of a sample's thought: larger than any step of a schedule


class ThinkingEngine(DiffusersEngine):
    """Engine that samples with a model's parts, as returned by `model.load`.

    together: returns True if its argument is True on all ranks. With sharded weights, all ranks must continue to
    generate until the last thought has ended.
    """

    def __init__(
        self,
        model: ThinkingModel,
        parts: Parts,
        *,
        texts: TextCache = TEXT_CACHE,
        together: Callable[[bool], bool] = bool,
    ) -> None:
        super().__init__(model, parts, texts=texts)
        self.model, self.together = model, together

    def generate(self, prompts: Sequence[Prompt], params: Params) -> ThoughtTrajectory:
        """Return a thought and a sample per prompt, in order, in one batch; `thought` in a prompt's meta is its text.

        Raises:
            ValueError: as in DiffusersEngine, or a prompt has an initial_seed.
        """
        if not isinstance(params, ThinkingParams):
            raise ValueError(f"params must be ThinkingParams, got {type(params).__name__}")
        check_prompts(prompts, self.model, params)
        if any(prompt.initial_seed is not None for prompt in prompts):  # thoughts differ
            raise ValueError("prompts must have no initial_seed for a model that thinks")
        cond = self.sampler.condition(prompts, params)
        thoughts = self.think(prompts, cond, params.thought)
        prompts = [
            replace(prompt, meta={**prompt.meta, "thought": text})
            for prompt, text in zip(prompts, thoughts.answers, strict=True)
        ]
        cond = self.model.with_thoughts(cond, thoughts)
        samples = self.sampler.sample(prompts, params, weight_version=self.weight_version, cond=cond)
        return ThoughtTrajectory(**vars(samples), thoughts=replace(thoughts, prompts=samples.prompts))

    @torch.no_grad()
    def think(self, prompts: Sequence[Prompt], cond: Cond, params: TokenParams) -> TokenTrajectory:
        """Return one thought per prompt, in order. A sample's random numbers depend only on its seed.

        cond: conditioning of the prompts, from `condition`.
        """
        encoded = tuple(
            self.model.thought_inputs(ids[mask].cpu()) for ids, mask in zip(cond["ids"], cond["ids_mask"], strict=True)
        )
        sampler = TokenSampler([prompt.seed for prompt in prompts], self.model.suppressed, params, stream=THOUGHT_NOISE)
        writing, chosen = self.model.start(encoded, cond["ids"].device), list[Tensor]()
        ends = torch.tensor(self.model.ends, device=cond["ids"].device)
        has_ended = torch.zeros(len(prompts), dtype=torch.bool, device=ends.device)
        while len(chosen) < params.max_new_tokens and not self.together(bool(has_ended.all())):
            logits = writing.next_logits(self.net, chosen[-1] if chosen else None)
            chosen.append(sampler(ends, logits).argmax(dim=-1))
            has_ended |= torch.isin(chosen[-1], ends)
        tokens, texts = torch.stack(chosen, dim=1), (self.model.ends, self.model.decode_text)
        return build_trajectory(tokens, sampler.log_probs, *texts, prompts, encoded, params, self.weight_version).trim()
