"""The pages of the algorithms name all that can be run, and say of settings, flags and functions what the code says."""

import importlib
import inspect
import re
import shlex
from dataclasses import asdict, fields
from pathlib import Path

import omni_losses
import pytest
from helpers import REPO, public_names
from leaderboard import ENTRIES
from omni_rl.settings import args as settings
from omni_rl.settings.cli import parse_cli, recipes
from trainer_runs import recipe

TABLE = "docs/algorithms.md"
PAGES = {path.name: path.read_text("utf-8") for path in sorted((REPO / "docs" / "algorithms").glob("*.md"))}
ALL = {TABLE: (REPO / TABLE).read_text("utf-8")} | {f"docs/algorithms/{name}": text for name, text in PAGES.items()}
HEADINGS = ["Idea", "Equations", "Settings", "Curve", "Change it"]
TRAINERS = {path.stem: importlib.import_module(path.stem) for path in sorted((REPO / "apps").glob("train_*.py"))}
TOKENS = {"gspo.md", "grpo.md", "dapo.md", "cispo.md", "dr-grpo.md"}
APP_OF = (
    dict.fromkeys(TOKENS, TRAINERS["train_gspo"])
    | {"tempflow.md": TRAINERS["train_flowgrpo"], "distillation.md": TRAINERS["train_distill"]}
    | {"unigrpo.md": TRAINERS["train_unigrpo"]}
    | {entry.page: TRAINERS[entry.app] for entry in ENTRIES}
)
SOURCES = {
    path.relative_to(REPO).as_posix(): path.read_text("utf-8")
    for folder in ("apps", "packages")
    for path in sorted((REPO / folder).rglob("*.py"))
}
WORDS = set(re.findall(r"\w+", "".join(SOURCES.values())))
NOT_OF_AN_ALGORITHM = {"LossOutput", "reward_metrics"}  # what losses return, and what is logged of rewards


def section(page, heading):
    """The text below a heading of a page."""
    return PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def cells(line):
    """The cells of a row of a table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def tables(text):
    """(names of the columns, rows) of each table."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        names, _, *rows = map(cells, block.splitlines())
        yield names, rows


def code(text):
    """What stands in single backticks, outside of blocks."""
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


((COLUMNS, ROWS),) = tables(ALL[TABLE])
ALGORITHMS = [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]
TITLES = [re.fullmatch(r"\[(.+)\]\(algorithms/(.+)\)", row["algorithm"]).groups() for row in ALGORITHMS]


def row_of(title):
    """The row of the table with that title."""
    return ALGORITHMS[[name for name, _ in TITLES].index(title)]


def flags_of(row):
    """The words of the flags of a row."""
    return [word for text in code(row["flags"]) for word in shlex.split(text)]


def parsed(trainer, flags, monkeypatch):
    """The settings that flags come to, with the shipped prompts and a model where they name none; no file is read."""
    data = {"--model": "m", "--prompts": "data/tiny-signs/train.txt", "--eval-prompts": "data/tiny-signs/eval.txt"}
    if "reward_model" in trainer.Args.__dataclass_fields__:
        data |= {"--reward-model": "m", "--reward": "clip"}
    given = [] if "--preset" in flags else [word for pair in data.items() for word in pair]
    monkeypatch.chdir(REPO)
    if hasattr(trainer, "check_preferences"):
        monkeypatch.setattr(trainer, "check_preferences", lambda *given, **told: None)
        monkeypatch.setattr(settings, "PromptSampler", lambda path, **told: None)
    return parse_cli(trainer.Args, trainer.check_args, [*given, *flags], app=trainer.__name__)


# Everything is there


