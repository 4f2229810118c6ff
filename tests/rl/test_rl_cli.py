"""The command line: what counts before what, mistakes in one line, and a help that stands alone and costs nothing."""

import ast
import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import tomllib
import warnings
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import pytest
from helpers import REPO, TRAINERS, sampled
from omni_rl.settings import cli
from omni_rl.settings.cli import parse_cli, read_settings, silence_libraries
from omni_rl.settings.eval_sets import MediaEvalSet
from omni_rl.settings.fields import (
    MAY_CHANGE,
    REQUIRED,
    at_least,
    between,
    build,
    change,
    check_bounds,
    flag_of,
    flatten,
    leaves,
    marked_settings,
    strip_metadata,
    values_of,
)
from omni_rl.settings.toml import flatten_tables, from_toml, load_recipes, suggest, to_toml
from tyro.constructors import ConstructorRegistry

import train_dpo
import train_gspo


@dataclass(frozen=True)
class Args:
    """Settings of a program for these tests."""

    # Run
    model: Annotated[str, REQUIRED] = "tiny"  # Model
    name: str = "run"  # Name of the run
    steps_per_day: int = 3  # Steps of a day, 100 % of them

    # Optimizer
    lr: Annotated[float, between(0, 1)] = 1e-3  # Learning rate
    shard: Literal["none", "ddp"] = "none"  # Spread of the weights
    correction: Literal[0, 1] = 1  # Variance uses n - correction
    size: int | None = None  # Size of a window (default: all)
    lr_decay: bool = False  # Lower the learning rate


PRESETS = {"small": "# Small numbers\n# from nowhere\nlr = 0.5\nsteps_per_day = 7\n", "large": 'lr = 2\nname = "big"\n'}
EXAMPLE = """One line of what it does.

    one -> two

A paragraph that is
wrapped anew.

    python program.py --preset small --name a-rather-long-name --shard none --lr 1e-4 --lr-decay --size 8

1. A point.
2. Another 100 % point.
"""


def read(*words: str) -> Args:
    return read_settings(Args, words, PRESETS, EXAMPLE)


def test_the_command_line_counts_more_than_the_file_and_that_more_than_the_preset(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text("lr = 0.25\nlr_decay = true\n")
    assert read() == Args()
    assert read("--preset", "small") == Args(lr=0.5, steps_per_day=7)
    assert read("--config", str(path), "--preset=small") == Args(lr=0.25, steps_per_day=7, lr_decay=True)
    words = ["--no-lr-decay", "--lr", "0.125", f"--config={path}", "--preset", "small"]
    assert read(*words) == Args(lr=0.125, steps_per_day=7)


def test_a_default_that_follows_from_another_setting_follows_from_that_of_the_command_line(tmp_path: Path):
    (tmp_path / "mine.toml").write_text("[lora]\nrank = 8\n")
    file = ["--config", str(tmp_path / "mine.toml")]
    for flags, rates in (([], (3e-4, 16)), (["--lora.rank", "4"], (3e-4, 8)), (["--lora.rank", "0"], (1e-5, 0))):
        args = read_settings(train_dpo.Args, [*file, *flags], {}, "")
        assert (args.lr, args.lora.alpha) == rates


def test_sets_of_a_file_stay_beside_flags(tmp_path: Path):
    (tmp_path / "mine.toml").write_text('[[eval.sets]]\nname = "long"\nprompts = "a.txt"\n')
    args = read_settings(train_dpo.Args, ["--config", str(tmp_path / "mine.toml"), "--eval.every", "7"], {}, "")
    assert (args.eval.every, args.eval.sets) == (7, (MediaEvalSet("long", "a.txt"),))


def test_completion_of_the_shell_knows_the_settings(capsys):
    with pytest.raises(SystemExit) as caught:
        read("--tyro-print-completion", "bash")
    assert not caught.value.code
    assert "--steps-per-day" in capsys.readouterr().out


@pytest.mark.parametrize("app", [*TRAINERS, "sample"])
def test_help_has_a_text_for_each_setting(app: str, capsys):
    cls = importlib.import_module(app).Args
    with pytest.raises(SystemExit, match=r"^0$"):
        read_settings(cls, ["--help"], {}, "")
    lines = " ".join(capsys.readouterr().out.replace("\u2502", " ").split())
    entry = r"(--[a-z][\w.-]*)(?:, --\S+)? (?:\{[^}]*\} |\S+\|\S+ |(?:STR|INT|FLOAT) )?([A-Z].*?) \(default"
    shown = dict(re.findall(entry, lines))
    assert [name for name in leaves(cls) if name != "eval.sets" and len(shown.get(flag_of(name), "")) < 8] == []


def test_check_prints_the_settings_and_ends_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match=r"^0$"):
        parse_cli(Args, check_bounds, ["--check", "--lr", "0.5"], app="none")
    assert tomllib.loads(capsys.readouterr().out)["lr"] == 0.5
    with pytest.raises(SystemExit, match=r"^2$"):
        parse_cli(Args, check_bounds, ["--lr", "inf", "--check"], app="none")
    assert "error: --lr must be <= 1, got inf" in capsys.readouterr().err


