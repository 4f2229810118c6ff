"""Draw samples from a model, with or without trained weights, onto one contact sheet; a video as a strip of frames.

Beside sheet.png the folder sheet has each video and sound: .mp4 and .flac with PyAV, else .webp and .wav.

    python apps/sample.py --model checkpoints/tiny-signs-qwen-image --prompts 'a blue sign that says "K7QX"'
    python apps/sample.py --model checkpoints/tiny-signs-qwen-image --weights runs/tiny-signs/weights \\
        --prompts data/tiny-signs/eval.txt --num-images 32
    python apps/sample.py --model Qwen/Qwen-Image-Edit --images street.png --prompts "make it night" \\
        --height 512 --width 768 --true-cfg-scale 4 --dtype bfloat16

The same seed gives the same noise whatever the weights, so two sheets show what training changed. An adapter that was
trained from other weights than the model's goes on top of them: --weights FULL,ADAPTER.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from omni_rl.args import parse_numbers
from omni_rl.cli import check_finite, check_least, flag, parse_cli, refuse, require
from omni_rl.pictures import reference_sizes
from omni_train.data import PromptRecord, RecordCheck, load_prompts


@dataclass(frozen=True)
class Args:
    """Settings of a drawing."""

    model: str = ""  # Folder or hub id of a diffusers pipeline (required)
    weights: str = ""  # Folder of trained weights, full or an adapter; or FULL,ADAPTER for both
    prompts: str = 'a blue sign that says "K7QX"'  # Prompt, or a .txt or .jsonl file of prompts
    negative_prompt: str = ""  # Text that guidance leads away from, of a prompt that brings none
    images: str = ""  # Pictures to edit, of every prompt, with commas between; a .jsonl file may name others for each
    num_images: int = 1  # Images to draw, going through the prompts in turn
    out: str = "sheet.png"  # Contact sheet to write, .png, .jpg or .webp
    seed: int = 0  # Seed of the noise
    height: int = 32  # Height in pixels
    width: int = 96  # Width in pixels
    num_frames: int = 1  # Frames of a video; 1 for pictures
    frame_rate: float = 24.0  # Frames of a video in a second
    num_inference_steps: int = 10  # Denoising steps
    guidance_scale: float = 1.0  # Guidance of pipelines that call it so; for most 1 is off
    true_cfg_scale: float = 1.0  # Classifier-free guidance of pipelines that call it so, as Qwen-Image's; 1 is off
    guidance: str = ""  # Further guidance knobs of the model's pipeline, as name=value,name=value
    batch_size: int = 16  # Images per forward
    dtype: Literal["float32", "bfloat16"] = "float32"  # Data type of the weights


def check_args(args: Args) -> None:
    """Raise ValueError when settings do not fit together, or prompts or pictures cannot be read."""
    check_finite(args)
    least_one = dict.fromkeys(("num_images", "batch_size", "height", "width", "num_frames"), 1)
    check_least(args, {"num_inference_steps": 2, "frame_rate": 1e-3, **least_one})
    parse_numbers(args.guidance, "--guidance")
    missing = [folder for folder in listed(args.weights) if not folder.is_dir()]
    require(
        (args.model, "--model must be given"),
        (not missing, f"--weights must be a folder that a trainer wrote, got {missing and missing[0]}"),
        (Path(args.out).suffix in (".png", ".jpg", ".webp"), f"--out must end in .png, .jpg or .webp, got {args.out}"),
    )
    read_prompts(args, reference_sizes)


def listed(text: str) -> tuple[Path, ...]:
    """The paths in a text, with commas between."""
    return tuple(Path(piece) for piece in text.split(",") if piece)


def read_prompts(args: Args, check: RecordCheck) -> list[PromptRecord]:
    """The prompts, with the negative prompt and the pictures that go with all of them.

    check: called with each of a file.

    Raises:
        ValueError: a file of prompts or a picture is missing or damaged, or both --images and the file name pictures.
    """
    records = [PromptRecord(index=0, text=args.prompts)]
    if args.prompts.endswith((".txt", ".jsonl")):
        with flag("--prompts: "):
            records = load_prompts(args.prompts, check=check)
    images = listed(args.images)
    with flag("--images: "):
        reference_sizes(PromptRecord(0, args.prompts, images=images))
        named = any(record.images for record in records)
        require((not images or not named, f"must be left out, as {args.prompts} names images"))
    return [replace(r, images=images or r.images, negative=r.negative or args.negative_prompt) for r in records]


def main(args: Args) -> None:
    """Draw the images in batches and write the sheet.

    Raises:
        ValueError, OSError: the model, the weights or the prompts cannot be used; before any weight is loaded.
    """
    import numpy as np
    import torch
    from omni_rl.report.media import still, whole_files
    from omni_rl.report.sheet import contact_sheet
    from omni_rl.sampling import by_shapes, expand_groups
    from omni_rollout import Params
    from omni_rollout.engines.diffusers import DiffusersEngine
    from omni_rollout.models import open_model
    from omni_rollout.sampler import check_images
    from omni_train.dist import local_device
    from omni_train.weights import check_weights, homes, load_weights, saved_files
    from torch import Tensor

    true_cfg = {"true_cfg_scale": args.true_cfg_scale} if args.true_cfg_scale != 1 else {}
    params = Params(
        num_inference_steps=args.num_inference_steps,
        height=args.height,
        width=args.width,
        num_frames=args.num_frames,
        frame_rate=args.frame_rate,
        guidance_scale=args.guidance_scale,
        guidance={**parse_numbers(args.guidance, "--guidance"), **true_cfg},
    )
    with flag("--model: "):
        model = open_model(args.model)
        model.check_files()
    with flag("--"):  # the message itself begins with height, width or another setting
        model.check(params)
    records = read_prompts(args, lambda record: model.check(params.of_size(record.size)))
    with flag("--images: "):
        for record in records:
            check_images(model, reference_sizes(record))
    folders = listed(args.weights)
    with flag("--weights: "):
        found = [(name, home) for folder in folders for name, home in homes(folder, model.nets).items()]
        for name, home in found:
            check_weights(model.empty_net().get_submodule(name), home)
        are_full = [any(map(saved_files, homes(folder, model.nets).values())) for folder in folders]
        rule = f"must be full weights, an adapter, or full weights and then an adapter, got {args.weights}"
        require((len(folders) < 2 or are_full == [True, False], rule))
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    parts = model.load(device=local_device(), dtype=getattr(torch, args.dtype))
    for name, home in found:
        load_weights(parts.net.get_submodule(name), home)
    engine = DiffusersEngine(model, parts)
    drawn = [replace(records[i % len(records)], index=i) for i in range(args.num_images)]
    prompts = expand_groups(drawn, 1, seed=args.seed, step=0)
    pictures: dict[int, np.ndarray] = {}
    played = Path(args.out).with_suffix("")  # the folder of what a sheet cannot show
    for same in by_shapes(prompts):
        for batch in (same[i : i + args.batch_size] for i in range(0, len(same), args.batch_size)):
            samples = engine.generate(batch, params.of_size(batch[0].size)).to("cpu")
            media = samples.media
            each = [dict(zip(media, own, strict=True)) for own in zip(*map(Tensor.numpy, media.values()), strict=True)]
            pictures |= zip([prompt.index for prompt in batch], map(still, each), strict=True)
            for prompt, own in zip(batch, each, strict=True):
                for suffix, data in whole_files(own, samples.rates).items():
                    played.mkdir(exist_ok=True)
                    (played / f"{prompt.index}{suffix}").write_bytes(data)
    columns = 1 if "video" in media else 8
    sheet = contact_sheet([pictures[i] for i in range(len(prompts))], [p.text for p in prompts], columns=columns)
    sheet.save(args.out)
    print(f"{len(pictures)} samples in {args.out}")


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="sample", description=__doc__)
    try:
        main(ARGS)
    except (OSError, ValueError) as exc:
        refuse(exc)
