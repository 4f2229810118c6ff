"""Make a preference file for apps/train_dpo.py: sample, score, and keep each prompt's best and worst sample.

    python -m omni_reward.server --scorer ocr --option reading=line --port 8100
    python scripts/build_preferences.py --scorer-url http://127.0.0.1:8100 --num-prompts 256 --out data/pairs

It writes OUT/pairs.jsonl, and each sample as a latent (.safetensors) or, with --save images, as an image (.png).
docs/preferences.md describes the file. A prompt whose samples all have the same score gives no pair.
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from omni_losses import best_worst_pairs
from omni_reward import RewardClient
from omni_rl.flow.sampling import expand_groups
from omni_rl.flow.scoring import submit
from omni_rl.media.images import check_media_prompt
from omni_rl.settings.args import parse_numbers
from omni_rollout import Params, Trajectory
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.dist import local_device
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.weights.full import load_weights, weight_folders
from PIL import Image
from safetensors.torch import save_file

ROOT = Path(__file__).parents[1]


def draw_groups(
    engine: DiffusersEngine, client: RewardClient, records: Sequence[PromptRecord], args: Any
) -> Iterator[tuple[PromptRecord, Trajectory, torch.Tensor]]:
    """Yield each prompt with its samples and their rewards [G], NaN if missing."""
    guidance = parse_numbers(args.guidance, "--guidance")
    params = Params(
        args.num_inference_steps,
        args.height,
        args.width,
        num_frames=args.num_frames,
        guidance_scale=args.guidance_scale,
        guidance=guidance,
    )
    for record in records:
        prompts = expand_groups([record], args.group_size, seed=args.seed, step=0)
        chunks = [prompts[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)]
        group = Trajectory.cat([engine.generate(chunk, params.of_size(record.size)) for chunk in chunks])
        scores = submit(client, group).result()
        yield record, group, torch.tensor([float("nan") if s.value is None else s.value for s in scores])


def save_sample(group: Trajectory, index: int, path: Path, *, images: bool) -> str:
    """Write one sample of the group and return its file name; path has no suffix."""
    path = path.with_suffix(".png" if images else ".safetensors")
    if images:
        Image.fromarray(group.media["image"][index].cpu().numpy()).save(path)
    else:
        save_file({"x0": group.x0[index].cpu().contiguous()}, path)
    return path.name


def keep_references(record: PromptRecord, folder: Path) -> list[str]:
    """Copy a prompt's reference images below the folder, where the file may name them; return their relative paths."""
    names = [f"references/{record.index:06}-{i}{image.suffix}" for i, image in enumerate(record.images)]
    (folder / "references").mkdir(exist_ok=True)
    for image, name in zip(record.images, names, strict=True):
        shutil.copyfile(image, folder / name)
    return names


def build(args: Any) -> tuple[int, int]:
    """Write the file; return the number of pairs and of sampled prompts."""
    records = load_prompts(args.prompts, check=check_media_prompt)
    token = args.scorer_token_file.read_text().strip() if args.scorer_token_file else None
    records, samples = records[: args.num_prompts], args.out / "samples"
    samples.mkdir(parents=True)  # an existing folder holds other pairs
    count = 0
    with RewardClient(args.scorer_url, token=token, timeout_s=args.scorer_timeout_s) as client:
        client.check()
        model = open_model(args.model)
        if args.save == "images" and "image" not in model.MEDIA:
            raise ValueError(f"--save must be latents for a model of {model.MEDIA[0]}, got images")
        parts = model.load(device=local_device(), dtype=getattr(torch, args.dtype))
        if args.weights:
            for name, home in weight_folders(args.weights, model.nets).items():
                load_weights(parts.net.get_submodule(name), home)
        temporary = args.out / "pairs.tmp"
        with temporary.open("w", encoding="utf-8") as file:
            for record, group, rewards in draw_groups(DiffusersEngine(model, parts), client, records, args):
                for best, worst in best_worst_pairs(rewards, torch.zeros(len(rewards), dtype=torch.long)):
                    line: dict[str, object] = {"prompt": record.text}
                    if record.size:
                        line |= {"height": record.size[0], "width": record.size[1]}
                    if record.images:
                        line["images"] = keep_references(record, args.out)
                    for side, index in (("win", best), ("lose", worst)):
                        path = samples / f"{record.index:06}-{side}"
                        line[side] = f"samples/{save_sample(group, index, path, images=args.save == 'images')}"
                        line[f"{side}_score"] = round(rewards[index].item(), 6)
                    file.write(json.dumps(line) + "\n")
                    count += 1
        os.replace(temporary, args.out / "pairs.jsonl")  # complete or missing
    return count, len(records)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or `argv`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--scorer-url", required=True)
    parser.add_argument("--scorer-token-file", type=Path)
    parser.add_argument("--scorer-timeout-s", type=float, default=120.0)
    parser.add_argument("--out", type=Path, required=True, help="a folder that does not exist")
    parser.add_argument("--prompts", type=Path, default=ROOT / "data" / "tiny-signs" / "train.txt")
    parser.add_argument("--num-prompts", type=int, help="number of prompts to use, from the beginning of the file")
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "tiny-signs-qwen-image"))
    parser.add_argument("--weights", type=Path, help="folder written by a trainer; by default the base model is used")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--save", choices=("latents", "images"), default="latents")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per forward pass")
    parser.add_argument("--height", type=int, default=32)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--num-frames", type=int, default=1, help="frames of a video, saved with --save latents")
    parser.add_argument("--num-inference-steps", type=int, default=10)
    parser.add_argument("--guidance-scale", type=float, default=1.0)
    parser.add_argument("--guidance", default="", help="other guidance options of the pipeline, as true_cfg_scale=4")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.out.exists():
        parser.error(f"--out must not exist yet, got {args.out}")
    if min(args.group_size - 1, args.batch_size, args.num_inference_steps, args.num_prompts or 1) < 1:
        parser.error("--group-size must be >= 2; --batch-size, --num-inference-steps and --num-prompts must be >= 1")
    return args


if __name__ == "__main__":
    settings = parse()
    num_pairs, num_prompts = build(settings)
    print(f"{num_pairs} pairs of {num_prompts} prompts in {settings.out / 'pairs.jsonl'}")