def test_a_flag_is_taken_with_hyphens_and_underscores():
    assert read("--steps_per_day=5", "--lr_decay") == read("--steps-per-day", "5", "--lr-decay")
    assert read("--name=a_b", "--size", "None").name == "a_b"


def test_a_negative_number_is_the_value_of_its_flag():
    assert read("--lr", "-1e-3") == read("--lr=-1e-3") == Args(lr=-1e-3)
    assert read("--lr", "-.5", "--steps-per-day", "-2") == Args(lr=-0.5, steps_per_day=-2)


MISTAKES = {
    "--lrr 1": "unknown flag --lrr; did you mean '--lr'?",
    "--no-lrdecay": "unknown flag --no-lrdecay; did you mean '--no-lr-decay'?",
    "--no-lr 1": "unknown flag --no-lr; did you mean '--no-lr-decay'?",
    "--no-size": "unknown flag --no-size; did you mean '--size'?",
    "--no-shard": "unknown flag --no-shard; did you mean '--shard'?",
    "--lr nan": "--lr must be a number, got nan",
    "--device cuda": "unknown flag --device; it is the machine's accelerator, or else its CPU; CUDA_VISIBLE_DEVICES ",
    "--push-to-hub": "unknown flag --push-to-hub; use omni-rl push runs/NAME OWNER/NAME after the run\n",
    "--hub_model_id x": "unknown flag --hub_model_id; use omni-rl push runs/NAME OWNER/NAME after the run\n",
    "--nproc_per_node 2": "unknown flag --nproc_per_node; use omni-rl train NAME --nproc-per-node N\n",
    "--master-port 1": "unknown flag --master-port; use torchrun, as docs/machines.md shows\n",
    "--zzz 1": "unknown flag --zzz; --help lists all, docs/coming-from.md those of other projects",
    "--learning-rate 1": "unknown flag --learning-rate; use --lr\n",
    "--output_dir x": "unknown flag --output_dir; use --name, as the run writes to runs/NAME\n",
    "--resume": "unknown flag --resume; use the same command again, which continues the run\n",
    "--fp16": "unknown flag --fp16; --help lists all",  # as these settings have no --dtype
    "--use-8bit-adam": "unknown flag --use-8bit-adam; moments of 8 bits move single weights too far: --memory.offload ",
    "--target-parameters x": "unknown flag --target-parameters; diffusers opens no adapters of parameters",
    "--tensor-parallel-size 2": "unknown flag --tensor-parallel-size; each rank has a whole engine",
    "--step-execution": "unknown flag --step-execution; all samples of a rollout begin together",
    "--gpus 2": "unknown flag --gpus; use omni-rl train NAME --nproc-per-node N\n",
    "--report-to x": "unknown flag --report-to; --help lists all",  # as these settings have no --tracking.to
    "--l 1": "unknown flag --l",
    "-x": "unknown flag -x",
    "steps 3": "unexpected 'steps': a flag begins with --",
    "--lr": "--lr needs a value\n",
    "--lr 1 2": "unexpected '2': a flag begins with --",
    "-5": "unknown flag -5",
    "--lr-decay -5": "unknown flag -5",
    "--lr --lr-decay": "--lr needs a value\n",
    "--lr fast": "--lr must be a number, got 'fast'",
    "--size 1.5": "--size must be a whole number, got '1.5'",
    "--lr-decay=yes": "--lr-decay takes no value, got 'yes': give --lr-decay or --no-lr-decay",
    "--name false --lr-decay false": "--lr-decay takes no value, got 'false': give --lr-decay or --no-lr-decay",
    "--no-lr-decay 1": "--no-lr-decay takes no value, got '1': give --lr-decay or --no-lr-decay",
    "--shard ddpp": "--shard must be one of 'none', 'ddp', got 'ddpp'; did you mean 'ddp'?",
    "--correction 2": "--correction must be one of '0', '1', got '2'",
    "--preset smal": "--preset must name a recipe, which --list-presets lists, got 'smal'; did you mean 'small'?",
    "--preset": "--preset needs a value\n",
    "--config gone.toml": "--config must be a readable TOML file, got gone.toml: ",
    "--config broken.toml": "--config must be a readable TOML file, got broken.toml: ",
    "--config deep.toml": "--config must be a readable TOML file, got deep.toml: ",
    "--config pipe": "--config: path must be a regular file, got pipe",
    "--config /dev/zero": "--config: path must be a regular file, got /dev/zero",
    "--name \udcff": r"the command line must be UTF-8 text, got '\udcff'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_on_stderr_and_exit_code_2(words: str, tmp_path, monkeypatch, capfd):
    (tmp_path / "broken.toml").write_text("lr 1")
    (tmp_path / "deep.toml").write_text(f"lr = {'[' * 5000}{']' * 5000}")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "load_recipes", lambda app: PRESETS)
    monkeypatch.setattr(sys, "argv", ["program.py"])
    with pytest.raises(SystemExit) as caught:
        parse_cli(Args, check_bounds, words.split(), app="program")
    out, err = capfd.readouterr()
    assert (caught.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"program.py: error: {MISTAKES[words]}")


