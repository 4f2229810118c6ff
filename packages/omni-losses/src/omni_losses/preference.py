"""Losses on pairs of samples in which one sample is preferred.

Notation: N samples from all ranks; B pairs. The two samples of a pair share the prompt; two media samples also share
noise and noise level.
"""

from torch import Tensor
from torch.nn.functional import logsigmoid

from omni_losses.advantages import check_rewards
from omni_losses.output import LossOutput, require_batch, require_positive


def best_worst_pairs(rewards: Tensor, groups: Tensor) -> list[tuple[int, int]]:
    """Return the pair (best, worst) of every group, as indices into rewards; groups in the order of their first sample.

    Samples without a score (NaN) are in no pair. A group with fewer than two different rewards gives no pair: a tie
    would only add noise. Among equal rewards, the first is taken.

    Args:
        rewards: [N], any scale, NaN where there is no score.
        groups: [N], integer ids.

    Raises:
        ValueError: shapes or dtypes do not match, or a reward is infinite.

    Source: the pairs of online DPO in flow_grpo and verl-omni, which also form a pair from a tie.
    """
    check_rewards(rewards, groups)
    members: dict[int, list[int]] = {}
    values = rewards.tolist()
    for index, (value, group) in enumerate(zip(values, groups.tolist(), strict=True)):
        if value == value:  # not NaN
            members.setdefault(group, []).append(index)
    pairs = [(max(group, key=values.__getitem__), min(group, key=values.__getitem__)) for group in members.values()]
    return [(best, worst) for best, worst in pairs if values[best] > values[worst]]


def diffusion_dpo_loss(
    win_error: Tensor, lose_error: Tensor, ref_win_error: Tensor, ref_lose_error: Tensor, *, dpo_beta: float
) -> LossOutput:
    """Compute the loss of Diffusion-DPO: the preferred sample should gain more over the reference than the other one.

        g_win = ref_win_error - win_error,   g_lose = ref_lose_error - lose_error
        L     = 1/B sum_i -log sigmoid(dpo_beta / 2 (g_win_i - g_lose_i))

    Args:
        win_error, lose_error: [B], from `velocity_error` with the weights being trained, for the preferred and the
            other sample, with the same noise and noise level; gradients flow here only.
        ref_win_error, ref_lose_error: [B], from the reference, with the same noise and noise level.
        dpo_beta: > 0; published values are 2000 to 5000, and 100 online.

    Returns:
        The loss and `accuracy`, the share of pairs that the policy ranks as preferred; `chosen_reward`,
        `rejected_reward`, the means of dpo_beta / 2 times g; and `margin`, their difference.

    Raises:
        ValueError: shapes differ, or dpo_beta is not positive.

    Source: Diffusion-DPO (arXiv 2311.12908), eq. 14. The paper has beta T omega(lambda) with T denoising steps and a
    sum over elements; its released code has dpo_beta / 2 and the mean over elements, as here.
    """
    require_batch(
        "win_error", win_error, lose_error=lose_error, ref_win_error=ref_win_error, ref_lose_error=ref_lose_error
    )
    require_positive(dpo_beta=dpo_beta)
    return _dpo(
        dpo_beta / 2 * (ref_win_error.detach().float() - win_error.float()),
        dpo_beta / 2 * (ref_lose_error.detach().float() - lose_error.float()),
    )


def sequence_dpo_loss(win: Tensor, lose: Tensor, ref_win: Tensor, ref_lose: Tensor, *, dpo_beta: float) -> LossOutput:
    """Compute the loss of DPO for text answers: the preferred one should gain more over the reference than the other.

        g_win = win - ref_win,   g_lose = lose - ref_lose
        L     = 1/B sum_i -log sigmoid(dpo_beta (g_win_i - g_lose_i))

    If the policy equals the reference, every margin is exactly 0 and each pair's loss is log 2.

    Args:
        win, lose: [B], nats, log-probabilities of the preferred and the other answer, summed over their tokens, from
            the weights being trained; gradients flow here only.
        ref_win, ref_lose: [B], same unit, from the reference.
        dpo_beta: > 0; published values are 0.1, and 0.5 for summaries.

    Returns:
        The loss and the metrics of `diffusion_dpo_loss`, with dpo_beta instead of dpo_beta / 2.

    Raises:
        ValueError: shapes differ, or dpo_beta is not positive.

    Source: DPO (arXiv 2305.18290), eq. 7; dpo_beta as in its appendix B.
    """
    require_batch("win", win, lose=lose, ref_win=ref_win, ref_lose=ref_lose)
    require_positive(dpo_beta=dpo_beta)
    return _dpo(
        dpo_beta * (win.float() - ref_win.detach().float()), dpo_beta * (lose.float() - ref_lose.detach().float())
    )


def _dpo(chosen: Tensor, rejected: Tensor) -> LossOutput:
    """Return the logistic loss and the metrics of implicit rewards [B] of the preferred and the rejected samples."""
    margin = chosen - rejected
    metrics = {
        "accuracy": (margin > 0).float().mean(),
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
        "margin": margin.mean(),
    }
    return LossOutput(-logsigmoid(margin).mean(), {name: value.detach() for name, value in metrics.items()})
