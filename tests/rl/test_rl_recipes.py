"""Every recipe is a start that its trainer accepts, is the published one, and says whether it has been run."""

import importlib
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from helpers import REPO, TEXT_TRAINERS, TRAINERS
from helpers import recipe_texts as recipes
from omni_reward.cli import build_parser, read_options
from omni_reward.scorers import SCORERS, load_scorer
from omni_reward.terms import parse
from omni_rl.media.images import AllOrNone
from omni_rl.settings import fields
from omni_rl.settings.args import parse_numbers
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import build, change, flatten
from omni_rl.settings.toml import flatten_tables, from_files, from_toml
from omni_rl.tools.plan import RESERVED
from omni_rl.tools.prompts import main as write_prompts
from omni_rl.tools.prompts import prompt_sets
from omni_rollout.models import flux2, ltx2, qwen_image, sd3, wan, z_image
from omni_train.prompts.files import load_prompts
from PIL import Image
from plan_recipes import CARDS, level_of, read_line

ALL = [(app, name) for app in TRAINERS for name in recipes(app)]
REAL = [(app, name) for app, name in ALL if not name.startswith("tiny-")]
FOR_CARDS = [(app, name) for app, name in REAL if re.search(r"-\d+x\d+gb-", name)]
ONE_CARD = [(app, name) for app, name in REAL if "-1x" in name]
PUBLISHED = tomllib.loads((REPO / "recipes" / "published.toml").read_text("utf-8"))
FIXED = {"ema_update_interval": 1}  # no settings here
TEXT_TOKENS = {  # part of a model's name -> how long its texts are by default
    "stable-diffusion-3.5": sd3.StableDiffusion3.OPTIONS["max_sequence_length"],
    "Z-Image": z_image.ZImage.OPTIONS["max_sequence_length"], "Qwen-Image": qwen_image.MAX_PROMPT_TOKENS,
    "Wan2": wan.TEXT_TOKENS, "FLUX.2": flux2.TEXT_TOKENS, "LTX-2": ltx2.TEXT_TOKENS,
}  # fmt: skip


def head_of(app: str, name: str) -> str:
    """The comment at the top of a recipe, as one line."""
    return recipes(app)[name].partition("\n\n")[0].replace("\n# ", " ")


def values_of(app: str, name: str) -> dict[str, object]:
    """What a recipe comes to, by the names of the table of published values."""
    module = importlib.import_module(app)
    args = build(module.Args, from_toml(recipes(app)[name], module.Args, name))
    values = FIXED | flatten(args if app != "train_gspo" else module.resolve_auto(args))
    optim = args.optim
    values["adam_betas"] = f"{optim.adam_beta1} {optim.adam_beta2}"
    values["max_sequence_length"] = next((n for word, n in TEXT_TOKENS.items() if word in args.policy.model), None)
    values |= parse_numbers(values.get("guidance", ""), "guidance")
    sampling = ("height", "width", "num_frames", "guidance_scale", "guidance_scale_2")  # the same in evaluations
    values |= {f"eval_{key}": values.get(key) for key in sampling}
    if "true_cfg_scale" in recipes(app)[name]:
        values["eval_guidance_scale"] = args.sampling.true_cfg_scale
    found = re.search(r"published for (\d+) accelerators?", head_of(app, name))
    return values | {"accelerators": int(found[1]) if found else None}


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_recipe_says_where_its_numbers_are_from_and_whether_it_has_been_run(app: str, name: str):
    lines = recipes(app)[name].splitlines()
    head = [line for line in lines if line.startswith("#")]
    assert head == lines[: len(head)]
    assert lines[len(head)] == ""
    assert re.fullmatch(r"# [A-Z].{20,90}[^.]", head[0]), "the first line is what --help shows"
    assert sum(line.startswith("# Source: ") for line in head) == 1
    assert sum(line.startswith("# Verified: ") for line in head) == 1
    values = tomllib.loads(recipes(app)[name])
    if not Path(REPO / (values.get("preferences") or values["prompts"])).exists():
        assert any(line.startswith(("# Prompts: write ", "# Prompts: omni-rl prompts ")) for line in head)
    if "Source: chosen here" not in recipes(app)[name]:
        assert re.search(r"published for \d+ accelerators?\b", "\n".join(head))