@pytest.mark.parametrize("rank", [None, "0"])
def test_ranks_of_a_variable_that_was_left_are_told(rank, monkeypatch, capfd):
    app = importlib.import_module("train_flowgrpo")
    prompts = str(REPO / "data/tiny-signs/train.txt")
    words = [
        "--model",
        str(REPO / "checkpoints/tiny-signs-qwen-image"),
        "--prompts",
        prompts,
        "--eval.prompts",
        prompts,
    ]
    monkeypatch.setenv("WORLD_SIZE", "7")
    if rank:  # of torchrun
        monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match=r"^2$"):
        parse_cli(app.Args, app.check_args, [*words, "--scorer", "ocr", "--height", "32", "--width", "96"], app="none")
    hint = "; their number is WORLD_SIZE in the environment: unset it, or start them with omni-rl train NAME --nproc"
    said = capfd.readouterr().err
    assert "the ranks (7) must divide" in said
    assert (hint in said) == (rank is None)


def test_one_rank_of_a_machine_speaks(monkeypatch, capfd):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as caught:
        parse_cli(Args, check_bounds, ["--lr", "inf"], app="program")
    assert (caught.value.code, *capfd.readouterr()) == (2, "", "")


@dataclass(frozen=True)
class Memory:
    """A group of settings."""

    offload: Annotated[str, MAY_CHANGE] = ""  # Parts on the host
    cache_mb: Annotated[float, at_least(0)] = 1.0  # Most memory
    sleeps: bool = True  # Move weights


@dataclass(frozen=True)
class Grouped(Args):
    """Settings with a group."""

    memory: Memory = Memory()


@dataclass(frozen=True)
class Empty(Grouped):
    """Settings that are empty by default."""

    text: str = ""  # A text
    must: Annotated[str, REQUIRED] = ""  # A text that must be given
    share: float | None = None  # A number


