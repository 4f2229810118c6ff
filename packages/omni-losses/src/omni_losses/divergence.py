"""How far a policy is from a reference.

Letters: B samples. A step's transition is a normal distribution around `mean` with one `std` for all latent elements.
"""

from torch import Tensor


def gaussian_kl(mean: Tensor, ref_mean: Tensor, std: Tensor) -> Tensor:
    """The KL divergence of a step's transition from the reference's, [B], nats per latent element.

        KL = mean over elements of (mean - ref_mean)^2 / (2 std^2)

    Times the number of latent elements it is the exact KL of the two normal distributions, which share `std`.

    Args:
        mean: [B, ...], latent units, of the weights being trained.
        ref_mean: [B, ...], latent units, of the reference; no gradient flows here.
        std: [B], latent units, > 0: the standard deviation of x_next given x, with its factor sqrt(-dt).

    Raises:
        ValueError: shapes do not fit.

    Source: the closed-form KL of Flow-GRPO (arXiv 2505.05470). Released code (flow_grpo, verl-omni) takes the diffusion
    coefficient for `std`, without sqrt(-dt): its KL is |dt| times this one, and a coefficient tuned there has to be
    multiplied by |dt| here.
    """
    if mean.ndim < 2 or ref_mean.shape != mean.shape:
        raise ValueError(
            f"mean and ref_mean must be [B, ...] alike, got shapes {tuple(mean.shape)} and {tuple(ref_mean.shape)}"
        )
    if std.shape != mean.shape[:1]:
        raise ValueError(f"std must be [B] = {tuple(mean.shape[:1])}, got shape {tuple(std.shape)}")
    squares = (mean.float() - ref_mean.detach().float()).square().flatten(1).mean(dim=1)
    return squares / (2 * std.detach().float().square())