@pytest.mark.parametrize(("app", "name"), REAL)
def test_a_recipe_of_a_real_model_is_the_published_one_or_says_what_differs(app: str, name: str):
    row, head, values = dict(PUBLISHED.get(app, {}).get(name, {})), head_of(app, name), values_of(app, name)
    source = row.pop("source", "none")
    assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{12}:\S+", source) or "Source: chosen here" in head
    assert row or source == "none"
    for key, (value, place) in row.items():
        assert re.fullmatch(r"(\S+\.(py|sh|yaml):)?\d+", str(place)), key
        if key == "scorer":
            assert value in head.lower(), f"the head names no scorer {value}"
        else:
            assert values.get(key) == value or re.search(rf"\b{re.escape(key.removeprefix('optim.'))}\b", head), (
                f"{key} is {values.get(key)}, published {value}: mend it, or say why in the head"
            )


@pytest.mark.parametrize(("app", "name"), FOR_CARDS)
def test_a_recipe_for_cards_of_a_size_is_another_one_or_says_what_differs(app: str, name: str):
    """But for what changes no number: memory, batches, and the server of its own scorer."""
    head = head_of(app, name)
    [base] = re.findall(r"Source: chosen here, after ([\w.-]+?),? ", head)
    module = importlib.import_module(app)
    own, theirs = (fields.values_of(build(module.Args, from_toml(recipes(app)[each], module.Args, each)))
                   for each in (name, base))  # fmt: skip
    free = {key for key in own if key.startswith("memory.")} | {"name", "batch_size", "scorer.name"}
    differs = {key for key in own.keys() - free if own[key] != theirs[key]}
    assert {key for key in differs if not re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", head)} == set()


@pytest.mark.parametrize(("app", "name"), ONE_CARD)
def test_a_recipe_for_one_card_trains_with_one_command_on_the_card_that_it_names(app: str, name: str):
    text = recipes(app)[name]
    [gb] = re.findall(r"-1x(\d+)gb-", name)
    assert text.partition("\n")[0].endswith(f", on one card of {gb} GB")
    line = read_line(text)
    assert (line.cards, line.card_gb) == (1, int(gb))
    scorer = tomllib.loads(text)["scorer"]["name"].split()[0]
    where = "on the CPU" if scorer == "ocr" else "on the same card"
    assert f"\n# Scorer: started by the run, {where}\n" in text


def test_recipes_for_one_card_cover_the_cards_and_the_models_that_people_have():
    names = " ".join(name for _, name in ONE_CARD)
    assert {int(gb) for gb in re.findall(r"-1x(\d+)gb-", names)} >= {16, 24, 32, 48, 64, 80}
    for model in ("sd35-medium", "flux-dev", "flux2-klein", "z-image", "qwen-image", "wan21-1.3b"):
        assert model in names


def test_the_table_of_published_values_names_recipes_alone():
    assert [(app, name) for app, rows in PUBLISHED.items() for name in rows if (app, name) not in REAL] == []


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_recipe_names_model_and_data_and_the_knob_of_its_model(app: str, name: str):
    values = tomllib.loads(recipes(app)[name])
    size = {"max_new_tokens"} if app in TEXT_TRAINERS else {"height", "width"}
    if "duration" in values.get("guidance", ""):  # of sound
        size = {"guidance"}
    prompts = "preferences" if "preferences" in values else "prompts"
    assert {"name", "model", prompts, "eval.prompts", "lr"} | size <= set(flatten_tables(values))
    assert "url" not in values.get("scorer", {})
    if "qwen" in values["model"].lower():
        assert "guidance_scale" not in values, "Qwen-Image's pipeline calls it true_cfg_scale"
    else:
        assert "true_cfg_scale" not in values, "Qwen-Image's knob"


def test_no_two_recipes_of_a_trainer_write_to_one_folder():
    for app in TRAINERS:
        names = [tomllib.loads(text)["name"] for text in recipes(app).values()]
        assert len(set(names)) == len(names)


def sample_of(args, folder: Path) -> str:
    """An image of the size of a run, in a folder."""
    Image.new("RGB", (args.sampling.width, args.sampling.height)).save(folder / "sample.png")
    return "sample.png"


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_trainer_accepts_its_recipe(app: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    module = importlib.import_module(app)
    args = build(module.Args, from_toml(recipes(app)[name], module.Args, name))
    given = {"answer": "a", "completion": "a", "chosen": "a", "rejected": "b"}
    if app not in TEXT_TRAINERS:
        given = {"sample": sample_of(args, tmp_path)} if app == "train_sft" else {}
    prompts = tmp_path / ("prompts.jsonl" if given else "prompts.txt")
    prompts.write_text((json.dumps({"prompt": "a sign", **given}) if given else "a sign") + "\n")
    prompts.write_text(prompts.read_text() * 128)
    changed = {"prompts": str(prompts), "eval_prompts": str(prompts), "scorer_url": "http://127.0.0.1:8100"}
    if getattr(args, "preferences", ""):
        changed["preferences"] = str(prompts)
    if hasattr(args, "reward"):  # rules, which need no server
        del changed["scorer_url"]
    changed = {key: value for key, value in changed.items() if key.replace("_", ".") in flatten(args)}
    monkeypatch.setenv("RANK", "0")  # as under torchrun, which some recipes need
    module.check_args(change(args, **changed))


@pytest.mark.parametrize(
    ("preset", "more", "ends"),
    [
        ("qwen-image-ocr-lora", [], "; to get it: omni-rl prompts ocr"),
        ("qwen-image-ocr-lora", ["--prompts", "x.txt"], ""),
        ("qwen-image-edit-2511-pickscore", [], "; to get it: omni-rl prompts edit --images FOLDER"),
        ("flux-kontext-nft", [], "; to get it: omni-rl prompts edit --images x/.* --to data/sharegpt4o"),
        ("qwen3-omni-lora", [], "; to get it: write prompts/train.jsonl and eval.jsonl, lines with .*"),
        ("tiny-moving-flowgrpo", [], "; the clone of omni-rl has it: start in its folder"),
        ("tiny-beeps", [], "; the clone of omni-rl has it: start in its folder"),
    ],
)
def test_who_lacks_the_prompts_of_a_recipe_is_told_how_to_get_them(tmp_path, monkeypatch, capsys, preset, more, ends):
    monkeypatch.chdir(tmp_path)
    app = next(app for app, name in ALL if name == preset)
    module = importlib.import_module(app)
    url = [] if app in TEXT_TRAINERS else ["--scorer.url", "http://127.0.0.1:8100"]  # of which one has rules instead
    with pytest.raises(SystemExit):
        parse_cli(module.Args, module.check_args, ["--preset", preset, *url, *more], app=app)
    assert re.search(
        rf"(--prompts: .*\.(txt|jsonl): No such file or directory|python:scripts/moved\.py:moved'){ends}\n$",
        capsys.readouterr().err,
    )


@pytest.mark.parametrize(("app", "name"), REAL)
def test_the_command_for_the_prompts_of_a_recipe_writes_the_files_that_it_names(app: str, name: str):
    values, sets = tomllib.loads(recipes(app)[name]), prompt_sets()
    files = {f"data/{key}/{file}": key for key, row in sets.items() for file in row["files"]}
    named = [files.get(path) for path in (values.get("prompts"), values["eval"]["prompts"])]
    commands = re.findall(r"^# Prompts: omni-rl prompts (\w+)$", recipes(app)[name], re.MULTILINE)
    assert named == (commands * 2 or [None, None])


EDITS = [(app, name) for app, name in REAL if "omni-rl prompts edit" in recipes(app)[name]]


def test_every_recipe_with_references_says_how_to_make_its_prompts():
    wanted = [(app, name) for app, name in REAL if re.search(r"data/(\w*edit|sharegpt4o|frames)/", recipes(app)[name])]
    wanted += [(app, name) for app, name in REAL if re.search("edit|i2v|kontext", name)]
    assert len(EDITS) >= 18
    assert {*wanted} == {*EDITS}


@pytest.mark.parametrize(("app", "name"), EDITS)
def test_the_command_for_the_edits_of_a_recipe_writes_the_files_that_it_names(app, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = recipes(app)[name]
    [words] = re.findall(r"^# Prompts: omni-rl prompts (edit .*)$", text, re.MULTILINE)
    Path("FOLDER").mkdir()
    Path("x/images").mkdir(parents=True)
    for i in range(3):
        for folder in ("FOLDER", "x/images"):
            Image.new("RGB", (640, 512), (i, 0, 0)).save(f"{folder}/{i}.png")
        Path(f"FOLDER/{i}.txt").write_text("make it night\n")
    for file in ("train", "test", "train_metadata", "test_metadata"):
        line = {"prompt": "make it night", "image": "0.png" if "train" in file else "1.png"}
        Path(f"x/{file}.jsonl").write_text(json.dumps(line | {"tag": "counting", "include": []}) + "\n")
    write_prompts(shlex.split(words))
    values = tomllib.loads(text)
    for file in (values["prompts"], values["eval"]["prompts"]):
        assert all(record.images for record in load_prompts(file, check=AllOrNone()))


@pytest.mark.parametrize(("app", "name"), [case for case in REAL if "data/pickscore" in recipes(case[0])[case[1]]])
def test_a_recipe_with_prompts_of_pickscore_has_those_of_its_source(app: str, name: str):
    """Two projects have such a file; one is the other without what is not safe for work."""
    source = PUBLISHED[app].get(name, {}).get("source", "none").partition("@")[0]
    files = {key: row["files"]["train.txt"]["url"] for key, row in prompt_sets().items() if "pickscore" in key}
    own = [f"data/{key}/train.txt" for key, url in files.items() if f"/{source}/" in url]
    assert len(files) == 2
    assert not own or values_of(app, name)["prompts"] == own[0]


def test_a_recipe_of_words_names_the_scorer_that_reads_its_images():
    """Small signs are read as one line; in the others text is searched for, and the formula is the published one."""
    signs: dict[tuple[str, ...], bool] = {}
    for app, name in ALL:
        text = recipes(app)[name]
        found = re.findall(r"^# Scorer: omni-rl serve --scorer (.*) --port 8100$", text, re.MULTILINE)
        own = tomllib.loads(text).get("scorer", {})
        if "name" in own:
            scorer, *options = own["name"].split(" --option ")
            found.append(shlex.join([scorer, *options]))
        if "data/ocr/" in text or name.startswith("tiny-signs"):
            [command] = found
            words = tuple(word for word in shlex.split(command) if word != "--option")
            assert signs.setdefault(words, name.startswith("tiny-signs")) == name.startswith("tiny-signs")
    assert set(signs.values()) == {True, False}
    for (scorer, *words), is_sign in signs.items():
        options = read_options(words)
        kind, formula = ("video", "capped") if scorer.startswith("frames:") else ("image", "contained")
        assert load_scorer(scorer, options=options).media == (kind,)
        own = {key.removeprefix("ocr."): value for key, value in options.items()}
        assert (own.get("reading"), own.get("formula")) == (("line", None) if is_sign else (None, formula))


@pytest.mark.parametrize(("app", "name"), REAL)
def test_a_recipe_of_a_real_model_says_the_command_of_its_scorer(app: str, name: str):
    """One that can be served, with the parts that are rewarded; rules and SRPO's reward are in the trainer."""
    module = importlib.import_module(app)
    args = build(module.Args, from_toml(recipes(app)[name], module.Args, name))
    commands = re.findall(r"^# Scorer: omni-rl serve (.*)$", recipes(app)[name], re.MULTILINE)
    starts_own = "name" in tomllib.loads(recipes(app)[name]).get("scorer", {})
    assert len(commands) == (not hasattr(args, "reward") and not starts_own)
    for words in map(shlex.split, commands):
        options = build_parser().parse_args(words)
        assert options.port == 8100
        reward = parse(options.scorer)
        own = {spec.removeprefix("frames:") for spec in reward.specs.values()}
        assert {spec for spec in own if not spec.startswith("python:")} <= set(SCORERS)
        assert {key.partition(".")[0] for key in read_options(options.option) if "." in key} <= set(reward.specs)
        parts = set(parse_numbers(fields.values_of(args).get("reward_parts", ""), ""))
        assert parts <= ({"VQ", "MQ", "TA"} if own == {"videoalign"} else set(reward.specs))


@pytest.mark.parametrize(("app", "name"), REAL)
def test_a_planned_recipe_names_the_smallest_cards_that_hold_its_step(app: str, name: str):
    text, values = recipes(app)[name], values_of(app, name)
    line = read_line(text)
    assert (text.count("# Planned:"), text.count("# Not planned: ")) == (bool(line), not line)
    if line:
        assert str(line) in text.splitlines()
        assert line.card_gb == min(card for card in CARDS if line.gb <= (1 - RESERVED) * card)
        assert values["prompts_per_step"] * values["group_size"] % line.cards == 0
        own = tomllib.loads(text).get("scorer", {}).get("name", "ocr")
        assert bool(line.scorer_gb) == (not own.startswith("ocr"))  # which is on the CPU
        assert line.tflop


GATED = r"krea/|stabilityai/|black-forest-labs/(?!FLUX.2-klein-(base-)?4B)"


@pytest.mark.parametrize(("app", "name"), REAL)
def test_a_recipe_of_a_gated_model_says_where_its_license_is(app: str, name: str):
    text = recipes(app)[name]
    model = tomllib.loads(text)["model"]
    line = f"# Model: gated; accept its license at https://huggingface.co/{model}, then `hf auth login`"
    assert (line in text.splitlines()) == bool(re.match(GATED, model))


@pytest.mark.parametrize(("app", "name"), ALL)
def test_a_recipe_claims_the_level_that_its_evidence_has(app: str, name: str):
    """Small widths are those of tests/apps/test_app_recipe_steps.py, which takes every recipe of a real model."""
    recipe, level = f"{app.removeprefix('train_')}/{name}", level_of(recipes(app)[name])
    evidence = REPO / "docs" / "evidence" / "real_size.json"
    sized = {each["recipe"].replace("`", "").replace(", ", "/") for each in json.loads(evidence.read_text()).values()}
    records = {json.loads(path.read_text())["recipe"] for path in (REPO / "docs" / "records").glob("*-*.json")}
    if (app, name) in REAL:
        assert level == ("two steps at real size" if recipe in sized else "one step at small widths")
    else:
        assert level == ("curve published" if recipe in records else "trained")


def test_the_recipes_that_the_page_of_npus_names_set_nothing_that_is_refused_or_unproven_there():
    page = (REPO / "docs" / "ascend.md").read_text("utf-8")
    names = re.findall(r"`([\w.-]+-\d+x64gb-[\w.-]+)`", page)
    assert {line.cards for line in map(read_line, (recipes("train_flowgrpo")[name] for name in names))} == {1, 8}
    for name in names:
        values = values_of("train_flowgrpo", name)
        assert values["lora.rank"]
        assert not values["compile"]
        assert {values[key] for key in ("memory.base_dtype", "sharding.mode", "attention")} == {"auto"}


def test_who_gives_no_scorer_is_told_which_one_the_recipe_goes_with(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(REPO)
    monkeypatch.setenv("RANK", "0")  # as under torchrun
    (tmp_path / "x.txt").write_text('a sign that says "K7"\n' * 128)
    module = importlib.import_module("train_flowgrpo")
    prompts = [word for key in ("--prompts", "--eval.prompts") for word in (key, str(tmp_path / "x.txt"))]
    with pytest.raises(SystemExit):
        parse_cli(module.Args, module.check_args, ["--preset", "qwen-image-ocr", *prompts], app="train_flowgrpo")
    assert "; start one: omni-rl serve --scorer ocr --option formula=con" in capsys.readouterr().err


def test_the_first_recipe_runs_in_an_empty_folder_on_the_files_of_the_package(tmp_path, monkeypatch):
    args, presets = importlib.import_module("train_flowgrpo").Args, recipes("train_flowgrpo")
    places = ("model", "prompts", "eval.prompts")
    monkeypatch.chdir(REPO)
    here = from_files(args, "tiny-signs", "", presets)
    monkeypatch.chdir(tmp_path)
    away = from_files(args, "tiny-signs", "", presets)
    assert {name: value for name, value in away.items() if name not in places}.items() <= here.items()
    for mine, own in ((REPO / here[name], Path(away[name])) for name in places):
        files = [path.relative_to(mine) for path in mine.rglob("*") if path.is_file()] or [Path()]
        assert [path for path in files if (mine / path).read_bytes() != (own / path).read_bytes()] == []


def test_the_recipes_at_the_root_are_those_of_the_package():
    assert (REPO / "recipes").is_symlink()
    assert sorted(path.stem for path in (REPO / "recipes" / "train_nft").glob("*.toml")) == sorted(recipes("train_nft"))
    assert {path.name for path in (REPO / "recipes").iterdir()} == {*TRAINERS, "published.toml"}
