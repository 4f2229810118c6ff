"""Sample from a model, with or without trained weights, onto a contact sheet that shows videos as strips of frames.

Videos and sounds are also written as .mp4 and .flac to the folder sheet next to sheet.png. --out-dir also
writes images as .png, and samples.jsonl with the prompt and the seed of each file.

    python apps/sample.py --model checkpoints/tiny-signs-qwen-image --prompt 'a blue sign that says "K7QX"' \\
        --height 32 --width 96
    python apps/sample.py --model checkpoints/tiny-signs-qwen-image --weights runs/tiny-signs/weights \\
        --prompts data/tiny-signs/eval.txt --num-images 32 --out-dir signs --scorer.url http://127.0.0.1:8100
    python apps/sample.py --model Qwen/Qwen-Image-Edit --images street.png --prompt "make it night" \\
        --height 512 --width 768 --true-cfg-scale 4 --dtype bfloat16

The same seed gives the same noise for any weights, so two sheets show what training changed. For an adapter that was
trained on top of fine-tuned full weights, pass both: --weights FULL,ADAPTER.
"""

import json
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from omni_rl.media.images import check_media_prompt, reference_sizes
from omni_rl.settings import groups
from omni_rl.settings.args import num_ranks, parse_numbers
from omni_rl.settings.cli import end_imports, exit_with_error, parse_cli
from omni_rl.settings.eval_sets import check_urls
from omni_rl.settings.fields import (
    REQUIRED,
    at_least,
    between,
    check_bounds,
    flags_by_name,
    leaves,
    map_error_names,
    prefix_errors,
    require,
)
from omni_rl.settings.toml import coerce, flatten_tables
from omni_train.prompts.files import PromptRecord, RecordCheck, load_prompts

# 1. Settings. Parsed before torch is imported, so that --help and errors in flags are fast.

SAMPLES = "samples.jsonl"  # in --out-dir, the prompt and the seed of each file


@dataclass(frozen=True)
class SampleScorer:
    """A reward server."""

    url: str = ""  # URL of a reward server that scores the samples
    token_file: str = ""  # File with its token


@dataclass(frozen=True)
class Args:
    """Settings of the samples."""

    model: Annotated[str, REQUIRED] = ""  # Folder or hub id of a diffusers pipeline
    weights: str = ""  # Folder of trained weights, full or an adapter; FULL,ADAPTER for both
    prompt: str = 'a blue sign that says "K7QX"'  # Text of the prompt
    prompts: str = ""  # File, folder or data set of prompts, instead of --prompt
    prompt_key: str = ""  # Key or column of the prompt; empty: prompt or messages
    negative_prompt: str = ""  # Negative prompt, for prompts without their own
    images: str = ""  # Images to edit with every prompt, separated by commas; or --prompts names images
    media_root: str = ""  # Folder for images of --prompts, in addition to their own
    num_images: Annotated[int, at_least(1)] = 1  # Number of samples, cycling through the prompts
    out: str = ""  # Contact sheet to write, .png, .jpg or .webp; empty: sheet.png, or none with --out-dir
    out_dir: str = ""  # Folder for the file of each sample
    seed: Annotated[int, between(0, 2**63 - 1)] = 0  # Seed of the noise
    height: Annotated[int | None, between(1, 2**14)] = None  # Height in pixels; none: that of the weights' run, or 512
    width: Annotated[int | None, between(1, 2**14)] = None  # Width in pixels; none: likewise, or 512
    num_frames: Annotated[int | None, between(1, 2**14)] = None  # Frames of a video; none: likewise, or 1
    frame_rate: Annotated[float | None, between(1e-3, 1e3)] = None  # Frames per second; none: likewise, or 24
    num_inference_steps: Annotated[int | None, between(2, 10_000)] = None  # Denoising steps; none: likewise, or 10
    guidance_scale: float | None = None  # Guidance scale, if the pipeline has one; none: likewise, or 1
    true_cfg_scale: float | None = None  # True CFG scale, as in Qwen-Image; none: likewise, or 1
    guidance: str | None = None  # Other guidance settings of the pipeline, as name=value,name=value; none: likewise
    scorer: SampleScorer = SampleScorer()  # A reward server that scores the samples
    batch_size: Annotated[int, at_least(1)] = 16  # Images per forward
    dtype: groups.Dtype = "float32"  # Data type of the weights


