"""The sampling app: a sheet of any model, from the base, from full weights, from an adapter, and from both."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CHECKPOINT, sampled
from model_rows import ROWS
from omni_rl.media.images import read_image
from omni_rl.media.write import contact_sheet
from omni_rl.settings.fields import change
from omni_rollout import Prompt
from omni_rollout.engines.diffusers import DiffusersEngine
from omni_rollout.models import open_model
from omni_train.dist import Dist
from omni_train.lora import adapter_params, add_lora
from omni_train.prompts.sampler import sample_seed
from omni_train.weights.full import save_weights
from PIL import Image

import sample

ARGS = sample.Args(model=str(CHECKPOINT), num_images=3, height=32, width=96, num_inference_steps=3, batch_size=2)
ALONE = Dist(rank=0, world_size=1, local_rank=0, device=torch.device("cpu"), mesh=None)


def draw(args):
    """Runs the app as its command line does."""
    sample.check_args(args)
    sample.main(args)


def sheet(tmp_path, args=ARGS, **changes):
    out = tmp_path / "sheets" / "sheet.png"
    draw(change(args, out=str(out), **changes))
    return np.asarray(Image.open(out))


def pictures(tmp_path, row):
    """Files of a row's references, as --images takes them."""
    files = [tmp_path / f"{i}.png" for i in range(len(row.images))]
    for file, image in zip(files, row.references(0), strict=True):
        Image.fromarray(image.numpy()).save(file)
    return ",".join(map(str, files))


def settings(name, images):
    """Those of a row, with guidance."""
    row = ROWS[name]
    params = row.guided
    return replace(
        ARGS,
        model=str(row.checkpoint()),
        prompt="a sign",
        negative_prompt="bad and blurry",
        images=images,
        height=params.height,
        width=params.width,
        guidance_scale=params.guidance_scale,
        guidance=",".join(f"{name}={value}" for name, value in params.guidance.items()),
    )


