"""Pretrain the repository's checkpoint of videos with audio: an LTX2Pipeline that makes a tone.

    python scripts/pretrain.py tones      # 8 minutes on one busy core

A prompt such as `a red screen with a tone of 400 Hz` gives nine frames of that color and 0.9 s of a tone. Half of the
tones in pretraining have a random pitch. So the base makes tones, but mostly of the wrong pitch: reinforcement learning
must teach it which of its own are right.

1. vocoder: set by hand. Four bins of the spectrogram are the loudness of one pitch, whose sinusoid is a filter.
2. VAEs: their decoders are fitted to codes set by hand, the color of the frames and the loudness of each pitch
3. text encoder: random, with one token per word; the connectors learn to give color and pitch at all positions
4. transformer: the flow-matching loss of the signs
"""

import argparse
import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import build_tiny_models
import diffusers
import torch
from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder
from omni_rollout import Params, Prompt
from omni_rollout.models import open_model
from omni_rollout.models.ltx2 import MEL_RATIO, TEXT_TOKENS
from omni_rollout.types import Cond
from pretraining.fit import fit
from pretraining.signs import train_flow
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, GemmaTokenizer

RATE, HOP = 8000, 160  # samples of audio per second, and per frame of the spectrogram
PITCHES = (200, 250, 300, 350, 400, 450, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800)  # Hz, of RATE / HOP
COLORS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.6, 0.1), "blue": (0.1, 0.2, 0.8), "white": (0.95, 0.95, 0.95)}
SAMPLING = Params(6, 32, 32, num_frames=9, frame_rate=9.0)
WIDTH, REGISTERS = 32, 128  # of text features; number of vectors repeated at positions without text
RIGHT = 0.5  # share of tones in pretraining with the pitch of the prompt; others are random


def prompt_of(color: str, pitch: int) -> str:
    """Return the prompt of a color and a pitch."""
    return f"a {color} screen with a tone of {pitch} Hz"


def list_pairs(*, evaluation: bool) -> list[tuple[str, int]]:
    """Return pairs of color and pitch for prompts: for each pitch, one color is held out."""
    colors = list(COLORS)
    return [
        (color, pitch)
        for (place, pitch), color in product(enumerate(PITCHES), colors)
        if (colors.index(color) == place % len(colors)) == evaluation
    ]


