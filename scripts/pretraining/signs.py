"""Pretrain the repository's main checkpoint: a QwenImagePipeline with three million parameters that paints signs.

    python scripts/pretrain.py signs      # 20 minutes on a CPU

It is a real diffusers folder (tokenizer, text encoder, VAE, transformer, scheduler), only narrow: the structure that
the pipeline hard-codes (latent channels, strides, packing, the 34 template tokens) is that of Qwen-Image. Pretraining
stops early on purpose: the base spells about 0.6 of its letters right, so that reinforcement learning has work to do.

1. tokenizer: byte-level BPE trained only on the template, hence one token per letter of a word
2. VAE: the latent code is the principal components of 8 x 8 patches; decoder and encoder are fitted to it
3. text encoder: learns to spell, that is, linear heads on its features predict the letter at each position; then frozen
4. transformer: the flow-matching loss |v - (noise - data)|^2 (arXiv 2210.02747), with one prompt in ten left empty
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_signs
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from omni_rollout import Model, Params
from omni_rollout.models import open_model, qwen_image
from omni_rollout.types import Cond, join
from omni_sched import add_noise
from pretraining.fit import fit
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
TEXT_WIDTH = 64
LATENT_CHANNELS = 16
MAX_LETTERS = 4
EMPTY_PROMPT = " "
BATCH = 64  # batch size of the transformer
SAMPLING = Params(10, tiny_signs.HEIGHT, tiny_signs.WIDTH)
Error = Callable[[Tensor, Tensor], Tensor]  # of images and their latents


def build_tokenizer(template: str, template_tokens: int | None, words: str) -> Qwen2Tokenizer:
    """Build a byte-level BPE with Qwen2's pre-tokenizer; each word of the template and of `words` is one token.

    template_tokens: number of template tokens before the prompt; None for any number.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=1400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([template, words], trainer)
    model = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in model["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=model["vocab"], merges=merges, padding_side="right")
    tokenizer.add_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS[1:]], special_tokens=True)
    prefix = tokenizer(template.split("{}")[0]).input_ids
    assert template_tokens in (None, len(prefix)), len(prefix)
    return tokenizer


def build_text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Build a two-layer Qwen2.5-VL of width 64."""
    token: Any = tokenizer.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": TEXT_WIDTH,
            "intermediate_size": 2 * TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e6},
            "bos_token_id": token("<|endoftext|>"),
            "eos_token_id": token("<|im_end|>"),
            "pad_token_id": token("<|endoftext|>"),
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": TEXT_WIDTH,
            "fullatt_block_indexes": [0],
            "window_size": 112,
            "patch_size": 14,
            "spatial_merge_size": 2,
        },
        image_token_id=token("<|image_pad|>"),
        video_token_id=token("<|video_pad|>"),
        vision_start_token_id=token("<|vision_start|>"),
        vision_end_token_id=token("<|vision_end|>"),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def draw_signs(rng: random.Random, count: int) -> tuple[list[str], Tensor]:
    """Sample `count` training prompts and their images, uint8 [count, 3, H, W]."""
    prompts, images = [], []
    for _ in range(count):
        prompt, color, word = tiny_signs.draw_prompt(rng)
        prompts.append(prompt)
        images.append(tiny_signs.render(rng, color, word))
    return prompts, torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)


def to_float(images: Tensor) -> Tensor:
    """Convert uint8 [N, 3, H, W] to float32 in [-1, 1]."""
    return images.float() / 127.5 - 1


def principal_code(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the basis [192, 16] and mean [192] that map each 8 x 8 color patch to 16 numbers, by decreasing power.

    The code is partly whitened: coarse features keep more power than fine ones, and the overall variance is 1.
    """
    patches = to_patches(images)
    mean = patches.mean(dim=0)
    _, values, basis = torch.linalg.svd((patches - mean)[:100_000], full_matrices=False)
    std = values[:LATENT_CHANNELS] / min(len(patches), 100_000) ** 0.5
    return basis[:LATENT_CHANNELS].T / (std * std.mean()).sqrt(), mean


