"""Pretrain the repository's Qwen3-Omni thinker, which hears how often something beeps.

    python scripts/pretrain.py beeps      # 2 minutes on one core

It learns from answers half of which are random. So it hears well, but is as uncertain as these answers: reinforcement
learning must teach it which of its own answers are right. `--data` is the folder for the sounds used in reinforcement
learning, with their prompt files.
"""

import argparse
import json
import random
import wave
from collections.abc import Sequence
from pathlib import Path

import build_tiny_models
import numpy as np
import torch
from omni_rollout import Prompt
from omni_rollout.models.tokens import open_token_model
from pretraining.fit import fit
from torch import Tensor
from torch.nn.functional import cross_entropy

RATE, SECONDS, BEEP_S, MOST = 16_000, 0.72, 0.05, 4
QUESTION = "How many beeps?"


def draw_sound(rng: random.Random, count: int) -> np.ndarray:
    """Sample a sound, float32 [points], of several beeps of one pitch at random times, with a little noise."""
    points, beep = int(RATE * SECONDS), int(RATE * BEEP_S)
    slots = rng.sample(range(int(SECONDS / BEEP_S / 2)), count)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(size=points)
    pitch, sound = rng.uniform(500, 2000), 0.003 * noise
    for slot in slots:
        start = int((2 * slot + rng.uniform(0.1, 0.5)) * beep)
        sound[start : start + beep] += 0.3 * np.sin(2 * np.pi * pitch * np.arange(beep) / RATE)
    return sound.astype(np.float32)


def write_sounds(folder: Path, name: str, number: int, rng: random.Random) -> None:
    """Write sounds, and a prompt file that asks for the number of beeps in each."""
    (folder / name).mkdir(parents=True)
    lines = []
    for i in range(number):
        count = 1 + i % MOST
        with wave.open(str(folder / name / f"{i:03}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((draw_sound(rng, count) * 32767).round().astype("<i2").tobytes())
        lines.append({"prompt": QUESTION, "audio": f"{name}/{i:03}.wav", "answer": str(count)})
    write_lines(folder / f"{name}.jsonl", lines)


def write_pairs(folder: Path, name: str) -> None:
    """Write pairs of the right and each wrong number for the sounds of a prompt file."""
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
    asked = [(line, line.pop("answer")) for line in lines]
    numbers = [str(number) for number in range(1, MOST + 1)]
    pairs = [{**line, "chosen": right, "rejected": n} for line, right in asked for n in numbers if n != right]
    write_lines(folder / "pairs.jsonl", pairs)


def write_lines(file: Path, lines: Sequence[dict[str, str]]) -> None:
    """Write a file of JSON lines."""
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def train(folder: Path, *, steps: int, batch: int = 48, lr: float = 3e-3) -> None:
    """Train the checkpoint in the folder to answer, and overwrite it."""
    model, rng = open_token_model(folder), random.Random("tiny-beeps")
    net = model.load_net(device="cpu", dtype=torch.float32).requires_grad_(True)
    end = model.ends[0]
    digits = [model.encode(Prompt(str(i), 0, 0, 0))["input_ids"] for i in range(1, MOST + 1)]
    plain = model.encode(Prompt("", 0, 0, 0))["input_ids"]
    ids = [next(int(a) for a, b in zip(digit, plain, strict=False) if a != b) for digit in digits]

    def loss_of(step: int) -> Tensor:
        counts = [rng.randint(1, MOST) for _ in range(batch)]
        sounds = [torch.from_numpy(draw_sound(rng, count))[:, None] for count in counts]
        prompts = [Prompt(QUESTION, i, i, i, audio=s, rates={"sample_rate": RATE}) for i, s in enumerate(sounds)]
        said = [rng.randint(1, MOST) if rng.random() < 0.5 else count for count in counts]
        answers = torch.tensor([[ids[count - 1], end] for count in said])
        inputs = model.inputs([model.encode(prompt) for prompt in prompts], answers, torch.ones_like(answers).bool())
        return cross_entropy(net(**inputs).logits[:, -3:-1].flatten(0, 1), answers.flatten())

    def linear(step: int, steps: int) -> float:
        return min(1.0, (step + 1) / 20) * (1 - step / steps)

    fit("net", net.parameters(), loss_of, steps=steps, lr=lr, schedule=linear)
    net.save_pretrained(folder)  # type: ignore[operator]  # all transformers models have it


def main(argv: Sequence[str]) -> None:
    """Pretrain the model, and write its folder."""
    parser = argparse.ArgumentParser(prog="pretrain.py beeps", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("checkpoints/tiny-beeps-qwen3-omni"))
    parser.add_argument("--data", type=Path, default=Path("data/tiny-beeps"))
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # a fixed number, as sums depend on it
    rng = random.Random(0)
    write_sounds(args.data, "train", 48, rng)
    write_sounds(args.data, "eval", 32, rng)
    write_pairs(args.data, "train")
    torch.manual_seed(0)
    args.out.mkdir(parents=True)
    build_tiny_models.build_qwen3_omni(hidden_size=64).save_pretrained(args.out)
    train(args.out, steps=args.steps)
    print(f"saved {args.out}, and train.jsonl, eval.jsonl and pairs.jsonl in {args.data}")