def check_args(args: Args) -> None:
    """Raise ValueError if settings do not fit together, or prompts or images cannot be read."""
    args = fill_defaults(args)
    check_bounds(args)
    parse_numbers(args.guidance or "", "--guidance")
    parent = next(path for path in (Path(args.out_dir), *Path(args.out_dir).parents) if path.exists())
    missing = [folder for folder in parse_paths(args.weights) if not folder.is_dir()]
    require(
        (args.model, "--model must be given"),
        (args.prompt, "--prompt must not be empty"),
        (not args.prompts or args.prompt == Args.prompt, f"--prompt must be left out beside --prompts {args.prompts}"),
        (not missing, f"--weights must be a folder that a trainer wrote, got {missing and missing[0]}"),
        (not args.out or Path(args.out).suffix in (".png", ".jpg", ".webp"),
         f"--out must end in .png, .jpg or .webp, got {args.out}"),
        (not args.out_dir or parent.is_dir(), f"--out-dir must be a folder, got {parent}"),
        (not args.out_dir or not (Path(args.out_dir) / SAMPLES).exists(),
         f"--out-dir must be without the {SAMPLES} of earlier samples, got {args.out_dir}"),
        (not args.scorer.token_file or Path(args.scorer.token_file).is_file(),
         f"--scorer.token-file must be a file, got {args.scorer.token_file}"),
        (num_ranks() == 1, f"sample.py runs in one process, got {num_ranks()} ranks"),
    )  # fmt: skip
    check_urls(args.scorer.url, "--scorer.url")
    read_prompts(args, check_media_prompt)


DEFAULTS = {
    "height": 512, "width": 512, "num_frames": 1, "frame_rate": 24.0, "num_inference_steps": 10, "guidance_scale": 1.0,
    "true_cfg_scale": 1.0, "guidance": "",
}  # fmt: skip


def fill_defaults(args: Args) -> Args:
    """Fill missing settings with those of the weights' run, or with DEFAULTS."""
    settings: dict[str, Any] = dict(DEFAULTS)
    for folder in parse_paths(args.weights)[-1:]:
        for file in (folder / "recipe.toml", folder.parent / "config.toml"):  # for weights from the hub, and from a run
            if file.is_file():
                with prefix_errors(f"{file}: "):
                    run = flatten_tables(tomllib.loads(file.read_text("utf-8")))
                run["num_inference_steps"] = run.get("eval.num_inference_steps", settings["num_inference_steps"])
                own = leaves(Args)
                settings |= {name: coerce(own[name], run[name], f"{file}: {name}") for name in settings if name in run}
    chosen = {name: value for name in settings if (value := vars(args)[name]) is not None}
    return replace(args, **settings | chosen, out=args.out or ("" if args.out_dir else "sheet.png"))


def parse_paths(text: str) -> tuple[Path, ...]:
    """Return the comma-separated paths in a text."""
    return tuple(Path(piece) for piece in text.split(",") if piece)


def read_prompts(args: Args, check: RecordCheck) -> list[PromptRecord]:
    """Return the prompts, with the negative prompt and images for all of them.

    check: called with each prompt of a file.

    Raises:
        ValueError: a file of prompts or an image is missing or damaged, or both --images and the file name images.
    """
    records = [PromptRecord(index=0, text=args.prompt)]
    if args.prompts:
        with prefix_errors("--prompts: "):
            records = load_prompts(args.prompts, check=check, media_root=args.media_root, key=args.prompt_key)
    images = parse_paths(args.images)
    with prefix_errors("--images: "):
        reference_sizes(replace(records[0], images=images))
        names_images = any(record.images for record in records)
        require((not images or not names_images, f"must be left out, as {args.prompts} names images"))
    return [replace(r, images=images or r.images, negative=r.negative or args.negative_prompt) for r in records]


if __name__ == "__main__":
    ARGS = parse_cli(Args, check_args, sys.argv[1:], app="sample", description=__doc__)

# 2. Samples

