"""Half-precision inputs: every loss computes in float32 from its first operation on."""

from collections.abc import Callable

import omni_losses
import pytest
import torch
from omni_losses import LossOutput
from torch import Tensor

torch.set_num_threads(1)

Losses = dict[str, Callable[[list[Tensor], list[Tensor], Tensor], LossOutput | Tensor]]

# Each is called with latents [3, 5], log-probabilities [3] and noise levels [3], all of one dtype.
LOSSES: Losses = {
    "grpo_loss": lambda x, p, s: omni_losses.grpo_loss(p[0], p[1], p[2], clip_range=(0.1, 0.3), weights=s),
    "grpo_guard_loss": lambda x, p, s: omni_losses.grpo_guard_loss(
        p[0], p[1], p[2], mean=x[0], old_mean=x[1], std=s, sqrt_dt=s, clip_range=0.3, weights=s
    ),
    "flow_dppo_loss": lambda x, p, s: omni_losses.flow_dppo_loss(
        p[0], p[1], p[2], mean=x[0], old_mean=x[1], std=s, kl_threshold=1.0, weights=s
    ),
    "tempflow_weights": lambda x, p, s: omni_losses.tempflow_weights(s),
    "velocity_error": lambda x, p, s: omni_losses.velocity_error(x[0], x[1], x[2]),
    "reward_probability": lambda x, p, s: omni_losses.reward_probability(p[0]),
    "diffusion_nft_loss": lambda x, p, s: omni_losses.diffusion_nft_loss(
        x[0], x[1], x[2], x[3], s, s, nft_beta=0.3, ref_velocity=x[4], kl_coef=0.1, weights=s
    ),
    "awm_log_prob": lambda x, p, s: omni_losses.awm_log_prob(x[0], x[1], x[2], s),
    "diffusion_dpo_loss": lambda x, p, s: omni_losses.diffusion_dpo_loss(p[0], p[1], p[2], p[3], dpo_beta=10.0),
    "sequence_dpo_loss": lambda x, p, s: omni_losses.sequence_dpo_loss(p[0], p[1], p[2], p[3], dpo_beta=0.5),
    "gspo_loss": lambda x, p, s: omni_losses.gspo_loss(x[0], x[1], p[0], torch.ones(3, 5), clip_low=0.3, clip_high=0.4),
    "token_nll_loss": lambda x, p, s: omni_losses.token_nll_loss(x[0], torch.ones(3, 5), weights=s),
    "direct_align": lambda x, p, s: omni_losses.direct_align(x[0], x[1], x[2], s, s / 2),
    "srpo_loss": lambda x, p, s: omni_losses.srpo_loss(p[0], p[1], discount=s),
    "gaussian_kl": lambda x, p, s: omni_losses.gaussian_kl(x[0], x[1], s),
    "velocity_kl": lambda x, p, s: omni_losses.velocity_kl(x[0], x[1]),
    "k3_kl": lambda x, p, s: omni_losses.k3_kl(p[0], p[1]),
    "distill_kl_loss": lambda x, p, s: omni_losses.distill_kl_loss(x[0], x[1], s, weights=s),
    "distill_velocity_loss": lambda x, p, s: omni_losses.distill_velocity_loss(x[0], x[1], weights=s),
    "token_divergence_reverse": lambda x, p, s: omni_losses.token_divergence(x[0], x[1], divergence="reverse"),
    "token_divergence_forward": lambda x, p, s: omni_losses.token_divergence(x[0], x[1], divergence="forward"),
    "token_divergence_jsd": lambda x, p, s: omni_losses.token_divergence(x[0], x[1], divergence="jsd"),
    "distribution_matching_loss": lambda x, p, s: omni_losses.distribution_matching_loss(x[0], x[1], x[2], weights=s),
    "added_noise_error": lambda x, p, s: omni_losses.added_noise_error(x[0], x[1], x[2], s, s),
    "rollout_weights": lambda x, p, s: omni_losses.rollout_weights(x[0], x[1], low=0.5, high=2.0)[0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_it_equals_the_loss_of_the_same_numbers_in_float32(name: str, dtype: torch.dtype) -> None:
    """The inputs are numbers that every dtype holds exactly, so that only the arithmetic could differ."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().half()

    latents, log_probs = [draw(3, 5) for _ in range(5)], [draw(3) for _ in range(4)]
    levels = torch.tensor([0.25, 0.625, 0.9375]).half()
    results = [
        LOSSES[name]([x.to(to) for x in latents], [p.to(to) for p in log_probs], levels.to(to))
        for to in (dtype, torch.float32)
    ]
    found, expected = (out.loss if isinstance(out, LossOutput) else out for out in results)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    if isinstance(results[0], LossOutput) and isinstance(results[1], LossOutput):
        assert results[0].metrics == results[1].metrics


POLICY = {  # what a gradient reaches, where that is not the first latent or log-probability alone
    "grpo_guard_loss": {"x0", "p0"}, "diffusion_dpo_loss": {"p0", "p1"},
    "sequence_dpo_loss": {"p0", "p1"}, "srpo_loss": {"p0", "p1"},
    "tempflow_weights": set(), "reward_probability": set(), "rollout_weights": set(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_reaches_the_numbers_of_the_policy_only_and_metrics_are_scalars_without_one(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    given = {f"x{i}": torch.randn(3, 5, generator=generator) for i in range(5)}
    given |= {f"p{i}": 0.05 * torch.randn(3, generator=generator) for i in range(4)}
    given["s"] = torch.tensor([0.25, 0.625, 0.9375])
    for leaf in given.values():
        leaf.requires_grad_()
    out = LOSSES[name]([given[f"x{i}"] for i in range(5)], [given[f"p{i}"] for i in range(4)], given["s"])
    if isinstance(out, LossOutput):
        assert out.loss.shape == ()
        assert all(value.shape == () and not value.requires_grad for value in out.metrics.values())
    total = (out.loss if isinstance(out, LossOutput) else out).sum()
    if total.requires_grad:
        total.backward()
    reached = {key for key, leaf in given.items() if leaf.grad is not None}
    assert reached == POLICY.get(name, reached & {"x0", "p0"})
    assert reached or name in POLICY