@pytest.mark.parametrize("word", ["none", ""])
def test_none_empties_what_is_empty_by_default_whatever_a_recipe_says(word: str, tmp_path: Path):
    recipe = {"a": 'text = "x"\nshare = 0.5\nsize = 3\nmust = "y"\n[memory]\noffload = "engine"\n'}
    emptied = [f"--{name}={word}" for name in ("text", "memory.offload")]
    numbers = [f"--{name}=none" for name in ("share", "size")]
    assert read_settings(Empty, ["--preset", "a", *emptied, *numbers], recipe, "") == Empty(must="y")
    path = tmp_path / "mine.toml"
    path.write_text(f'text = "{word}"\nshare = "none"\nsize = "none"\n[memory]\noffload = "{word}"\n')
    assert read_settings(Empty, ["--preset", "a", "--config", str(path)], recipe, "") == Empty(must="y")
    kept = read_settings(Empty, ["--must", "none", "--name", "none", "--shard", "none"], recipe, "")
    assert (kept.must, kept.name, kept.shard) == ("none", "none", "none")


def test_a_group_is_a_prefix_and_a_table(tmp_path: Path, capsys):
    def grouped(*words: str) -> Grouped:
        return read_settings(Grouped, words, {"a": '[memory]\ncache_mb = 3.0\noffload = "x"\n'}, "")

    both = Grouped(lr=0.5, memory=Memory("engine", 2.0, sleeps=False))
    flags = ["--memory.offload", "engine", "--memory.cache-mb=2", "--memory.no-sleeps", "--lr", "0.5"]
    assert grouped(*flags) == both
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(both))
    told = {"offload": "engine", "cache_mb": 2.0, "sleeps": False}
    assert tomllib.loads(path.read_text())["memory"] == told
    assert grouped("--preset", "a", "--config", str(path)) == both
    path.write_text("[memory]\nsleeps = false\n")
    assert grouped("--preset", "a", "--config", str(path)).memory == Memory("x", 3.0, sleeps=False)
    assert "--memory.cache-mb FLOAT" in (grouped_help := shown_by(grouped, capsys))
    assert "memory options" in grouped_help


def shown_by(program, capsys) -> str:
    """Return all of a program's help."""
    with pytest.raises(SystemExit, match=r"^0$"):
        program("--help")
    return capsys.readouterr().out


def test_a_checkpoint_holds_a_group_by_the_names_of_its_settings():
    args = Grouped(memory=Memory("engine"))
    assert {"memory.offload": "engine", "memory.cache_mb": 1.0, "lr": 1e-3}.items() <= flatten(args).items()
    assert build(Grouped, flatten(args)) == args == change(Grouped(), memory_offload="engine")
    assert marked_settings(Grouped, MAY_CHANGE) == ("memory.offload",)
    with pytest.raises(ValueError, match=r"^--memory.cache-mb must be >= 0, got -1.0"):
        check_bounds(change(args, memory_cache_mb=-1.0))
    with pytest.raises(ValueError, match=r"^mine: unknown key 'memory.ofload'; did you mean 'memory.offload'"):
        from_toml("[memory]\nofload = 1", Grouped, "mine")


FILES = {
    "lrr = 1.0": "mine: unknown key 'lrr'; did you mean 'lr'?",
    'lr = "fast"': "mine: lr must be a number, got 'fast'",
    "size = true": "mine: size must be a whole number, got True",
    'lr_decay = "no"': "mine: lr_decay must be true or false, got 'no'",
    "[optimizer]\nlr = 1.0": "mine: unknown key 'optimizer.lr'",
    "optimizer.lr = 1.0": "mine: unknown key 'optimizer.lr'",
    "lr = [1.0]": r"mine: lr must be a number, got \[1.0\]",
}


@pytest.mark.parametrize("text", FILES)
def test_a_mistake_in_a_file_names_the_file_and_the_key(text: str):
    with pytest.raises(ValueError, match=FILES[text].replace("?", r"\?")):
        from_toml(text, Args, "mine")