def disturb(params, seed):
    """Training, as it were."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in params:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize(
    "name", sampled([name for name, row in ROWS.items() if row.guided.num_frames == 1 and row.has_size], 1)
)
def test_a_sheet_shows_what_the_engine_draws_with_the_trained_weights(tmp_path, name):
    """Full weights, and an adapter that was trained from them; and either alone draws something else."""
    args = settings(name, pictures(tmp_path, ROWS[name]))
    model = open_model(args.model)
    parts = model.load(device="cpu", dtype=torch.float32)
    engine = DiffusersEngine(model, parts)
    disturb(parts.net.parameters(), 0)
    save_weights(parts.net, tmp_path / "full", ALONE)
    add_lora(parts.net, model.LORA_TARGETS, rank=4, alpha=8, seed=0)
    disturb(adapter_params(parts.net, "default"), 1)
    save_weights(parts.net, tmp_path / "adapter", ALONE)

    images = tuple(read_image(tmp_path / f"{i}.png") for i in range(len(ROWS[name].images)))
    prompts = [
        Prompt("a sign", i, i, seed=sample_seed(0, 0, i, 0), negative="bad and blurry", images=images) for i in range(3)
    ]
    params = replace(ROWS[name].guided, num_inference_steps=ARGS.num_inference_steps)
    drawn = torch.cat([engine.generate(each, params).media["image"] for each in (prompts[:2], prompts[2:])])
    wanted = np.asarray(contact_sheet(drawn.numpy(), ["a sign"] * 3)).astype(int)

    base, full, both = (
        sheet(tmp_path, args, weights=",".join(str(tmp_path / kind) for kind in kinds)).astype(int)
        for kinds in ((), ("full",), ("full", "adapter"))
    )
    assert np.abs(both - wanted).max() <= 1  # a level: the adapter's two factors are scaled elsewhere
    for one, other in ((base, full), (full, both), (base, both)):
        assert np.abs(one - other).max() > 5


def test_the_same_seed_draws_the_same_sheet(tmp_path):
    first = sheet(tmp_path)
    assert first.shape == (4 + 64 + 4 + 16, 3 * (192 + 4) + 4, 3)
    assert np.array_equal(first, sheet(tmp_path))
    assert not np.array_equal(first, sheet(tmp_path, seed=1))


def test_a_prompts_file_may_bring_its_own_pictures_and_negative_prompts(tmp_path):
    args = settings("qwen-image-edit", pictures(tmp_path, ROWS["qwen-image-edit"]))
    lines = [
        {"prompt": "a sign", "images": "0.png", "negative_prompt": "bad and blurry"},
        {"prompt": "a sign", "images": "0.png"},
    ]
    (tmp_path / "edit.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with_flags = sheet(tmp_path, args)
    args = replace(args, prompt=sample.Args.prompt)
    assert np.array_equal(with_flags, sheet(tmp_path, args, prompts=str(tmp_path / "edit.jsonl"), images=""))
    other = {"images": "", "negative_prompt": "a cat"}
    changed = sheet(tmp_path, args, prompts=str(tmp_path / "edit.jsonl"), **other) != with_flags
    columns = np.split(changed[:, : 3 * 164].any(axis=(0, 2)), 3)
    assert [column.any() for column in columns] == [False, True, False]


def test_what_cannot_be_drawn_with_is_refused_before_a_weight_is_read(tmp_path, monkeypatch):
    edit, plain = ROWS["qwen-image-edit"], open_model(CHECKPOINT)
    monkeypatch.setattr("omni_rollout.models.diffusers_model.DiffusersModel.load", None)
    monkeypatch.chdir(tmp_path)
    images = pictures(tmp_path, edit)
    editing = settings("qwen-image-edit", images)
    (tmp_path / "torn.png").write_bytes((tmp_path / "0.png").read_bytes()[:-20])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "samples.jsonl").touch()
    (tmp_path / "edit.jsonl").write_text('{"prompt": "a sign", "images": "0.png"}')
    net = plain.load_net(device="cpu", dtype=torch.float32)
    save_weights(net, tmp_path / "full", ALONE)
    add_lora(net, plain.LORA_TARGETS, rank=4, alpha=8, seed=0)
    save_weights(net, tmp_path / "adapter", ALONE)
    refused = (
        (ARGS, {"model": ""}, "--model must be given"),
        (ARGS, {"weights": "nowhere"}, "--weights must be a folder that a trainer wrote, got nowhere"),
        (ARGS, {"weights": "full,nowhere"}, "--weights must be a folder that a trainer wrote, got nowhere"),
        (ARGS, {"weights": "adapter,full"}, "--weights: must be full weights, .* got adapter,full"),
        (editing, {"weights": "full"}, "--weights: .* does not fit QwenImageTransformer2DModel"),
        (ARGS, {"height": 100_000}, "--height must be <= 16384, got 100000"),
        (ARGS, {"num_frames": 100_000}, "--num-frames must be <= 16384, got 100000"),
        (ARGS, {"out": "sheet.gif"}, "--out must end in .png, .jpg or .webp, got sheet.gif"),
        (ARGS, {"out_dir": "0.png"}, "--out-dir must be a folder, got 0.png"),
        (ARGS, {"out_dir": "0.png/x/y"}, "--out-dir must be a folder, got 0.png"),
        (ARGS, {"out_dir": "old"}, "--out-dir must be without the samples.jsonl of earlier samples, got old"),
        (ARGS, {"scorer_url": "localhost"}, "--scorer.url must be http"),
        (ARGS, {"scorer_url": "http://127.0.0.1:9"}, "--scorer.url must be a reward server that answers"),
        (ARGS, {"guidance": "scale"}, "--guidance must be NAME=NUMBER .* got 'scale'"),
        (ARGS, {"guidance": "scale=2"}, "--guidance of a QwenImagePipeline must be one of --true-cfg-scale, got scale"),
        (ARGS, {"height": 40}, "--height must be a positive multiple of 16 pixels, such as 32, got 40"),
        (ARGS, {"prompts": "nowhere.txt"}, "--prompts: path must be a file that can be read, got nowhere.txt"),
        (ARGS, {"images": images}, "--images: prompts of a QwenImagePipeline must have no images, got 1"),
        (editing, {"images": ""}, "--images: prompts of a QwenImageEditPipeline must have 1 images, got 0"),
        (editing, {"images": f"{images},{images}"}, "--images: .* must have 1 images, got 2"),
        (editing, {"images": "nowhere.png"}, "--images: must name a file that exists .* got nowhere.png"),
        (editing, {"images": "torn.png"}, "--images: torn.png is cut short"),
        (editing, {"prompts": "edit.jsonl"}, "--prompt must be left out beside --prompts edit.jsonl"),
        (ARGS, {"prompts": "mine/test"}, "--prompts: path must end in .* got mine/test"),
        (ARGS, {"prompt": ""}, "--prompt must not be empty"),
        (
            editing,
            {"prompts": "edit.jsonl", "prompt": sample.Args.prompt},
            "--images: must be left out, as edit.jsonl names images",
        ),
    )
    for args, changes, words in refused:
        with pytest.raises(ValueError, match=f"^{words}"):
            draw(change(args, **changes))


def test_prompts_are_a_place_such_as_a_split_of_a_folder_and_never_a_text(tmp_path):
    (tmp_path / "test.csv").write_text("prompt\na sign\n")
    [record] = sample.read_prompts(replace(ARGS, prompts=str(tmp_path / "test")), lambda record: None)
    assert record.text == "a sign"
    with pytest.raises(ValueError, match=r"--prompts: path must end in .* got a sign$"):
        sample.read_prompts(replace(ARGS, prompts="a sign"), lambda record: None)


def test_several_ranks_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="runs in one process, got 2 ranks"):
        sample.check_args(ARGS)


def test_a_run_s_settings_are_those_of_its_weights_where_no_others_are_given(tmp_path):
    (tmp_path / "weights").mkdir()
    text = "height = 16\nwidth = 64\nnum_inference_steps = 9\ntrue_cfg_scale = 4.0\n[eval]\nnum_inference_steps = 4\n"
    (tmp_path / "config.toml").write_text(text)
    args = sample.fill_defaults(sample.Args(weights=f"full,{tmp_path}/weights", width=32))
    assert (args.height, args.width, args.num_inference_steps, args.true_cfg_scale) == (16, 32, 4, 4.0)
    assert (args.num_frames, args.frame_rate, args.guidance_scale, args.guidance) == (1, 24.0, 1.0, "")
    (tmp_path / "weights" / "recipe.toml").write_text('guidance = "a=1"')
    (tmp_path / "config.toml").write_text('height = "16"')
    with pytest.raises(ValueError, match=r"config\.toml: height must be a whole number, got '16'"):
        sample.fill_defaults(args)


def test_a_folder_has_a_file_of_each_sample_and_what_is_known_of_it(tmp_path, bright_url, capfd):
    (tmp_path / "two.txt").write_text("a sign\na board\n")
    out = tmp_path / "new" / "signs"
    draw(change(ARGS, prompts=str(tmp_path / "two.txt"), out_dir=str(out), scorer_url=bright_url))
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(row["files"], row["prompt"]) for row in rows] == [
        (["0.png"], "a sign"), (["1.png"], "a board"), (["2.png"], "a sign")
    ]  # fmt: skip
    assert [row["seed"] for row in rows] == [sample_seed(0, 0, i, 0) for i in range(3)]
    pictures = [np.asarray(Image.open(out / name)) for row in rows for name in row["files"]]
    assert pictures[0].shape == (32, 96, 3)
    assert [row["score"] for row in rows] == pytest.approx([picture.mean() / 255 for picture in pictures], abs=1e-3)
    mean = np.mean([row["score"] for row in rows])
    assert capfd.readouterr().out == f"3 samples in {out}, mean score {mean:.3f} of 3\n"
    assert not list(tmp_path.glob("*.png"))
