"""The rules that arguments of several losses share: one sentence for each, so that errors read alike."""

from torch import Tensor


def require_batch(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless tensor is [B] with B >= 1."""
    if tensor.ndim != 1 or len(tensor) == 0:
        raise ValueError(f"{name} must be [B] with B >= 1, got shape {tuple(tensor.shape)}")


def require_latents(name: str, tensor: Tensor) -> None:
    """Raises ValueError unless tensor is [B, ...] with B >= 1 and at least one axis behind B."""
    if tensor.ndim < 2 or len(tensor) == 0:
        raise ValueError(f"{name} must be [B, ...] with B >= 1, got shape {tuple(tensor.shape)}")


def require_shape_of(name: str, tensor: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError unless each of the others that is not None has the shape of tensor, which is called name."""
    for other_name, other in others.items():
        if other is not None and other.shape != tensor.shape:
            raise ValueError(f"{other_name} must have {name}'s shape {tuple(tensor.shape)}, got {tuple(other.shape)}")


def require_per_sample(latents: Tensor, **others: Tensor | None) -> None:
    """Raises ValueError unless each of the others that is not None is [B], B the first size of latents."""
    for name, other in others.items():
        if other is not None and other.shape != latents.shape[:1]:
            raise ValueError(f"{name} must be [B] = {tuple(latents.shape[:1])}, got shape {tuple(other.shape)}")


def require_positive(**numbers: float) -> None:
    """Raises ValueError unless each number is > 0; NaN is not."""
    for name, number in numbers.items():
        if not number > 0:
            raise ValueError(f"{name} must be > 0, got {number}")


def require_not_negative(**numbers: float) -> None:
    """Raises ValueError unless each number is >= 0; NaN is not."""
    for name, number in numbers.items():
        if not number >= 0:
            raise ValueError(f"{name} must be >= 0, got {number}")
