"""Prompts of several sizes: drawn, compared, trained on and shown, each batch in the one size of its prompts."""

import json
from dataclasses import replace

import build_preferences
import numpy as np
import pytest
import torch
from helpers import in_turn, sampled
from hypothesis import given
from hypothesis import strategies as st
from model_rows import ROWS
from omni_rl.flow.evals import HeldOut
from omni_rl.flow.sampling import fill_batches
from omni_rl.settings.fields import change
from omni_rollout import Prompt
from omni_rollout.models.qwen_image_edit import QwenImageEditPlus
from omni_train.dist import Dist, deal
from PIL import Image
from trainer_runs import lone_run, recipe, rollout, tiny, train, train_on_ranks

import sample
import train_dpo
import train_flowgrpo
import train_nft

SIZES = [None, (48, 48), (32, 64), (48, 48)]  # of the prompts in turn; None is the run's 32 x 96
MODELS = ("qwen-image", "sd35-medium")
SMALL = {
    "prompts_per_step": 4,
    "group_size": 4,
    "batch_size": 4,
    "optim_lr_scheduler_type": "constant",
    "train_steps": 1,
    "eval_every": 1,
}
FLOWGRPO = {"algo": "flowgrpo", "noise_level": 0.7, "window_low": 0, "window_high": None}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working folder with prompts of several sizes, four to train on and three to evaluate."""
    monkeypatch.chdir(tmp_path)
    lines = []
    for word, size in zip(("AB", "CD", "EF", "GH"), SIZES, strict=True):
        said = {"height": size[0], "width": size[1]} if size else {}
        lines.append(json.dumps({"prompt": f'a blue sign that says "{word}"'} | said))
    (tmp_path / "sizes.jsonl").write_text("\n".join(lines))
    (tmp_path / "held-out.jsonl").write_text("\n".join(lines[1:]))
    return tmp_path


EDITS = [[(40, 72)], [(64, 48), (50, 60)], [(40, 72)], [(48, 48)]]  # height and width of the prompts' references


@pytest.fixture
def edits(here):
    """The same prompts, each with references of its own."""
    for name in ("sizes.jsonl", "held-out.jsonl"):
        lines = []
        for i, line in enumerate((here / name).read_text().splitlines()):
            images = [f"{name}-{i}-{j}.png" for j in range(len(EDITS[i]))]
            for image, (height, width) in zip(images, EDITS[i], strict=True):
                colors = np.random.default_rng(i).integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
                Image.fromarray(colors.repeat(8, axis=0).repeat(8, axis=1)[:height, :width]).save(here / image)
            lines.append(json.dumps(json.loads(line) | {"images": images}))
        (here / name).write_text("\n".join(lines))
    return here


def settings(app, model, url, **changes):
    """Small settings of a trainer on the prompts of several sizes."""
    files = {"prompts": "sizes.jsonl", "eval_prompts": "held-out.jsonl", "model": str(ROWS[model].checkpoint())}
    return change(tiny(recipe(app, "tiny-signs"), **(SMALL | {"scorer_url": url})), **(files | changes))


def assert_alike(one, two):
    """Runs on one rank and on two have the same rewards, held-out ones too, and gradients."""
    for line, other in zip(one, two, strict=True):
        assert line.keys() == other.keys()
        for key, rel in (("eval/reward", 1e-3), ("reward/mean", 1e-3), ("policy/grad_norm", 2e-2)):
            assert key not in line or line[key] == pytest.approx(other[key], rel=rel), key


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", sampled(MODELS, 1))
def test_samples_of_several_sizes_are_the_same_on_one_rank_and_two_and_the_ratio_is_one(here, bright_url, model):
    """With two batches a minibatch, of which each rank has one, and they are of different sizes."""
    args = settings(train_flowgrpo, model, bright_url, **FLOWGRPO, num_minibatches=2)
    one = train(train_flowgrpo, change(args, name="one"), report=True)
    two = train_on_ranks(train_flowgrpo, change(args, name="two", sharding_mode="fsdp2"))
    assert_alike(one, two)
    assert {line["policy/first_ratio_max_dev"] for line in (*one[1:], *two[1:])} == {0.0}
    rows = json.loads((here / "runs" / "one" / "eval" / "000001" / "rows.json").read_text())
    assert {row["prompt"][-4:]: row["size"] for row in rows} == {'"CD"': [48, 48], '"EF"': [64, 32], '"GH"': [48, 48]}
    shown = json.loads((here / "runs" / "one" / "samples" / "000001" / "groups.json").read_text())
    assert sorted(tuple(row["size"]) for group in shown for row in group["shown"][:1]) == [
        (48, 48), (48, 48), (64, 32), (96, 32)
    ]  # fmt: skip
    report = (here / "runs" / "one" / "report.html").read_text()
    assert all(f'"size":[{size}]' in report.replace(" ", "") for size in ("48,48", "64,32", "96,32"))


@in_turn(0, 3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("app", sampled(["nft", "dpo"], 1))
def test_other_losses_train_on_several_sizes_alike_on_one_rank_and_two(here, bright_url, app):
    app, changes = (train_nft, {"train_levels": 2}) if app == "nft" else (train_dpo, {})
    args = settings(app, "sd35-medium", bright_url, **changes)
    assert_alike(
        train(app, change(args, name="one")), train_on_ranks(app, change(args, name="two", sharding_mode="fsdp2"))
    )


def test_pairs_of_several_sizes_have_each_the_size_of_its_prompt(here, bright_url):
    """From the script that makes them; training on such pairs is two tests below."""
    model = str(ROWS["sd35-medium"].checkpoint())
    flags = {"out": "pairs", "save": "images", "prompts": "sizes.jsonl", "num-inference-steps": "3", "group-size": "4"}
    flags |= {"scorer-url": bright_url, "model": model}
    words = [word for name, value in flags.items() for word in (f"--{name}", value)]
    assert build_preferences.build(build_preferences.parse(words)) == (4, 4)
    args = settings(train_dpo, "sd35-medium", bright_url, preferences="pairs/pairs.jsonl", group_size=2)
    train_dpo.check_args(args)
    picture = next((here / "pairs" / "samples").glob("*win.png"))
    Image.new("RGB", (16, 16)).save(picture)
    with pytest.raises(
        ValueError, match=rf"{picture.name} must be an image of \d+ x \d+ pixels, got an image of 16 x 16 pixels"
    ):
        train_dpo.check_args(args)


@in_turn(1, 3)
@pytest.mark.timeout(600)
def test_references_of_several_sizes_and_numbers_are_trained_on_alike_on_one_rank_and_two(edits, bright_url):
    """Two prompts of one number and sizes of references, and of other sizes of their own."""
    changes = FLOWGRPO | {"group_size": 8, "best_worst_n": 4, "guidance": "image_area=4096"}
    args = settings(train_flowgrpo, "qwen-image-edit-plus", bright_url, **changes)
    one = train(train_flowgrpo, change(args, name="one"))
    assert_alike(one, train_on_ranks(train_flowgrpo, change(args, name="two", sharding_mode="fsdp2")))
    assert all(0 <= line["policy/first_ratio_max_dev"] <= 1e-5 for line in one[1:])
    lines = (json.loads(line) for line in (edits / "sizes.jsonl").read_text().splitlines())
    (edits / "alike.jsonl").write_text("\n".join(json.dumps(line | {"height": 32, "width": 96}) for line in lines))
    with pytest.raises(
        ValueError, match=r'\(height, width\) of "images" must be those of the first prompt, \[\(40, 72\)\]'
    ):
        train_flowgrpo.check_args(change(args, prompts="alike.jsonl", batch_size=16))


@in_turn(2, 3)
@pytest.mark.timeout(600)
def test_pairs_of_several_sizes_of_references_share_the_encoded_texts_of_a_folder(edits, bright_url, monkeypatch):
    """Offline, on one rank and two: the first run encodes each text once, later ones none."""
    lines = [json.loads(line) for line in (edits / "sizes.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        for side in ("win", "lose"):
            height, width = line.setdefault("height", 32), line.setdefault("width", 96)
            Image.new("RGB", (width, height), (60 * i, 255 * (side == "win"), 0)).save(f"{i}-{side}.png")
            line[side] = f"{i}-{side}.png"
    (edits / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    changes = {
        "preferences": "pairs.jsonl",
        "group_size": 2,
        "guidance": "image_area=4096",
        "memory_text_cache": "texts",
    }
    args = settings(train_dpo, "qwen-image-edit-plus", bright_url, **changes)
    one = train(train_dpo, change(args, name="one"))
    assert one[1]["policy/pairs"] == 4
    assert len(list((edits / "texts").rglob("*.safetensors"))) == 4 + 3  # of the pairs, and of the evaluation
    monkeypatch.setattr(QwenImageEditPlus, "encode", lambda *_, **__: pytest.fail("encoded a text again"))
    assert_alike(one, train_on_ranks(train_dpo, change(args, name="two", sharding_mode="fsdp2")))


def test_a_sample_is_the_one_that_a_run_of_its_size_draws(here, bright_url):
    """Sizes change neither seeds nor parameters but their own."""
    args = settings(train_flowgrpo, "sd35-medium", bright_url)
    run = lone_run(args)
    batches, _ = rollout(run, run.base_params)
    assert [(batch.params.height, batch.params.width) for batch in batches] == [
        batch.prompts[0].size or (32, 96) for batch in batches
    ]
    for batch in batches:
        assert {prompt.text for prompt in batch.prompts} == {batch.prompts[0].text}
        own = replace(run.base_params, height=batch.params.height, width=batch.params.width)
        alone = run.engine.generate([replace(prompt, size=None) for prompt in batch.prompts], own)
        assert np.array_equal(alone.media["image"], batch.media["image"])


def test_an_engine_refuses_a_prompt_of_another_size_than_the_batch_s(here, bright_url):
    run = lone_run(settings(train_flowgrpo, "qwen-image", bright_url))
    prompts = [Prompt("a sign", group=0, index=0, seed=0, size=(48, 48))]
    with pytest.raises(ValueError, match=r"prompts of one batch must have its size, 32 x 96, got {\(48, 48\)}"):
        run.engine.generate(prompts, run.base_params)


@given(
    sizes=st.lists(st.sampled_from([None, (16, 16), (16, 32)]), min_size=1, max_size=20),
    seen=st.lists(st.integers(0, 2), min_size=20, max_size=20),
    batch_size=st.integers(1, 5),
    num_ranks=st.integers(1, 3),
)
def test_an_evaluation_draws_full_batches_of_one_size_and_every_prompt_under_its_index(
    sizes, seen, batch_size, num_ranks
):
    references = [(), (torch.zeros(8, 8, 3),), (torch.zeros(8, 16, 3),)]
    shapes = enumerate(zip(sizes, seen, strict=False))
    prompts = [Prompt(str(i), i, i, seed=i, size=size, images=references[j]) for i, (size, j) in shapes]
    filled = fill_batches(prompts, batch_size, num_ranks)
    assert len(filled) % (batch_size * num_ranks) == 0
    assert sorted(prompt.index for prompt in filled) == list(range(len(filled)))
    assert sorted((p for p in filled if p.index < len(prompts)), key=lambda p: p.index) == prompts
    batches = [filled[i : i + batch_size] for i in range(0, len(filled), batch_size)]
    assert all(len({prompt.shapes for prompt in batch}) == 1 for batch in batches)
    assert (
        len(filled) < len(prompts) + len({p.shapes for p in prompts}) * batch_size + batch_size * num_ranks
    )  # and no more than needed


@given(num_prompts=st.integers(1, 40), batch_size=st.integers(1, 8), num_ranks=st.integers(1, 9))
def test_an_evaluation_of_few_prompts_keeps_all_ranks_busy_with_as_few_forwards(num_prompts, batch_size, num_ranks):
    dists = [Dist(rank, num_ranks, rank, torch.device("cpu"), None) for rank in range(num_ranks)]
    prompts = [Prompt(str(i), i, i, seed=i) for i in range(num_prompts)]
    size = HeldOut("", prompts, None).batch_size(batch_size, num_ranks)
    dealt = [list(deal(fill_batches(prompts, size, num_ranks), dist, size)) for dist in dists]
    assert {len(batches) for batches in dealt} == {len(dealt[0])}
    assert {len(batch) for batches in dealt for batch in batches} == {size}
    share = -(-num_prompts // num_ranks)
    assert len(dealt[0]) == -(-share // batch_size)  # forwards of a rank
    assert size == batch_size or size == share  # and no forward is wider than its prompts


def test_a_sheet_has_pictures_of_the_sizes_that_its_prompts_say(here):
    model = str(ROWS["qwen-image"].checkpoint())
    args = sample.Args(model=model, prompts="sizes.jsonl", num_images=4, height=32, width=96)
    args = change(args, num_inference_steps=2, batch_size=2)
    sample.main(args)
    cell = 96 * 2 + 4  # of the widest, enlarged
    sheet = np.asarray(Image.open("sheet.png"))
    assert sheet.shape == (4 + 48 * 2 + 4 + 16, 4 * cell + 4, 3)
    corners = [
        [bool((sheet[4 + y, 4 + i * cell + x] != 255).any()) for y, x in ((80, 20), (20, 150))] for i in range(4)
    ]
    assert corners == [[False, True], [True, False], [False, False], [True, False]]
    (here / "sizes.jsonl").write_text('{"prompt": "x", "height": 33, "width": 32}')
    with pytest.raises(ValueError, match=r"--prompts: sizes\.jsonl, line 1: height must be a positive multiple of 16"):
        sample.main(args)
