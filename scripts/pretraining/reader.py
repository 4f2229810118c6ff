"""Train the repository's sign reader, a differentiable reward.

    python scripts/pretrain.py reader      # half a minute on a CPU

It sees single letters of signs rendered by `tiny_signs`: slightly blurred and noisy letters, which it must read, and
smudged letters (strongly blurred, or two letters at once), which it must classify as smudged. The words of the
evaluation sets do not occur. Its error rates on new signs are printed at the end.

Shapes: L single letters.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import tiny_signs
import torch
from omni_rl.flow.direct_rewards import ALPHABET, READER_FILE, SMUDGED, SignReader, crop_letters
from safetensors.torch import save_file
from torch import Tensor, nn

BATCH = 96
NUM_TEST_SIGNS = 2000


def draw_letters(rng: random.Random, num_signs: int) -> tuple[Tensor, Tensor]:
    """Sample signs; return crops [L, 3, 32, 28] in [0, 1] of their letters, and the letters' classes, [L]."""
    crops, labels = [], []
    for _ in range(num_signs):
        _, color, word = tiny_signs.draw_prompt(rng)
        image = torch.from_numpy(tiny_signs.render(rng, color, word).copy()).permute(2, 0, 1).float() / 255
        crops.append(crop_letters(image, len(word)))
        labels += [ALPHABET.index(letter) for letter in word]
    return torch.cat(crops), torch.tensor(labels)


def blur(crops: Tensor, width: Tensor) -> Tensor:
    """Blur each crop [L, 3, H, W] with a Gaussian of its own width [L], in pixels."""
    L, C = crops.shape[:2]
    kernel = torch.exp(-torch.arange(-4, 5).square() / (2 * width[:, None].square()))
    kernel = (kernel / kernel.sum(dim=1, keepdim=True)).repeat_interleave(C, dim=0)[:, None]
    pad, conv = nn.functional.pad, nn.functional.conv2d
    planes = crops.reshape(1, L * C, *crops.shape[2:])
    planes = conv(pad(planes, (4, 4, 0, 0), mode="replicate"), kernel[:, :, None, :], groups=L * C)
    planes = conv(pad(planes, (0, 0, 4, 4), mode="replicate"), kernel[:, :, :, None], groups=L * C)
    return planes.view_as(crops)


def disturb(crops: Tensor, labels: Tensor, smudged: int) -> tuple[Tensor, Tensor]:
    """Return crops that resemble a model's, and their classes: one in five is smudged."""
    L = len(crops)
    other = torch.randperm(L)
    kind, strength = torch.rand(L), torch.rand(L)
    is_double = (kind < 0.12) & (labels != labels[other])
    is_blurred = (kind >= 0.12) & (kind < 0.2)
    share = torch.where(is_double, 0.35 + 0.3 * strength, 0.0).view(-1, 1, 1, 1)
    width = torch.where(is_blurred, 2.5 + 2 * strength, 0.1 + 1.1 * strength)
    seen = blur((1 - share) * crops + share * crops[other], width)
    noisy = seen + 0.08 * torch.rand(L, 1, 1, 1) * torch.randn_like(seen)
    return noisy, torch.where(is_double | is_blurred, smudged, labels)


def main(argv: Sequence[str]) -> None:
    """Train the reader, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py reader", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-signs-reader"))
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--signs", type=int, default=8000, help="number of rendered images")
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed number, as sums depend on it
    torch.manual_seed(0)
    crops, labels = draw_letters(random.Random(0), args.signs)
    reader = SignReader()
    optimizer = torch.optim.AdamW(reader.parameters(), weight_decay=1e-2)
    for step in range(args.steps):
        rows = torch.randint(len(crops), (BATCH,))
        seen, classes = disturb(crops[rows], labels[rows], SMUDGED)
        # Smoothed, so that a misread letter still has a gradient in the reward.
        loss = nn.functional.cross_entropy(reader(seen), classes, label_smoothing=0.05)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * (1 - step / args.steps)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}/{args.steps} loss {loss.item():.3f}", flush=True)
    crops, labels = (tensor[:4000] for tensor in draw_letters(random.Random(1), NUM_TEST_SIGNS))
    with torch.no_grad():
        for name, (seen, classes) in (("clean", (crops, labels)), ("disturbed", disturb(crops, labels, SMUDGED))):
            print(f"{name}: {(reader(seen).argmax(dim=1) != classes).float().mean():.2%} read wrong")
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(reader.state_dict(), args.out / READER_FILE)
