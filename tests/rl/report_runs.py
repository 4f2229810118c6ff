"""Run folders for the tests of the report, made with the functions that a trainer calls."""

import json
from pathlib import Path

import numpy as np
import torch
from omni_rl.report import Sample, write_eval, write_samples, write_versions

RATES = {"fps": 8.0, "sample_rate": 16_000.0}
PROMPTS = ("a red sign", "a green sign", "a blue sign")


def write_metrics(folder: Path, steps: list[dict]) -> None:
    """Write the lines as RunLog does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def metrics(num_steps: int, *, eval_every: int = 4) -> list[dict]:
    """Return lines: line n has reward/mean n / 100 and a 2 s step, half of it rollout; evaluations score n / 50."""
    lines = []
    for step in range(num_steps + 1):
        line: dict[str, float] = {"step": step, "time/step_s": 2.0}
        if step:
            line |= {"reward/mean": step / 100, "policy/grad_norm": 1 / step, "policy/clip_fraction": 0.0}
            line |= {"time/rollout_s": 1.0, "time/update_s": 0.5, "perf/samples_per_s": 32.0}
        if step % eval_every == 0:
            line["eval/reward"] = step / 50
        lines.append(line)
    return lines


def images(count: int, height: int = 32, width: int = 96, seed: int = 0) -> np.ndarray:
    """Return noise, uint8 [count, height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def film(num_frames: int = 9, height: int = 32, width: int = 96, seed: int = 0) -> np.ndarray:
    """Return noise, uint8 [F, H, W, 3]."""
    return images(num_frames, height, width, seed)


def tone(seconds: float = 0.5, rate: int = 16_000, channels: int = 2) -> np.ndarray:
    """Return a 440 Hz tone at half of full scale, float32 [S, C]."""
    wave_form = 0.5 * np.sin(2 * np.pi * 440 * np.arange(round(seconds * rate)) / rate)
    return wave_form.astype(np.float32)[:, None].repeat(channels, axis=1)


def clips(count: int, **sizes: int) -> list[dict[str, np.ndarray | torch.Tensor]]:
    """Return the media of `count` samples, each a video with sound."""
    return [{"video": torch.from_numpy(film(seed=i, **sizes)), "audio": tone()} for i in range(count)]


def samples(rewards: list[float | None], *, group_size: int = 1, read: str = "SIGN") -> list[Sample]:
    """Return one sample per reward, in groups with one prompt each."""
    return [
        Sample(PROMPTS[i // group_size % 3], reward, i // group_size, i, {"target": "SIGN", "read": read})
        for i, reward in enumerate(rewards)
    ]


def write_run(folder: Path, *, num_steps: int = 12, total: int | None = None, lr: float = 1e-4) -> Path:
    """Write a run with everything in its folder."""
    lines = metrics(num_steps)
    lines[-1]["policy/skipped_updates"] = 1.0  # raises an alarm
    write_metrics(folder, lines)
    total = num_steps if total is None else total
    (folder / "config.toml").write_text(
        f'name = "{folder.name}"\ntrain_steps = {total}\nlr = {lr}\nalgo = "flowgrpo"\n'
    )
    for step in range(0, num_steps + 1, 4):
        rewards: list[float | None] = [step / 50, step / 50 + 0.1, None]
        write_eval(folder, step, images(3, seed=step), samples(rewards, read=f"AT{step}"))
    write_samples(folder, num_steps, images(8), samples([0.1, 0.9, 0.5, 0.4, 0.2, 0.2, 0.2, 0.2], group_size=4))
    write_versions(folder, argv=["apps/train.py", "--lr", "1e-4"])
    return folder