import numpy as np
import torch
from omni_reward import RewardError
from omni_rl.flow.sampling import expand_groups, group_by_shapes
from omni_rl.flow.scorers import Scorer, abstaining_scorer, connect
from omni_rl.flow.scoring import collect, submit
from omni_rl.media.write import contact_sheet, format_score, score_label, still_image, whole_files
from omni_rollout import Model, Params, Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_rollout.sampler import check_images
from omni_train.dist import Dist, init_distributed
from omni_train.weights.full import check_weights, load_weights, saved_files, weight_folders
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A sample to show: its image [H, W, 3], score as text, line of samples.jsonl, and kinds of media."""

    picture: np.ndarray
    label: str
    row: dict[str, Any]
    kinds: tuple[str, ...]


def main(args: Args) -> None:
    """Sample in batches, score the samples if there is a scorer, and write the files.

    Raises:
        ValueError, OSError: the model, the weights, the prompts or the scorer cannot be used. Raised before any weights
            are loaded, except if the scorer fails later.
    """
    args, dist = fill_defaults(args), init_distributed()
    params = sampling_params(args)
    model = open_checked_model(args, params)
    records = read_prompts(args, lambda record: model.check(params.of_size(record.size)))
    with prefix_errors("--images: "):
        for record in records:
            check_images(model, reference_sizes(record))
    weights = find_weights(args, model)
    scorer = open_scorer(args, dist, model, records[0], params)
    for place in (Path(args.out).parent, Path(args.out_dir)):
        place.mkdir(parents=True, exist_ok=True)
    parts = model.load(device=dist.device, dtype=getattr(torch, args.dtype))
    for name, folder in weights:
        load_weights(parts.net.get_submodule(name), folder)
    engine = DiffusersEngine(model, parts)
    sample_records = [replace(records[i % len(records)], index=i) for i in range(args.num_images)]
    prompts = expand_groups(sample_records, 1, seed=args.seed, step=0)
    samples = dict[int, Sample]()
    for same_shape in group_by_shapes(prompts):
        for batch in (same_shape[i : i + args.batch_size] for i in range(0, len(same_shape), args.batch_size)):
            samples |= sample(args, dist, engine, scorer, batch, params)
    write(args, prompts, [samples[i] for i in range(len(prompts))])


def sampling_params(args: Args) -> Params:
    """Return the sampling parameters from the result of `fill_defaults`."""
    settings = {name: value for name, value in vars(args).items() if name in DEFAULTS}
    true_cfg = {"true_cfg_scale": scale} if (scale := settings.pop("true_cfg_scale")) != 1 else {}
    guidance = {**parse_numbers(settings.pop("guidance"), "--guidance"), **true_cfg}
    return Params(**settings, guidance=guidance)


def open_checked_model(args: Args, params: Params) -> Model:
    """Open the model without weights, and check its files and the parameters."""
    with prefix_errors("--model: "):
        model = open_model(args.model)
        model.check_files()
    with map_error_names({name: f"--guidance {name}" for name in model.OPTIONS} | flags_by_name(Args)):
        model.check(params)
    with prefix_errors("--model: "):
        model.sigmas(params)
    return model


def find_weights(args: Args, model: Model) -> list[tuple[str, Path]]:
    """Return the folders of --weights in the order of loading, each with the name of its net."""
    folders = parse_paths(args.weights)
    with prefix_errors("--weights: "):
        by_net = [item for folder in folders for item in weight_folders(folder, model.nets).items()]
        for name, weights_folder in by_net:
            check_weights(model.empty_net().get_submodule(name), weights_folder)
        are_full = [any(map(saved_files, weight_folders(folder, model.nets).values())) for folder in folders]
        rule = f"must be full weights, an adapter, or full weights and then an adapter, got {args.weights}"
        require((len(folders) < 2 or are_full == [True, False], rule))
    return by_net


def open_scorer(args: Args, dist: Dist, model: Model, record: PromptRecord, params: Params) -> Scorer:
    """Return the scorer of --scorer.url, after scoring one prompt, or one that abstains."""
    if not args.scorer.url:
        return abstaining_scorer()
    canary = replace(record, meta={**record.meta, "fps": params.frame_rate})
    settings = groups.Scorer(token_file=args.scorer.token_file)
    scorer, _ = connect(args.scorer.url, settings, dist, canary, model.MEDIA)
    rule = "--scorer.url must be a scorer of single samples, this one compares those of a group"
    require((not scorer.takes_groups, rule))
    return scorer


def sample(
    args: Args, dist: Dist, engine: DiffusersEngine, scorer: Scorer, batch: list[Prompt], params: Params
) -> dict[int, Sample]:
    """Return the samples of a batch by index, and write their files."""
    samples = engine.generate(batch, params.of_size(batch[0].size)).to("cpu")
    try:
        scores = collect(dist, [submit(scorer, samples)])
    except RewardError as exc:
        raise ValueError(f"--scorer.url: {exc}") from exc
    media = samples.media
    per_sample = [
        dict(zip(media, sample_media, strict=True))
        for sample_media in zip(*map(Tensor.numpy, media.values()), strict=True)
    ]
    folder, rows = Path(args.out_dir) if args.out_dir else Path(args.out).with_suffix(""), dict[int, Sample]()
    for prompt, sample_media, score in zip(batch, per_sample, scores, strict=True):
        media_files = whole_files(sample_media, samples.rates) if args.out_dir or "image" not in sample_media else {}
        files = {f"{prompt.index}{suffix}": data for suffix, data in media_files.items()}
        for name, data in files.items():
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        row = {"files": list(files), "prompt": prompt.text, "seed": prompt.seed}
        row |= {"score": score.value, "parts": score.parts, "abstained": score.abstained}
        label = f"{score_label(score.value, {})}  " * bool(args.scorer.url)
        rows[prompt.index] = Sample(still_image(sample_media), label, row, tuple(media))
    return rows


def write(args: Args, prompts: list[Prompt], samples: list[Sample]) -> None:
    """Write samples.jsonl and the contact sheet, and print their paths."""
    if args.out_dir:
        lines = [json.dumps(sample.row, ensure_ascii=False) + "\n" for sample in samples]
        (Path(args.out_dir) / SAMPLES).write_text("".join(lines), "utf-8")
    if args.out:
        texts = [sample.label + prompt.text for sample, prompt in zip(samples, prompts, strict=True)]
        columns = 1 if "video" in samples[0].kinds else 8
        contact_sheet([sample.picture for sample in samples], texts, columns=columns).save(args.out)
    graded = [sample.row["score"] for sample in samples if sample.row["score"] is not None]
    mean = f", mean score {format_score(float(np.mean(graded)), 3)} of {len(graded)}" if graded else ""
    places = " and ".join(filter(None, (args.out_dir, args.out)))
    print(f"{len(samples)} sample{'s' * (len(samples) > 1)} in {places}{mean}")


if __name__ == "__main__":
    end_imports()
    try:
        main(ARGS)
    except (OSError, ValueError) as exc:
        exit_with_error(exc)
