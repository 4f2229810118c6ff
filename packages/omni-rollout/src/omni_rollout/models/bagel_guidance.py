"""BAGEL's guidance by text and by references: three velocities, and a bound on the norm of the guided one.

With scales s and i, the velocities v with text and references, v_t without the text and v_r without the references:

    guided = v_r + i (w - v_r),   w = v_t + s (v - v_t)

A result longer than v is scaled down to the norm of v, by a factor of at least cfg_renorm_min. cfg_renorm_type selects
what is scaled: `guided` over the whole sample (GLOBAL) or per token (CHANNEL), or w per token (TEXT_CHANNEL).
"""

from collections.abc import Mapping

from torch import Tensor

from omni_rollout.models.diffusers_model import pack, unpack

GLOBAL, CHANNEL, TEXT_CHANNEL = 0, 1, 2


def guide(
    velocity: Tensor, no_text: Tensor, no_references: Tensor, scale: float, options: Mapping[str, float]
) -> Tensor:
    """Return the guided velocity [B, C, h, w] from v, v_t, v_r. scale: s. options: BAGEL's, cfg_img_scale: i."""
    image_scale, kind = options["cfg_img_scale"], options["cfg_renorm_type"]
    guided = no_text + scale * (velocity - no_text)
    if kind == TEXT_CHANNEL:
        guided = _shorten(guided, velocity, options["cfg_renorm_min"], by_token=True)
    if image_scale > 1:
        guided = no_references + image_scale * (guided - no_references)
    if kind != TEXT_CHANNEL:
        guided = _shorten(guided, velocity, options["cfg_renorm_min"], by_token=kind == CHANNEL)
    return guided


def _shorten(guided: Tensor, velocity: Tensor, min_factor: float, *, by_token: bool) -> Tensor:
    """Scale `guided` down to at most the norm of `velocity`, per sample or token, by at least `min_factor`."""
    if by_token:
        tokens = pack(guided)
        lengths = [tensor.norm(dim=2, keepdim=True) for tensor in (pack(velocity), tokens)]
        return unpack(tokens * (lengths[0] / (lengths[1] + 1e-8)).clamp(min_factor, 1), guided.shape)
    lengths = [tensor.flatten(1).norm(dim=1)[:, None, None, None] for tensor in (velocity, guided)]
    return guided * (lengths[0] / (lengths[1] + 1e-8)).clamp(min_factor, 1)
