"""Small networks from a model's features to a score, built from their weights.

A network is a sequence of linear layers, named by position: "0.weight", "0.bias", "2.weight" etc. The positions of
dropout and activations in training have no weights.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn


def build_head(weights: Mapping[str, Tensor], num_features: int, num_scores: int, *, has_relu: bool) -> nn.Sequential:
    """Return a float32 network from num_features to num_scores numbers.

    Args:
        weights: its weights, by position and kind.
        num_features, num_scores: sizes of input and output.
        has_relu: True if a ReLU follows each layer except the last.

    Raises:
        ValueError: the weights do not belong to such a sequence.
    """
    places = sorted({int(match[1]) for name in weights if (match := re.fullmatch(r"(\d+)\.(weight|bias)", name))})
    names = {f"{place}.{kind}" for place in places for kind in ("weight", "bias")}
    if not places or weights.keys() != names:
        raise ValueError(f"a head must have a weight and a bias for each position, got {sorted(weights)[:8]}")
    shapes = [tuple(weights[f"{place}.weight"].shape) for place in places]
    sizes = [num_features, *(shape[0] for shape in shapes)]
    expected = list(zip(sizes[1:], sizes, strict=False))
    biases = [tuple(weights[f"{place}.bias"].shape) for place in places]
    if shapes != expected or biases != [(size,) for size in sizes[1:]] or sizes[-1] != num_scores:
        raise ValueError(f"a head must map {num_features} numbers to {num_scores}, got layers of the shapes {shapes}")
    layers: list[nn.Module] = []
    for place, (num_out, num_in) in zip(places, shapes, strict=True):
        linear = nn.Linear(num_in, num_out)
        linear.load_state_dict({kind: weights[f"{place}.{kind}"].float() for kind in ("weight", "bias")})
        layers += [linear, nn.ReLU()] if has_relu else [linear]
    return nn.Sequential(*(layers[:-1] if has_relu else layers)).requires_grad_(False)
