"""Pretrain the repository's video checkpoint: a WanImageToVideoPipeline that moves words.

    python scripts/pretrain.py moving      # 7 minutes on a busy core

It is a real diffusers folder, only narrow. A third of the captions name the wrong direction, like some captions of real
videos: the base then often moves the word the other way, and reinforcement learning has work to do.

1. tokenizer: one token per word of a prompt, and per character of the word on the sign
2. VAE: that of the tiny signs, which encodes frames one by one; nothing is trained
3. text encoder: random, since the net only has to distinguish the two directions
4. transformer: the flow-matching loss of the signs, from weights whose heads attend to useful positions
"""

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_moving
import tiny_signs
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from omni_rollout import Model, Params, Prompt
from omni_rollout.models import open_model, wan
from omni_rollout.types import Cond, Parts
from pretraining import signs
from torch import Tensor, nn
from transformers import T5Tokenizer, UMT5Config, UMT5EncoderModel

SIGNS = Path(__file__).parents[2] / "checkpoints" / "tiny-signs-qwen-image"
SAMPLING = Params(6, tiny_signs.HEIGHT, tiny_signs.WIDTH, num_frames=tiny_moving.FRAMES, frame_rate=8.0)
BATCH = 32
CHUNK = 100  # prompts or videos per batch
WRONG = 0.33  # share of the captions that name the other direction
LOUDNESS = 0.7  # initial magnitude, in each block, of the difference between directions; features have about 1
OFFSETS = (  # of each block's heads: offset in latent frames and columns that each initially attends to
    ((-1, -1), (-1, 1), (-2, -2), (-2, 2), (0, -1), (0, 1)),
    ((-1, -1), (-1, 1), (-2, -2), (-2, 2), (-1, 0), (-2, 0)),
    ((-1, -1), (-1, 1), (1, -1), (1, 1), (0, -1), (0, 1)),
)


class ZerosAsOne(WanAttnProcessor):
    """Attention to texts of few positions, where the last, a zero, weighs as much as all zeros up to TEXT_TOKENS."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        if encoder_hidden_states is not None:
            length = encoder_hidden_states.shape[1]
            attention_mask = torch.zeros(1, 1, 1, length)
            attention_mask[..., -1] = math.log(wan.TEXT_TOKENS - length + 1)
        return super().__call__(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)


def build_tokenizer() -> T5Tokenizer:
    """Build a tokenizer with one token per word of a prompt, and per character."""
    words = ["a", *tiny_signs.COLORS, "sign", "on", "which", '"', "moves", *tiny_moving.DIRECTIONS]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -3.0)]
    pieces += [(f"\u2581{word}", -1.0) for word in words] + [(letter, -3.0) for letter in '"' + tiny_signs.ALPHABET]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=wan.TEXT_TOKENS)


def build_text_encoder(tokenizer: T5Tokenizer) -> UMT5EncoderModel:
    """Build a two-layer UMT5 of width 64."""
    sizes: dict[str, Any] = {"d_model": signs.TEXT_WIDTH, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    return UMT5EncoderModel(UMT5Config(vocab_size=len(tokenizer), is_encoder_decoder=False, dropout_rate=0.0, **sizes))


def encode(text_encoder: UMT5EncoderModel, tokenizer: T5Tokenizer, prompts: list[str]) -> Tensor:
    """Return the features [B, T + 1, D] of prompts with T tokens, followed by one zero."""
    tokens = tokenizer(prompts, return_tensors="pt")
    return nn.functional.pad(text_encoder(**tokens).last_hidden_state, (0, 0, 0, 1))


@torch.no_grad()
def encode_all(text_encoder: UMT5EncoderModel, tokenizer: T5Tokenizer, prompts: list[str]) -> Tensor:
    """Return the features [N + 1, T + 1, D] of all prompts, followed by those of the empty prompt."""
    chunks = [encode(text_encoder, tokenizer, prompts[i : i + CHUNK]) for i in range(0, len(prompts), CHUNK)]
    empty = encode(text_encoder, tokenizer, [""])
    return torch.cat([*chunks, nn.functional.pad(empty, (0, 0, 0, chunks[0].shape[1] - empty.shape[1]))])


def build_vae(image_vae: AutoencoderKLQwenImage) -> AutoencoderKLWan:
    """Build a video VAE from an image VAE; the four frames of a latent frame are equal.

    Kernels see only their own frame; temporal downsampling keeps the last frame, upsampling repeats it.
    """
    names = ("base_dim", "z_dim", "dim_mult", "num_res_blocks", "latents_mean", "latents_std", "temperal_downsample")
    vae = AutoencoderKLWan(**{name: image_vae.config[name] for name in names})
    weights = {name: weight.clone() for name, weight in image_vae.state_dict().items()}
    for name, weight in weights.items():
        if ".time_conv." in name:
            weight.zero_()
            if weight.dim() == 5:  # [C or 2 C, C, 3, 1, 1]
                out, channels = weight.shape[:2]
                weight[:, :, -1, 0, 0] = torch.eye(channels).repeat(out // channels, 1)
        elif weight.dim() == 5:
            weight[:, :, :-1] = 0.0  # for earlier frames; an image has none, so these were never trained
    vae.load_state_dict(weights)
    return vae.eval().requires_grad_(False)


@torch.no_grad()
def look_to_offsets(net: WanTransformer3DModel) -> None:
    """Set biases of queries and keys so that each head of 32 channels attends to its offset for any input.

    A head's first 12 channels rotate with the frame, its last 10 with the column, in pairs at decreasing speed:
    <R(p) q, R(s) k> is largest at s - p = d if q = R(d) k. Training takes long to find this.
    """
    for block, offsets in zip(net.blocks, OFFSETS, strict=True):
        attn = block.attn1
        for linear, norm in ((attn.to_q, attn.norm_q), (attn.to_k, attn.norm_k)):
            linear.weight.mul_(0.5)
            linear.bias.zero_()
            norm.weight.fill_(2.0)
        for head, (frames, across) in enumerate(offsets):
            turns = {0: frames, 1: frames * 10000 ** (-1 / 6), 11: across, 12: across * 10000 ** (-1 / 5)}
            for pair, angle in turns.items():
                i = 32 * head + 2 * pair
                attn.to_k.bias[i] = 3.0
                attn.to_q.bias[i], attn.to_q.bias[i + 1] = 3.0 * math.cos(angle), 3.0 * math.sin(angle)


@torch.no_grad()
def look_to_directions(net: WanTransformer3DModel, features: Tensor) -> None:
    """Make cross-attention attend to the word that names the direction, with a large difference between the two.

    Otherwise, that word is one of TEXT_TOKENS positions, nearly all of them zeros, and has little effect. `features`
    [2 N, T + 1, D] are those of prompts that end in one direction, then of those that end in the other.
    """
    texts, place = net.condition_embedder.text_embedder(features), features.shape[1] - 3  # before "</s>" and the zero
    for block in net.blocks:
        attn = block.attn2
        keys = attn.norm_k(attn.to_k(texts)).mean(dim=0)  # [T + 1, D]
        others = torch.cat([keys[:place], keys[place + 1 :]]).mean(dim=0)
        wanted = keys[place] - (others + keys[-1]) / 2
        attn.to_q.weight.mul_(0.3)
        attn.to_q.bias.copy_(wanted / wanted.square().mean().sqrt())
        attn.norm_q.weight.fill_(3.0)
        attn.to_v.bias.zero_()
        left, right = attn.to_out[0](attn.to_v(texts[:, place])).chunk(2)
        louder = (LOUDNESS / (right - left).mean(dim=0).square().mean().sqrt()).sqrt()
        attn.to_v.weight.mul_(louder)
        attn.to_out[0].weight.mul_(louder)


@torch.no_grad()
def encode_signs(model: Model, parts: Parts, drawn: list[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Return clean latents [2, N, C, f, h, w] of words moving left and right, and their first frames' conditioning."""
    ways = []
    for way in tiny_moving.DIRECTIONS:
        codes = []
        for i in range(0, len(drawn), CHUNK):
            videos = torch.from_numpy(np.stack([tiny_moving.render(*sign, way) for sign in drawn[i : i + CHUNK]]))
            codes.append(model.encode_media(parts, {"video": videos}, SAMPLING))
        ways.append(torch.cat(codes))
    latents = torch.stack(ways)
    first = Prompt("", group=0, index=0, seed=0, images=(videos[0, 0],))
    images = model.condition(parts, first, SAMPLING)["image_latents"].repeat(len(drawn), 1, 1, 1, 1)
    images[:, -latents.shape[2] :, 0] = latents[0, :, :, 0]  # all else is the same for all signs
    return latents, images


