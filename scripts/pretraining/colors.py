"""Pretrain the repository's BAGEL, which thinks of a color and paints it.

    python scripts/pretrain.py colors      # 5 minutes on one core

It learns from thoughts half of which are random, and from images half of which have a different color from the thought.
So it can do both, but is uncertain: reinforcement learning must teach it which of its own thoughts are right, and to
paint them. `--data` is the folder for the prompts used in reinforcement learning.

1. tokenizer: byte-level BPE, one token per word
2. VAE: the latent code is the principal components of 8 x 8 patches, as for the signs; decoder and encoder are fitted
3. language model: the thought's tokens by cross-entropy, the image by the flow-matching loss, in one step
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import build_tiny_models
import numpy as np
import tiny_colors
import torch
from omni_rollout import Params, Prompt
from omni_rollout.models import open_thinking_model
from omni_rollout.models.bagel_think import REQUEST, ThinkingBagel
from omni_rollout.types import join
from omni_sched import add_noise
from pretraining.fit import fit
from pretraining.signs import build_tokenizer, principal_code, to_float, to_latents
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

COLORS = list(tiny_colors.COLORS)
UNSURE = 0.5  # share of thoughts, and of images, that are random
SIZE = Params(10, tiny_colors.SIDE, tiny_colors.SIDE)


def train_vae(vae: Any, images: Tensor, codes: Tensor, *, steps: int, batch: int = 32, lr: float = 3e-3) -> None:
    """Fit decoder and encoder to images, uint8 [N, 3, H, W], and their latents [N, 16, h, w] with variance 1."""
    config = vae.config
    codes = codes / config.scaling_factor + config.shift_factor
    for name, half in (("decoder", vae.decoder), ("encoder", vae.encoder)):

        def loss_of(step: int, half: Any = half) -> Tensor:
            rows = torch.randint(len(images), (batch,))
            x, z = to_float(images[rows]), codes[rows]
            if half is vae.decoder:
                error: Tensor = vae.decode(z + 0.1 * torch.randn_like(z)).sample - x
                return error.abs().mean()
            posterior = vae.encode(x).latent_dist
            loss: Tensor = (posterior.mean - z).square().mean() + 1e-3 * posterior.logvar.square().mean()
            return loss

        fit(f"vae {name}", half.requires_grad_(True).parameters(), loss_of, steps=steps, lr=lr, betas=(0.9, 0.95))
        half.requires_grad_(False)


def by_chance(rng: random.Random, hue: str) -> str:
    """Return the color, or sometimes a random one."""
    return rng.choice(COLORS) if rng.random() < UNSURE else hue


def train_net(
    model: ThinkingBagel, parts: Any, images: Tensor, hues: list[str], *, steps: int, batch: int = 64, lr: float = 2e-3
) -> None:
    """Train the net to think of a color and to paint it. hues: colors of the images."""
    rng, net = random.Random("tiny-colors"), parts.net.requires_grad_(True)
    params = [p for name, p in net.named_parameters() if "latent_pos_embed" not in name]
    latents = torch.cat(
        [model.encode_media(parts, {"image": part}, SIZE) for part in images.permute(0, 2, 3, 1).split(256)]
    )
    by_hue = {hue: [i for i, other in enumerate(hues) if other == hue] for hue in COLORS}
    pairs = [pair for own in tiny_colors.PROMPTS.values() for pair in own]
    conds = {text: model.encode(parts, Prompt(text, 0, 0, 0)) for text, _ in pairs}
    said = {hue: torch.tensor([*model.tokenizer.encode(hue, add_special_tokens=False), model.end]) for hue in COLORS}
    assert {len(tokens) for tokens in said.values()} == {2}, "a color must be one token"

    def loss_of(step: int) -> Tensor:
        drawn = [rng.choice(pairs) for _ in range(batch)]
        thoughts = [by_chance(rng, hue) for _, hue in drawn]
        tokens = torch.stack([said[hue] for hue in thoughts])
        asked = [model.thought_inputs(conds[text]["ids"]) for text, _ in drawn]
        everything = torch.ones_like(tokens, dtype=torch.bool)
        logits = net(**model.inputs(asked, tokens, everything)).logits[:, -3:-1]
        written = cross_entropy(logits.flatten(0, 1), tokens.flatten())
        rows = [torch.cat([each["input_ids"], own]) for each, own in zip(asked, tokens, strict=True)]
        cond = join(
            [{"ids": ids, "ids_mask": torch.ones(len(ids), dtype=torch.bool)} for ids in rows], dim=0, what="ids"
        )
        cond["marks"] = next(iter(conds.values()))["marks"].expand(batch, -1)
        x0 = latents[[rng.choice(by_hue[by_chance(rng, hue)]) for hue in thoughts]]
        noise, sigma = torch.randn_like(x0), torch.sigmoid(1.0 + 1.5 * torch.randn(batch))
        velocity = model.predict_velocity(net, add_noise(x0, noise, sigma), sigma, cond, SIZE)
        return written + (velocity - (noise - x0)).square().mean()

    fit("net", params, loss_of, steps=steps, lr=lr)
    net.requires_grad_(False)


def save(folder: Path, parts: Any) -> None:
    """Write the weights with the names of the release, in bfloat16 as there."""
    own = parts.net.state_dict() | parts.vit.state_dict()
    save_file(
        {name: weight.to(torch.bfloat16).contiguous() for name, weight in own.items()}, folder / "ema.safetensors"
    )
    named = {
        build_tiny_models.ldm_name(name): build_tiny_models.ldm_weight(name, weight).to(torch.bfloat16)
        for name, weight in parts.vae.state_dict().items()
    }
    save_file(named, folder / "ae.safetensors")


def main(argv: Sequence[str]) -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py colors", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-colors-bagel"))
    parser.add_argument("--data", type=Path, default=Path("data/tiny-colors"))
    parser.add_argument("--vae-steps", type=int, default=500)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--pictures", type=int, default=2000, help="number of rendered images")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed number, as sums depend on it
    tiny_colors.write_prompts(args.data)
    build_tiny_models.build("bagel", args.out)
    words = tiny_colors.words()
    tokenizer = build_tokenizer(REQUEST, None, "\n".join([*words, " ".join(words)]))  # at a text's start, and within
    tokenizer.save_pretrained(args.out)
    config = json.loads((args.out / "llm_config.json").read_text())
    assert len(tokenizer) <= config["vocab_size"], len(tokenizer)
    model: Any = open_thinking_model(args.out)
    parts = model.load(device="cpu", dtype=torch.float32)
    rng = random.Random(0)
    hues = [rng.choice(COLORS) for _ in range(args.pictures)]
    images = torch.from_numpy(np.stack([tiny_colors.render(rng, hue) for hue in hues])).permute(0, 3, 1, 2)
    torch.manual_seed(0)
    train_vae(parts.vae, images, to_latents(images, *principal_code(images)), steps=args.vae_steps)
    torch.manual_seed(1)
    train_net(model, parts, images, hues, steps=args.steps)
    save(args.out, parts)
    print(f"saved {args.out} and {args.data}")
