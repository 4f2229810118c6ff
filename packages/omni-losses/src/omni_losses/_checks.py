"""Checks of arguments that several losses share: one sentence for each, so that errors read alike."""

from torch import Tensor

FLOAT32_STEP = 2.0**-24  # 1 minus this is the float32 below 1; 1 plus this rounds to 1


def require_batch(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not [B] with B >= 1."""
    if tensor.ndim != 1 or len(tensor) == 0:
        raise ValueError(f"{name} must be [B] with B >= 1, got shape {tuple(tensor.shape)}")


def require_latents(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not [B, ...] with B >= 1 and at least one axis behind B."""
    if tensor.ndim < 2 or len(tensor) == 0:
        raise ValueError(f"{name} must be [B, ...] with B >= 1, got shape {tuple(tensor.shape)}")


def require_shape_of(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Refuse others, where they are given, of another shape than tensor, whose name in the message is `name`."""
    for other_name, other in others.items():
        if other is not None and other.shape != tensor.shape:
            raise ValueError(f"{other_name} must have {name}'s shape {tuple(tensor.shape)}, got {tuple(other.shape)}")


def require_per_sample(latents: Tensor, **others: Tensor | None) -> None:
    """Refuse others, where they are given, that are not [B], B the first size of latents."""
    for name, other in others.items():
        if other is not None and other.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [B] = {tuple(latents.shape[:1])}, got shape {tuple(other.shape)}")


def require_positive(**numbers: float) -> None:
    """Refuse numbers that are not > 0, NaN among them."""
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be > 0, got {number}")


def require_not_negative(**numbers: float) -> None:
    """Refuse numbers that are not >= 0, NaN among them."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} must be >= 0, got {number}")


def require_clip_width(**widths: float) -> None:
    """Refuse widths around 1 that vanish in float32, where every ratio but 1 itself would be clipped."""
    for name, width in widths.items():
        if not width > FLOAT32_STEP:
            raise ValueError(f"{name} must be > {FLOAT32_STEP:.3g}, the resolution of float32 at 1, got {width}")