def to_patches(images: Tensor) -> Tensor:
    """Convert uint8 [N, 3, H, W] to patches [N * H/8 * W/8, 192], float32."""
    N, _, H, W = images.shape
    return to_float(images).view(N, 3, H // 8, 8, W // 8, 8).permute(0, 2, 4, 1, 3, 5).reshape(-1, 192)


def to_latents(images: Tensor, basis: Tensor, mean: Tensor) -> Tensor:
    """Return the latents [N, 16, H/8, W/8] of uint8 images [N, 3, H, W]."""
    N, _, H, W = images.shape
    return (
        ((to_patches(images) - mean) @ basis).view(N, H // 8, W // 8, LATENT_CHANNELS).permute(0, 3, 1, 2).contiguous()
    )


def train_vae(images: Tensor, latents: Tensor, *, steps: int, lr: float = 3e-3, batch: int = 16) -> nn.Module:
    """Return a narrow AutoencoderKLQwenImage with encoder and decoder fitted to the pairs (image, latent)."""
    vae = AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )
    decoder = [*vae.decoder.parameters(), *vae.post_quant_conv.parameters()]
    encoder = [*vae.encoder.parameters(), *vae.quant_conv.parameters()]

    def decode_error(x: Tensor, z: Tensor) -> Tensor:
        noisy = z + 0.05 * torch.randn_like(z)  # sampled latents are never perfect
        error = vae.decode(noisy[:, :, None], return_dict=False)[0][:, :, 0] - x
        return error.abs().mean() + error.square().mean()

    def encode_error(x: Tensor, z: Tensor) -> Tensor:
        posterior = vae.encode(x[:, :, None]).latent_dist
        return (posterior.mean[:, :, 0] - z).square().mean() + 1e-3 * posterior.logvar.square().mean()

    for name, params, error, count in (
        ("decoder", decoder, decode_error, steps),
        ("encoder", encoder, encode_error, steps // 4),
    ):

        def loss_of(step: int, error: Error = error) -> Tensor:
            rows = torch.randint(len(images), (batch,))
            return error(to_float(images[rows]), latents[rows])

        fit(f"vae {name}", params, loss_of, steps=count, lr=lr, betas=(0.9, 0.95))
    return vae.eval().requires_grad_(False)


def encode_batch(text_encoder: nn.Module, tokenizer: Qwen2Tokenizer, prompts: list[str]) -> dict[str, Tensor]:
    """Return text features of a batch of prompts, padded: `embeds` [B, T, D] and `embeds_mask` [B, T]."""
    tokens = tokenizer([qwen_image.TEMPLATE.format(p) for p in prompts], padding=True, return_tensors="pt")
    hidden = text_encoder(**tokens, output_hidden_states=True).hidden_states[-1]
    drop = qwen_image.TEMPLATE_TOKENS
    return {"embeds": hidden[:, drop:], "embeds_mask": tokens.attention_mask[:, drop:].bool()}


def train_text_encoder(
    text_encoder: nn.Module, tokenizer: Qwen2Tokenizer, prompts: list[str], *, steps: int, lr: float = 2e-3
) -> None:
    """Train the encoder to spell: each letter's feature has letter and position, the last feature the whole word."""
    num_letters = len(tiny_signs.ALPHABET) + 1  # and "none"
    letter_head, place_head = nn.Linear(TEXT_WIDTH, num_letters), nn.Linear(TEXT_WIDTH, MAX_LETTERS)
    word_head = nn.Linear(TEXT_WIDTH, MAX_LETTERS * num_letters)
    first = len(tokenizer(prompts[0].split('"')[0] + '"').input_ids)  # the position of a word's first letter
    params = [
        *text_encoder.get_submodule("model.language_model").parameters(),
        *(p for head in (letter_head, place_head, word_head) for p in head.parameters()),
    ]

    def loss_of(step: int) -> Tensor:
        batch = [prompts[i] for i in torch.randint(len(prompts), (128,))]
        words = [p.split('"')[1] for p in batch]
        letters = torch.tensor([[tiny_signs.ALPHABET.index(c) + 1 for c in w.ljust(MAX_LETTERS, w[0])] for w in words])
        used = torch.tensor([[i < len(w) for i in range(MAX_LETTERS)] for w in words])
        cond = encode_batch(text_encoder, tokenizer, batch)
        features = cond["embeds"][:, first : first + MAX_LETTERS]
        places = torch.arange(MAX_LETTERS).expand(len(batch), -1)
        last = cond["embeds"][torch.arange(len(batch)), cond["embeds_mask"].sum(dim=1) - 1]
        return (
            nn.functional.cross_entropy(letter_head(features)[used], letters[used])
            + nn.functional.cross_entropy(place_head(features)[used], places[used])
            + nn.functional.cross_entropy(word_head(last).view(-1, num_letters), (letters * used).flatten())
        )

    fit("text", params, loss_of, steps=steps, lr=lr)
    text_encoder.eval().requires_grad_(False)


@torch.no_grad()
def encode_all(text_encoder: nn.Module, tokenizer: Qwen2Tokenizer, prompts: list[str]) -> dict[str, Tensor]:
    """Return text features of all prompts, padded to the longest."""
    parts = [encode_batch(text_encoder, tokenizer, prompts[i : i + 500]) for i in range(0, len(prompts), 500)]
    return join(parts, dim=1, what="cond")


def train_flow(
    model: Model,
    transformer: nn.Module,
    draw: Callable[[int], tuple[Tensor, Cond]],
    *,
    steps: int,
    sampling: Params = SAMPLING,
    lr: float = 1e-3,
    noisier: float = 0.0,
) -> None:
    """Train the transformer on samples of `draw`, a function of the step: clean latents [B, C, ...] and conditioning.

    Noise levels are sigmoids of normal samples with mean `noisier` (arXiv 2403.03206).
    """

    def loss_of(step: int) -> Tensor:
        x0, cond = draw(step)
        noise, sigma = torch.randn_like(x0), torch.sigmoid(torch.randn(len(x0)) + noisier)
        velocity = model.predict_velocity(transformer, add_noise(x0, noise, sigma), sigma, cond, sampling)
        return (velocity - (noise - x0)).square().mean()

    fit("flow", transformer.parameters(), loss_of, steps=steps, lr=lr)


def main(argv: Sequence[str]) -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py signs", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-signs-qwen-image"))
    parser.add_argument("--vae-steps", type=int, default=900)
    parser.add_argument("--text-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--signs", type=int, default=50000, help="number of rendered images")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.set_num_threads(2)  # a fixed number, as sums depend on it: the same weights from every run on one kind of CPU
    prompts, images = draw_signs(random.Random(args.seed), args.signs)
    latents = to_latents(images, *principal_code(images))
    torch.manual_seed(args.seed)
    vae = train_vae(images, latents, steps=args.vae_steps)
    torch.manual_seed(args.seed + 1)
    words = "a " + " ".join(tiny_signs.COLORS) + " sign that says"
    tokenizer = build_tokenizer(qwen_image.TEMPLATE, qwen_image.TEMPLATE_TOKENS, words)
    text_encoder = build_text_encoder(tokenizer)
    train_text_encoder(text_encoder, tokenizer, prompts, steps=args.text_steps)
    torch.manual_seed(args.seed + 2)
    heads = {"attention_head_dim": 32, "num_attention_heads": 4, "axes_dims_rope": (8, 12, 12)}
    transformer = QwenImageTransformer2DModel(num_layers=4, joint_attention_dim=TEXT_WIDTH, **heads)
    cond, empty = (encode_all(text_encoder, tokenizer, texts) for texts in (prompts, [EMPTY_PROMPT]))
    scheduler = FlowMatchEulerDiscreteScheduler(  # the released Qwen-Image configuration
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    pipe = QwenImagePipeline(scheduler, vae, text_encoder, tokenizer, transformer)
    pipe.save_pretrained(args.out)  # the model used in training reads its configuration
    features = join([cond, empty], dim=1, what="cond")

    def draw(step: int) -> tuple[Tensor, Cond]:
        rows = torch.randint(len(latents), (BATCH,))
        texts = torch.where(torch.rand(BATCH) < 0.1, len(latents), rows)
        return latents[rows], {name: tensor[texts] for name, tensor in features.items()}

    train_flow(open_model(args.out), transformer, draw, steps=args.steps)
    pipe.save_pretrained(args.out)
    print(f"saved {args.out}")