def write_prompts(folder: Path) -> None:
    """Write the repository's prompt files; each held-out prompt occurs four times, with different noise."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, times in (("train", 1), ("eval", 4)):
        lines = [prompt_of(*pair) + "\n" for pair in list_pairs(evaluation=name == "eval")] * times
        (folder / f"{name}.txt").write_text("".join(lines), encoding="utf-8")


def build_tokenizer() -> GemmaTokenizer:
    """Build a tokenizer with one token per word of the prompts, including the space before it, and per character."""
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", *build_tiny_models.ALPHABET]
    vocab, merges = {name: i for i, name in enumerate(names)}, dict[tuple[str, str], None]()
    for word in " ".join(prompt_of(*pair) for pair in product(COLORS, PITCHES)).split()[1:]:
        known = "\u2581"
        for letter in word:
            merges.setdefault((known, letter))
            known += letter
            vocab.setdefault(known, len(vocab))
    return GemmaTokenizer(vocab=vocab, merges=list[Any](merges), model_max_length=TEXT_TOKENS)


def build_vocoder() -> LTX2Vocoder:
    """Build a vocoder that is exactly the sum over pitches of loudness times sinusoid.

    A frame of the spectrogram adds two hops of each sinusoid under a Hann window; two frames add up to 1. A hop holds
    whole periods, so that consecutive frames join. A leaky rectifier of s minus that of -s is 1.01 s.
    """
    count, bins = len(PITCHES), MEL_RATIO * len(PITCHES)
    vocoder = LTX2Vocoder(
        in_channels=2 * bins,
        hidden_channels=count,
        upsample_factors=[HOP],
        upsample_kernel_sizes=[2 * HOP],
        resnet_kernel_sizes=[3],
        resnet_dilations=[[1]],
        leaky_relu_negative_slope=0.0,
        final_act_fn="clamp",
        output_sampling_rate=RATE,
    )
    points = torch.arange(2 * HOP)
    phases = 2 * math.pi * torch.tensor(PITCHES)[:, None] * points / RATE
    waves = 0.3 * phases.sin() * torch.hann_window(2 * HOP)
    for weight in vocoder.requires_grad_(False).parameters():
        weight.zero_()
    vocoder.conv_in.weight[:, :, 3] = torch.eye(count).repeat_interleave(MEL_RATIO, dim=1).repeat(1, 2) / 2 / MEL_RATIO
    for channel in range(2):
        vocoder.conv_out.weight[channel, :2, 3] = torch.tensor([1, -1]) / 1.01
    vocoder.upsamplers[0].weight[:, :2] = torch.stack([waves, -waves], dim=1)
    return vocoder


def build_pipe() -> Any:
    """Build the LTX2Pipeline; everything except the vocoder and the scheduler is random."""
    tokenizer = build_tokenizer()
    sides = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_attention_heads": 2}
    text = sides | {"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": len(tokenizer)}
    vision = sides | {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    encoder = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=1)
    heads = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": WIDTH // 2}
    connectors: dict[str, Any] = {
        f"{medium}_connector_{name}": value for medium in ("video", "audio") for name, value in heads.items()
    }
    shared: dict[str, Any] = {"rope_double_precision": False, "rope_type": "split"}
    vae = diffusers.AutoencoderKLLTX2Video(
        latent_channels=3,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        decoder_causal=False,
        decoder_spatial_padding_mode="zeros",
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    count = len(PITCHES)
    sound_vae = diffusers.AutoencoderKLLTX2Audio(
        base_channels=count,  # in diffusers, the length of the latents' mean
        ch_mult=(1, 1, 1),
        num_res_blocks=1,
        resolution=MEL_RATIO * count,
        latent_channels=1,
        mel_bins=MEL_RATIO * count,
        sample_rate=RATE,
        mel_hop_length=HOP,
    )
    sound_vae.latents_mean.fill_(1 / count)
    sound_vae.latents_std.fill_((1 / count) ** 0.5)
    transformer = diffusers.LTX2VideoTransformer3DModel(
        in_channels=3,
        out_channels=3,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        audio_in_channels=count,
        audio_out_channels=count,
        audio_num_attention_heads=4,
        audio_attention_head_dim=16,
        audio_cross_attention_dim=64,
        audio_sampling_rate=RATE,
        audio_hop_length=HOP,
        num_layers=3,
        caption_channels=WIDTH,
        **shared,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, base_image_seq_len=1024, shift_terminal=0.1
    )
    return diffusers.LTX2Pipeline(
        scheduler=scheduler,
        vae=vae,
        audio_vae=sound_vae,
        text_encoder=Gemma3ForConditionalGeneration(encoder),
        tokenizer=tokenizer,
        connectors=LTX2TextConnectors(caption_channels=WIDTH, text_proj_in_factor=2, **connectors, **shared),
        transformer=transformer,
        vocoder=build_vocoder(),
    )


def train_decoder(
    name: str, decoder: nn.Module, draw: Callable[[], tuple[Tensor, Tensor]], *, steps: int, lr: float = 3e-3
) -> None:
    """Fit a decoder to pairs of a code and its output."""

    def loss_of(step: int) -> Tensor:
        code, wanted = draw()
        error = decoder(code) - wanted
        return error.abs().mean() + error.square().mean()

    fit(name, decoder.parameters(), loss_of, steps=steps, lr=lr, betas=(0.9, 0.95))


def draw_frames(batch: int = 8) -> tuple[Tensor, Tensor]:
    """Sample codes [B, 3, f, h, w] of flat videos [B, 3, F, H, W], both in [-1, 1]; sampled codes are never perfect."""
    color = 2 * torch.tensor([random.choice(list(COLORS.values())) for _ in range(batch)])[:, :, None, None, None] - 1
    code = color.expand(-1, -1, 2, 1, 1)
    return code + 0.2 * torch.randn_like(code), color.expand(-1, -1, 9, 32, 32)


def draw_spectrograms(batch: int = 16, length: int = 8) -> tuple[Tensor, Tensor]:
    """Sample codes [B, 1, L, 16] of one or more tones, and the spectrograms [B, 2, 4 L - 3, 64] of both channels.

    The latent [l, j] is the loudness of pitch j, four bins of the spectrogram, in the four frames that end at 4 l.
    """
    count = len(PITCHES)
    places = torch.randint(count, (batch, length))
    places = torch.where(torch.rand(batch, 1) < 0.5, places[:, :1], places)
    loudness = one_hot(places, count) * torch.rand(batch, length, 1).clamp(0.3)
    loudness += torch.rand(batch, length, count) * (torch.rand(batch, length, count) < 0.1)
    frames = loudness.repeat_interleave(MEL_RATIO, dim=1)[:, MEL_RATIO - 1 :].repeat_interleave(MEL_RATIO, dim=2)
    return (loudness + 0.05 * torch.randn_like(loudness))[:, None], frames[:, None].expand(-1, 2, -1, -1)


def train_connectors(pipe: Any, pairs: list[tuple[str, int]], *, steps: int, lr: float = 3e-3) -> None:
    """Train the connectors to give the color to the frames and the pitch to the audio, at every position.

    Texts are short at first, so that the few words are quickly found among the registers, which start equal.
    """
    for connector in (pipe.connectors.video_connector, pipe.connectors.audio_connector):
        connector.learnable_registers.data.copy_(connector.learnable_registers[:1].clone())
    tokens = pipe.tokenizer([prompt_of(*pair) for pair in pairs], return_tensors="pt")
    assert tokens.attention_mask.all(), "prompts must have one length in tokens"
    with torch.no_grad():  # rotations are relative, so tokens have the same features as after padding
        hidden = torch.stack(pipe.text_encoder(**tokens, output_hidden_states=True).hidden_states, dim=-1)
    answers = torch.tensor([[list(COLORS).index(color), PITCHES.index(pitch)] for color, pitch in pairs])
    heads = nn.ModuleList([nn.Linear(WIDTH, len(COLORS)), nn.Linear(WIDTH, len(PITCHES))])

    def loss_of(step: int) -> Tensor:
        batch, length = (32, REGISTERS) if step < 0.75 * steps else (8, TEXT_TOKENS)
        rows, places = torch.randint(len(pairs), (batch,)), torch.randint(length, (64,))
        padding = length - hidden.shape[1]
        mask = nn.functional.pad(tokens.attention_mask[rows], (padding, 0))
        told = pipe.connectors(nn.functional.pad(hidden[rows], (0, 0, 0, 0, padding, 0)), mask, padding_side="left")
        loss = torch.zeros(())
        for features, head, wanted in zip(told, heads, answers[rows].T, strict=False):
            scores = head(features[:, places])
            loss = loss + cross_entropy(scores.flatten(0, 1), wanted.repeat_interleave(len(places)))
        return loss

    fit("text", [*pipe.connectors.parameters(), *heads.parameters()], loss_of, steps=steps, lr=lr)


def train_net(pipe: Any, folder: Path, pairs: list[tuple[str, int]], *, steps: int, lr: float = 2e-3) -> None:
    """Train the transformer; most steps use few text positions, as attention over all of them is slow.

    Attention over a random subset of positions estimates attention over all. The last steps use all.
    """
    model, count, batch = open_model(folder), len(PITCHES), 64
    parts = model.load(device="cpu", dtype=torch.float32)
    with torch.no_grad():
        told = [model.encode(parts, Prompt(prompt_of(*pair), 0, 0, 0)) for pair in pairs]
    texts = {name: torch.stack([each[name] for each in told]).clone() for name in ("embeds", "sound_embeds")}
    colors = 2 * torch.tensor([COLORS[color] for color, _ in pairs]) - 1
    pitches = torch.tensor([PITCHES.index(pitch) for _, pitch in pairs])
    length = model.latent_shape(SAMPLING)[0] - 6  # of the audio, after two latents of three numbers each
    mean, std = pipe.audio_vae.latents_mean, pipe.audio_vae.latents_std

    def draw(step: int) -> tuple[Tensor, Cond]:
        positions = 64 if step < 0.97 * steps else TEXT_TOKENS
        rows, places = torch.randint(len(pairs), (batch,)), torch.randperm(TEXT_TOKENS)[:positions]
        heard = torch.where(torch.rand(batch) < RIGHT, pitches[rows], torch.randint(count, (batch,)))
        sound = one_hot(heard, count)[:, None] * (0.6 + 0.4 * torch.rand(batch, 1, 1)).expand(-1, length // count, -1)
        x0 = torch.cat([colors[rows].repeat_interleave(2, dim=1), ((sound - mean) / std).flatten(1)], dim=1)
        return x0, {name: tensor[rows][:, places] for name, tensor in texts.items()}

    train_flow(model, pipe.transformer, draw, steps=steps, sampling=SAMPLING, lr=lr)


def main(argv: Sequence[str]) -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py tones", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-tones-ltx2"))
    parser.add_argument("--data", type=Path, default=Path("data/tiny-tones"))
    parser.add_argument("--vae-steps", type=int, default=400)
    parser.add_argument("--text-steps", type=int, default=240)
    parser.add_argument("--steps", type=int, default=1500)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed number, as sums depend on it: the same weights from every run on one kind of CPU
    write_prompts(args.data)
    torch.manual_seed(0)
    random.seed(0)
    pipe, pairs = build_pipe(), list_pairs(evaluation=False)
    train_decoder("sound", pipe.audio_vae.decoder, draw_spectrograms, steps=args.vae_steps)
    train_decoder("frames", pipe.vae.decoder, draw_frames, steps=args.vae_steps)
    train_connectors(pipe, pairs, steps=args.text_steps)
    pipe.save_pretrained(args.out)  # the model used in training reads its configuration
    train_net(pipe, args.out, pairs, steps=args.steps)
    pipe.save_pretrained(args.out)
    print(f"saved {args.out}, {args.data}/train.txt and {args.data}/eval.txt")