def test_the_table_and_the_pages_are_of_the_same_algorithms():
    assert {page for _, page in TITLES} == set(PAGES)
    assert len(set(TITLES)) == len(TITLES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_row_says_what_was_measured(entry, monkeypatch):
    row = row_of(entry.title)
    assert row["algorithm"] == f"[{entry.title}](algorithms/{entry.page})"
    assert code(row["app"]) == [entry.app]
    flags, preset = flags_of(row), recipe(TRAINERS[entry.app], entry.preset)
    args = parsed(TRAINERS[entry.app], ["--dry-run", *flags], monkeypatch)
    names = {word[2:].replace("-", "_") for word in flags if word.startswith("--")}
    told = {name: getattr(args, name) for name in names & {"algo", "adv_std", "same_start_noise", "step_weights"}}
    assert {name: getattr(preset, name) for name in told} == told
    for name in names & {"window_size", "iters_per_window", "compress_ratio"}:
        assert getattr(preset, name) != getattr(type(preset)(), name), f"the preset leaves {name} as it is"


@pytest.mark.parametrize("name", ["train_flowgrpo", "train_nft"])
def test_every_algorithm_of_a_trainer_has_a_row_with_its_loss_and_a_page_with_its_step(name, monkeypatch):
    trainer = TRAINERS[name]
    rows = [(row, page) for row, (_, page) in zip(ALGORITHMS, TITLES, strict=True) if code(row["app"]) == [name]]
    algos = {}
    for row, page in rows:
        args = parsed(trainer, ["--dry-run", *flags_of(row)], monkeypatch)
        algos.setdefault(args.algo, []).append((row, page))
    assert set(algos) == set(trainer.ALGOS)
    for algo, found in algos.items():
        one = trainer.ALGOS[algo]
        source = inspect.getsource(getattr(one, "loss", one))
        (loss,) = set(re.findall(r"\b\w+_loss\b", source.partition('"""')[2])) & public_names(omni_losses)
        for row, page in found:
            assert loss in code(row["loss"])
            assert loss in code(PAGES[page])
        if hasattr(one, "step"):
            assert any(one.step.__name__ in code(PAGES[page]) for _, page in found), algo


def test_every_algorithm_over_tokens_has_a_row_and_a_page():
    rows = [row for row in ALGORITHMS if code(row["app"]) == ["train_gspo"]]
    assert [flags_of(row) for row in rows] == [["--algo", algo] for algo in TRAINERS["train_gspo"].ALGOS]


def test_every_trainer_has_a_row():
    assert {name for row in ALGORITHMS for name in code(row["app"])} == set(TRAINERS)


def test_every_loss_is_in_the_table_and_every_public_function_on_a_page():
    in_table = {name for row in ALGORITHMS for name in code(row["loss"])}
    assert in_table <= public_names(omni_losses)
    assert {name for name in public_names(omni_losses) if name.endswith("_loss")} <= in_table
    named = {name for text in ALL.values() for name in code(text)}
    assert public_names(omni_losses) - NOT_OF_AN_ALGORITHM - named == set()


@pytest.mark.parametrize("page", PAGES)
def test_losses_of_a_row_are_on_its_page_and_used_by_its_app(page):
    for row, (_, its) in zip(ALGORITHMS, TITLES, strict=True):
        if its != page:
            continue
        used = "".join(text for path, text in SOURCES.items() if path.startswith("apps/"))
        for loss in code(row["loss"]):
            assert loss in code(PAGES[page])
            assert (re.search(rf"\b{loss}\b", used) is not None) == (row["app"] != "none yet"), loss


# The form of a page


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_one_form(page):
    assert re.findall(r"^## (.+)$", PAGES[page], re.MULTILINE) == HEADINGS
    assert len(re.findall(r"[.?!](?=\s|$)", section(page, "Idea"))) == 3, "the idea has three sentences"
    assert "```text\n" in section(page, "Equations")
    assert "**Departures.**" in section(page, "Equations")
    assert list(tables(section(page, "Settings")))
    assert 2 <= len(re.findall(r"^- \*", section(page, "Change it"), re.MULTILINE)) <= 3


@pytest.mark.parametrize("page", ALL)
def test_papers_are_those_that_the_sources_name(page):
    for shown, address in re.findall(r"\[(?:arXiv )?(\d{4}\.\d{5})\]\(https://arxiv.org/abs/([^)]+)\)", ALL[page]):
        assert shown == address
        assert any(shown in text for text in SOURCES.values())
    if page != TABLE:
        papers = {row["paper"] for row, (_, its) in zip(ALGORITHMS, TITLES, strict=True) if its == Path(page).name}
        assert {paper.replace("[", "[arXiv ") for paper in papers} == {re.search(r"\[arXiv [^)]+\)", ALL[page])[0]}


# Settings, curves and code


def same(cell, value):
    """Whether a cell tells the value of a setting."""
    if value is None or isinstance(value, (bool, str)):
        return cell == {None: "none", True: "on", False: "off"}.get(value, value)
    return re.fullmatch(r"[\d.e-]+", cell) is not None and float(cell) == pytest.approx(value, rel=1e-9)


def ours(page, column):
    """The settings that a column of a page's table tells: of a recipe, of the trainer, or of a loss."""
    if column in public_names(omni_losses):
        parameters = inspect.signature(getattr(omni_losses, column)).parameters
        return {name: parameter.default for name, parameter in parameters.items()}
    trainer = APP_OF[page]
    return asdict(trainer.Args() if column == "default" else recipe(trainer, column))


@pytest.mark.parametrize("page", PAGES)
def test_settings_are_those_of_the_recipes(page):
    columns, wrong = set(), []
    for (first, second, *names), rows in tables(section(page, "Settings")):
        assert (first, second) == ("setting", "published")
        for place, column in enumerate(name.strip("`") for name in names):
            columns.add(column)
            values = ours(page, column)
            for setting, _, *told in rows:
                value = values[setting.strip("`").removeprefix("--").replace("-", "_")]
                if not same(told[place], value):
                    wrong.append(f"{column}: {setting} is {value}, not {told[place]}")
    assert not wrong
    assert {entry.preset for entry in ENTRIES if entry.page == page} <= columns


@pytest.mark.parametrize(
    ("cell", "value", "expected"),
    [("1e-4", 1e-4, True), ("1e-4", 2e-4, False), ("5", 5 * 1.0, True), ("on", True, True), ("on", False, False),
     ("none", None, True), ("none", 3.0, False), ("0", None, False), ("1", True, False), ("batch", "group", False)],
)  # fmt: skip
def test_cells_are_compared_by_value(cell, value, expected):
    assert same(cell, value) is expected


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_curve_comes_with_the_command_that_repeats_it(entry):
    curve = section(entry.page, "Curve")
    assert f"](../images/algorithms/{entry.name}.svg)" in curve
    assert f"python scripts/leaderboard.py --only {entry.name}" in code(curve)
    assert "](../leaderboard.md)" in curve


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_readme_prints_the_command_of_a_curve(entry):
    readme = (REPO / "README.md").read_text("utf-8")
    row = rf"^\| \[{re.escape(entry.title)}\]\(.+\) \| `apps/{entry.app}\.py --preset {entry.preset}[ `]"
    assert re.search(row, readme, re.MULTILINE)


def test_pages_show_only_their_own_curves():
    for page in PAGES:
        names = re.findall(r"images/algorithms/(.+?)\.svg", PAGES[page])
        assert names == [entry.name for entry in ENTRIES if entry.page == page]
        if not names:
            assert "There is no" in section(page, "Curve")


@pytest.mark.parametrize("page", ALL)
def test_flags_presets_files_and_names_are_in_the_code(page):
    trainer = APP_OF.get(Path(page).name)
    known = {f.name for one in [trainer] * bool(trainer) or TRAINERS.values() for f in fields(one.Args)} | {"preset"}
    presets = {name for app in TRAINERS for name in recipes(app)}
    for text in code(ALL[page]):
        if text.startswith("python "):
            continue  # checked as a command
        for flag in re.findall(r"--([a-z][a-z-]*)", text):
            assert flag.replace("-", "_") in known, flag
        for path in re.findall(r"\b(?:apps|packages|scripts)/\S+", text):
            assert (REPO / path).is_file(), path
        if re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", text):
            assert text in presets, text
        if re.fullmatch(r"[A-Za-z_]\w*", text):
            assert text in WORDS, text


@pytest.mark.parametrize("page", PAGES)
def test_a_function_is_in_the_file_that_is_named_with_it(page):
    for item in re.findall(r"^- .+(?:\n  .+)*", section(page, "Change it"), re.MULTILINE):
        files = [text for text in code(item) if text in SOURCES]
        names = [text for text in code(item) if re.fullmatch(r"_?[a-z]\w*", text)]
        places = "".join(SOURCES[path] for path in files)
        if files and names:
            assert any(re.search(rf"\b(def )?{name}\b", places) for name in names), (page, files, names)


@pytest.mark.parametrize("row", [text for page in PAGES for text in code(PAGES[page]) if text.startswith("Algo(")])
def test_rows_that_a_reader_may_add_are_rows(row):
    algo = eval(row, vars(TRAINERS["train_flowgrpo"]))
    assert algo.moments == (algo.loss.__name__ != "clipped")
