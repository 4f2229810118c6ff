"""The small network that turns a model's features into a score, built to fit its weights.

It is a row of linear layers, whose places in the row stand in the weights' names: "0.weight", "0.bias", "2.weight" and
so on. What stood in between while it was trained, dropout and activations, has no weights and so leaves a gap.
"""

import re
from collections.abc import Mapping

from torch import Tensor, nn


def build_head(weights: Mapping[str, Tensor], num_features: int, num_scores: int, *, has_relu: bool) -> nn.Sequential:
    """Network, float32, that makes num_scores numbers of num_features.

    Args:
        weights: its weights, by their place in the row.
        num_features, num_scores: what must go in and come out.
        has_relu: whether a ReLU stands between any two layers; else nothing does.

    Raises:
        ValueError: the weights are not those of such a row.
    """
    places = sorted({int(match[1]) for name in weights if (match := re.fullmatch(r"(\d+)\.(weight|bias)", name))})
    names = {f"{place}.{kind}" for place in places for kind in ("weight", "bias")}
    if not places or weights.keys() != names:
        raise ValueError(f"a head must hold a weight and a bias for each place of a row, got {sorted(weights)[:8]}")
    shapes = [tuple(weights[f"{place}.weight"].shape) for place in places]
    sizes = [num_features, *(shape[0] for shape in shapes)]
    wanted = list(zip(sizes[1:], sizes, strict=False))
    biases = [tuple(weights[f"{place}.bias"].shape) for place in places]
    if shapes != wanted or biases != [(size,) for size in sizes[1:]] or sizes[-1] != num_scores:
        raise ValueError(f"a head must make {num_scores} of {num_features} numbers, got layers of the shapes {shapes}")
    layers: list[nn.Module] = []
    for place, (num_out, num_in) in zip(places, shapes, strict=True):
        linear = nn.Linear(num_in, num_out)
        linear.load_state_dict({kind: weights[f"{place}.{kind}"].float() for kind in ("weight", "bias")})
        layers += [linear, nn.ReLU()] if has_relu else [linear]
    return nn.Sequential(*(layers[:-1] if has_relu else layers)).requires_grad_(False)