@pytest.mark.parametrize("text", ['a "b" \\ c', "line\nfeed\ttab\x00\x1b\x7f\x85", "Zürich 東京 🎨", "\u2028"])
def test_any_text_comes_back_from_toml(text: str):
    config = Args(name=text, lr=1e-300, size=2**40, lr_decay=True)
    written = to_toml(config)
    assert from_toml(written, Args, "mine") == tomllib.loads(written)
    assert Args(**from_toml(written, Args, "mine")) == config
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", written)
    assert written.count("\n") == len(fields(Args))


def shown(capsys, *words: str) -> str:
    """Return what a program prints that ends with code 0."""
    with pytest.raises(SystemExit, match=r"^0$"):
        read(*words)
    return capsys.readouterr().out


@pytest.mark.parametrize("app", sampled(["train_flowgrpo", "train_gspo", "train_unigrpo"], 1))
def test_help_is_that_of_tyro_s_own_reading_of_comments(app: str, capsys, monkeypatch):
    module, texts = importlib.import_module(app), []
    own = ConstructorRegistry()
    own.primitive_rule(cli.number_rule)  # and no rule of ours for dataclasses
    for rules in (cli.RULES, own):
        monkeypatch.setattr(cli, "RULES", rules)
        with pytest.raises(SystemExit):
            read_settings(module.Args, ["--help"], {}, "A trainer.")
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert len(texts[0].splitlines()) > len(leaves(module.Args))


def test_help_shows_settings_with_presets_and_examples(capsys):
    text = shown(capsys, "--help")
    assert text.splitlines()[-1].startswith("2 recipes for --preset, which --list-presets lists")
    for words in ("--preset STR", "--shard {none,ddp}", "--no-lr-decay", "--size INT|none", "(default: 3)", "100 %"):
        assert words in text
    assert {line for line in EXAMPLE.splitlines() if line.startswith("    ")} <= set(text.splitlines())


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("grpo", ["mixgrpo", "flowgrpo"], "mixgrpo"),  # the first that holds it
        ("tiny-sign", ["sd35-signs", "tiny-signs", "tiny-signs-cps"], "tiny-signs"),
        ("--prompt", ["--prompt-key", "--prompts", "--prompts-per-step"], "--prompts"),  # very near
        ("lrr", ["eval.lrr-long", "lr"], "lr"),  # few letters stand in many names
        ("zzzz", ["lr"], ""),
    ],
)
def test_a_name_that_holds_the_word_is_suggested_before_one_that_is_near(name, known, found):
    assert suggest(name, known) == (f"; did you mean {found!r}?" if found else "")


def test_grpo_is_told_flowgrpo(capfd):
    read = importlib.import_module("train_flowgrpo")
    with pytest.raises(SystemExit, match=r"^2$"):
        parse_cli(read.Args, read.check_args, ["--algo", "grpo"], app="train_flowgrpo")
    assert capfd.readouterr().err.endswith("got 'grpo'; did you mean 'flowgrpo'?\n")


def test_recipes_are_listed_with_their_titles(capsys):
    assert shown(capsys, "--list-presets", "--lr", "1").splitlines() == ["small  Small numbers", "large  lr = 2"]


OTHERS = {  # flags of torchrun, git and the hub's command, and of `omni-rl` itself
    "--standalone", "--nnodes", "--shutdown-timeout", "--nproc-per-node", "--nproc_per_node", "--always", "--exclude",
    "--abbrev", "--dirty", "--repo-type", "--revision", "--version", "--help", "--no",
}  # fmt: skip


def test_every_flag_that_the_sources_name_is_one_by_its_name_of_now():
    """Also where a message puts the rest of a name after it, as --lora.{name}."""
    known = {*OTHERS, *map(flag_of, leaves(cli.Program))}
    for app in (*TRAINERS, "sample"):
        for name in leaves(importlib.import_module(app).Args):
            known |= {flag_of(name), cli.negated_flag(name)}
    own = [path for path in (REPO / "apps").glob("*.py") if path.stem in (*TRAINERS, "sample")]
    texts = [path.read_text("utf-8") for path in (*(REPO / "packages").glob("*/src/**/*.py"), *own)]
    for text in texts:
        added = " ".join(re.findall(r'add(?:_argument)?\(((?:\s*"--[\w.-]+",)+)', text))
        known |= {*FLAG.findall(added)}
    words = [node.value for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant)]
    named = {flag for word in words if isinstance(word, str) for flag in FLAG.findall(word)}
    begun = {flag for flag in named - known if any(each.startswith((f"{flag}.", f"{flag}-")) for each in known)}
    assert named - known - begun == set()
    assert len(named & known) > 100


