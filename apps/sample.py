"""Draws images from a model, with or without trained weights, onto one contact sheet.

    python apps/sample.py --prompts 'a blue sign that says "K7QX"' --height 32 --width 96 --out sheet.png
    python apps/sample.py --weights runs/tiny-signs/weights --prompts data/tiny-signs/eval.txt --num-images 32 ...

The same seed gives the same noise whatever the weights, so two sheets show what training changed.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from omni_rl.cli import check_least, flag, parse_cli, refuse

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    """What to draw."""

    model: str = f"{ROOT}/checkpoints/tiny-signs-qwen-image"  # Folder or hub id of a diffusers Qwen-Image pipeline
    weights: str = (
        ""  # Folder that a trainer wrote: full weights or a LoRA adapter; empty draws with the model as it is
    )
    prompts: str = 'a blue sign that says "K7QX"'  # A prompt, or a .txt or .jsonl file of them
    num_images: int = 1  # Images to draw, going through the prompts in turn
    out: str = "sheet.png"  # The contact sheet to write
    seed: int = 0  # Decides the noise
    height: int = 32  # Pixels
    width: int = 96  # Pixels
    num_steps: int = 10  # Denoising steps
    guidance_scale: float = 1.0  # Classifier-free guidance; 1 is off
    batch_size: int = 16  # Images per forward
    dtype: Literal["float32", "bfloat16"] = "float32"  # Of the model


def check_args(args: Args) -> None:
    """Raises ValueError when settings do not fit together."""
    check_least(args, {"num_images": 1, "num_steps": 2, "batch_size": 1, "guidance_scale": 1.0})
    if args.weights and not Path(args.weights).is_dir():
        raise ValueError(f"--weights must be a folder that a trainer wrote, got {args.weights}")


def main(args: Args) -> None:
    """Draws the images in batches and writes the sheet.

    Raises:
        ValueError, OSError: the model, the weights or the prompts cannot be used; before any weight is loaded.
    """
    import torch
    from omni_rl.report.sheet import contact_sheet
    from omni_rollout import Prompt, SamplingParams
    from omni_rollout.diffusers_engine import DiffusersEngine
    from omni_rollout.models import qwen_image
    from omni_train.data import PromptRecord, load_prompts, sample_seed
    from omni_train.device import local_device
    from omni_train.weights import check_weights, load_weights

    with flag("--"):  # the message itself begins with model, height or width
        qwen_image.check_folder(args.model, height=args.height, width=args.width)
    if args.weights:
        with flag("--weights: "):
            check_weights(qwen_image.empty_transformer(args.model), args.weights)
    records = [PromptRecord(index=0, text=args.prompts)]
    if args.prompts.endswith((".txt", ".jsonl")):
        with flag("--prompts: "):
            records = load_prompts(args.prompts)
    model = qwen_image.load(args.model, device=local_device(), dtype=getattr(torch, args.dtype))
    if args.weights:
        load_weights(model.transformer, args.weights)
    engine = DiffusersEngine(qwen_image, model)
    params = SamplingParams(args.num_steps, args.height, args.width, guidance_scale=args.guidance_scale)
    drawn = [records[i % len(records)] for i in range(args.num_images)]
    prompts = [Prompt(r.text, i, sample_seed(args.seed, 0, i, 0), r.negative) for i, r in enumerate(drawn)]
    batches = [prompts[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]
    images = torch.cat([engine.generate(batch, params).media for batch in batches])
    sheet = contact_sheet(images.permute(0, 2, 3, 1).cpu().numpy(), [prompt.text for prompt in prompts])
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(args.out)
    print(f"{len(images)} images in {args.out}")


if __name__ == "__main__":
    ARGS = parse_cli(Args, {}, check_args, sys.argv[1:], description=__doc__)
    try:
        main(ARGS)
    except (OSError, ValueError) as exc:
        refuse(exc)