def main(argv: Sequence[str]) -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py moving", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-moving-wan"))
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--signs", type=int, default=600, help="number of rendered signs, each moving both ways")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed number, as sums depend on it: the same weights from every run on one kind of CPU
    torch.manual_seed(0)
    rng = random.Random(0)
    drawn = [tiny_moving.draw_sign(rng) for _ in range(args.signs)]
    prompts = [tiny_moving.prompt(*sign, direction) for direction in tiny_moving.DIRECTIONS for sign in drawn]
    tokenizer = build_tokenizer()
    text_encoder = build_text_encoder(tokenizer)
    features = encode_all(text_encoder, tokenizer, prompts)
    net = WanTransformer3DModel(
        patch_size=(1, 4, 1),  # one token per column of the sign, with no more values than the width of the net
        num_layers=3,
        attention_head_dim=32,
        num_attention_heads=6,
        in_channels=36,  # noisy video, mask of given frames, and given frames
        out_channels=16,
        text_dim=signs.TEXT_WIDTH,
        freq_dim=64,
        ffn_dim=384,
        rope_max_seq_len=64,
    )
    look_to_offsets(net)
    look_to_directions(net, features[:-1])
    vae = build_vae(AutoencoderKLQwenImage.from_pretrained(SIGNS / "vae"))
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=1.0)
    pipe = WanImageToVideoPipeline(tokenizer, text_encoder, vae, scheduler, transformer=net)
    pipe.save_pretrained(args.out)  # the model used in training reads its configuration
    model = open_model(args.out)
    parts = model.load(device="cpu", dtype=torch.float32)
    latents, images = encode_signs(model, parts, drawn)

    def draw(step: int) -> tuple[Tensor, Cond]:
        rows, right, wrong = torch.randint(len(drawn), (BATCH,)), torch.rand(BATCH) < 0.5, torch.rand(BATCH) < WRONG
        texts = torch.where(torch.rand(BATCH) < 0.1, len(prompts), rows + len(drawn) * right)
        return latents[(right ^ wrong).long(), rows], {"embeds": features[texts], "image_latents": images[rows]}

    net.set_attn_processor(ZerosAsOne())
    signs.train_flow(model, net, draw, steps=args.steps, sampling=SAMPLING, lr=1.5e-3, noisier=0.8)
    pipe.save_pretrained(args.out)
    print(f"saved {args.out}")