@pytest.mark.parametrize("app", TRAINERS)
def test_no_default_learning_rate_is_above_those_of_recipes_of_real_models_and_help_tells_it(app: str, capsys):
    cls = importlib.import_module(app).Args
    given = {
        name: from_toml(text, cls, name) for name, text in load_recipes(app).items() if not name.startswith("tiny-")
    }
    for has_lora in (True, False):
        rates = [values["lr"] for values in given.values() if bool(values.get("lora.rank")) == has_lora]
        assert not rates or cls.RATES[has_lora] <= max(rates)
    full, lora = cls.RATES
    with pytest.raises(SystemExit, match=r"^0$"):
        read_settings(cls, ["--help"], {}, "")
    told = re.search(r"none: (\S+) with LoRA, (\S+) without", " ".join(capsys.readouterr().out.split()))
    assert told
    assert (float(told[1]), float(told[2])) == (lora, full)
    assert full < lora


FLAG = re.compile(r"(?<![\w-])--[a-z][\w.-]*\w")
SAFE = {  # what a bare command does: nothing that grows beyond bounds, leaves the machine, or loses what was computed
    "dtype": "float32", "optim.lr_scheduler_type": "constant", "optim.max_grad_norm": 1.0, "optim.weight_decay": 1e-4,
    "clip_range": 1e-4, "kl_coef": 0,
    "guidance_scale": 1.0, "save_every": 10, "keep_checkpoints": 2, "ema_decay": 0.0, "num_minibatches": 1,
    "tracking.to": "none", "scorer.proxy": "none", "scorer.on_failure": "raise", "eval.first": True,
    "memory.base_dtype": "auto", "memory.engine_sleep": True,
}  # fmt: skip


@pytest.mark.parametrize(("flags", "rates"), [("", (1e-5, 0, 0)), ("--lora.rank 8", (3e-4, 8, 16))])
def test_a_bare_command_prints_safe_settings(flags: str, rates: tuple, capsys):
    app = importlib.import_module("train_flowgrpo")
    prompts = str(REPO / "data/tiny-signs/train.txt")
    words = ["--model", "them/model", "--prompts", prompts, "--eval.prompts", prompts, "--scorer", "ocr", "--check"]
    with pytest.raises(SystemExit, match=r"^0$"):
        parse_cli(app.Args, app.check_args, [*words, *flags.split()], app="none")
    printed = flatten_tables(tomllib.loads(capsys.readouterr().out))
    assert {name: printed[name] for name in SAFE} == SAFE
    assert (printed["lr"], printed["lora.rank"], printed["lora.alpha"]) == rates


def test_help_into_a_closed_pipe_is_no_error():
    code = "import sys; from omni_rl.settings.cli import read_settings as r\n"
    code += "from omni_rl.settings.groups import Run as R\n"
    code += "r(R, ['--help'], {'p' + str(i): 'seed = 1' for i in range(9999)}, '')"
    command = ["bash", "-c", 'set -o pipefail; "$0" -c "$1" | head -n 1', sys.executable, code]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.stdout.startswith("usage:")
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.parametrize("words", [["prompts"], ["train", "gspo", "--list-presets"]])
def test_a_list_into_a_closed_pipe_is_no_error(words):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "omni_rl.tools.command", *words]
    done = subprocess.run(command, cwd=REPO, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.stderr, done.returncode) == ("", 0)


SWITCHES = [name for name, own in leaves(train_gspo.Args).items() if strip_metadata(own.type) is bool]


@pytest.mark.parametrize("name", sampled(SWITCHES, 3))
def test_a_switch_with_a_value_is_told_its_two_flags(name, tmp_path):
    on = f"--{name.replace('_', '-')}"
    *group, own = on[2:].split(".")
    off = f"--{'.'.join([*group, f'no-{own}'])}"
    with pytest.raises(ValueError, match=f"{on} takes no value, got 'false': give {on} or {off}$"):
        read_settings(train_gspo.Args, [on, "false"], {}, "")
    for flag in (on, off):
        assert values_of(read_settings(train_gspo.Args, [flag], {}, ""))[name] is (flag == on)


def test_help_with_70_settings_imports_nothing_heavy(tmp_path: Path):
    own = "".join(f"    field_{i}: float = {i}.5  # Share number {i}\n" for i in range(30))
    (tmp_path / "program.py").write_text(
        "import sys\nfrom dataclasses import dataclass\n"
        "from omni_rl.settings import groups, rules\n"
        "from omni_rl.settings.cli import parse_cli\n"
        "from omni_rl.settings.fields import Flat\n"
        "@dataclass(frozen=True)\nclass Args:\n"
        "    run: Flat[groups.Run] = groups.Run()\n"
        "    sampling: Flat[groups.Sampling] = groups.Sampling()\n"
        "    memory: groups.MediaMemory = groups.MediaMemory()\n"
        "    lora: groups.Lora = groups.Lora()\n"
        f"{own}\nif __name__ == '__main__':\n    try:\n        parse_cli(Args, print, sys.argv[1:], app='program')\n"
        "    finally:\n        print('heavy', sorted({'torch', 'numpy', 'requests', 'rich'} & set(sys.modules)))\n"
    )
    command = [sys.executable, "-I", str(tmp_path / "program.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n│ --") >= 70
    assert done.stdout.endswith("heavy []\n")


def test_no_garbage_is_looked_for_while_a_program_imports_its_libraries(tmp_path):
    code = (
        "import gc\nfrom dataclasses import dataclass\nfrom omni_rl.settings.cli import end_imports, parse_cli\n"
        "@dataclass(frozen=True)\nclass Args:\n    model: str = '.'\n"
        "parse_cli(Args, print, [], app='none')\nprint(gc.isenabled(), gc.get_freeze_count())\n"
        "end_imports()\nprint(gc.isenabled(), gc.get_freeze_count() > 0)\n"
        "gc.unfreeze()\nend_imports()\nprint(gc.isenabled(), gc.get_freeze_count())\n"
    )
    (tmp_path / "program.py").write_text(code)
    command = [sys.executable, "-I", str(tmp_path / "program.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["False 0", "True True", "True 0"]


def test_a_program_that_has_its_libraries_collects_garbage_all_the_time(tmp_path):
    parse_cli(Args, check_bounds, ["--model", str(tmp_path)], app="none")
    assert gc.isenabled()


@pytest.mark.parametrize(
    "module", ["torch.distributed.fsdp._fully_shard._fsdp_state", "transformers", "torchrun_of_mine"]
)
def test_warnings_of_other_libraries_are_not_shown(module, monkeypatch):
    for name in ("TQDM_DISABLE", "TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        monkeypatch.setenv(name, "as it was")
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        silence_libraries()
        warnings.warn_explicit("can cause backward to fail", UserWarning, "file.py", 1, module=module)
    assert bool(shown) == (module == "torchrun_of_mine")
    assert os.environ["TQDM_DISABLE"] == "as it was"


@pytest.mark.parametrize(("error", "says"), [("KeyboardInterrupt", False), ("ImportError", True)])
def test_ctrl_c_while_libraries_are_imported_ends_without_a_traceback(error, says):
    code = f"from omni_rl.settings.cli import silence_libraries; silence_libraries(); raise {error}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == (1 if says else -signal.SIGINT)
    assert bool(ended.stderr) == ("Traceback" in ended.stderr) == says


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
def test_verbose_leaves_other_libraries_as_they_are(flags, monkeypatch):
    hushed = []
    monkeypatch.setattr("omni_rl.settings.cli.silence_libraries", lambda: hushed.append(True))
    parse_cli(train_dpo.Args, lambda args: None, flags, app="program")
    assert bool(hushed) != bool(flags)
