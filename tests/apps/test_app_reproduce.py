"""`scripts/reproduce.py` runs a recipe from prompts to record, and the records in docs are valid and on their page."""

import hashlib
import importlib
import json
import signal
import subprocess
import sys
import time
import tomllib
from datetime import datetime
from pathlib import Path

import pytest
import records_page
import reproduce
import tiny_signs
from helpers import CHECKPOINT, REPO
from jsonschema import Draft202012Validator
from omni_rl.report.data import run_data
from omni_rl.run.world import World
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.toml import load_recipes
from omni_train.files import load_metrics
from trainer_runs import write_eval_prompts

SCHEMA = json.loads((REPO / "docs" / "records" / "schema.json").read_text("utf-8"))
RECORDS = records_page.read_records(REPO / "docs" / "records")
SMALL = [
    "--model", str(CHECKPOINT), "--prompts", "signs/samples.jsonl", "--eval.prompts", "eval.txt", "--train-steps", "2",
    "--prompts-per-step", "4", "--batch-size", "4", "--eval.every", "2", "--eval.num-inference-steps", "2",
    "--scorer=",
]  # fmt: skip


@pytest.fixture
def trained(monkeypatch, tmp_path, bright_url):
    """Trains in this process, and lists the words that each trainer got and what would continue it."""
    started = []

    def train(words, typed):
        started.append((words, typed))
        monkeypatch.setattr(sys, "argv", [str(REPO / "apps" / f"train_{words[0]}.py"), *words[1:]])
        app = importlib.import_module(f"train_{words[0]}")
        args = parse_cli(app.Args, app.check_args, list(words[1:]), app=app.__name__)
        app.main(args, World.join(args))
        return 0

    monkeypatch.chdir(tmp_path)
    write_eval_prompts(tmp_path)
    tiny_signs.write_samples(tmp_path / "signs", REPO / "data" / "tiny-signs" / "eval.txt")
    monkeypatch.setattr(reproduce, "train", train)
    return started


def test_a_recipe_becomes_a_record_of_what_its_run_left(trained, bright_url, capsys):
    words = [*SMALL, "--scorer.url", bright_url]
    reproduce.main(["sft/tiny-signs", "--seed", "3", *words])
    folder = Path("runs/reproduce/sft-tiny-signs-3")
    assert capsys.readouterr().out.splitlines()[-1] == f"record in {folder / 'record.json'}"
    record = json.loads((folder / "record.json").read_text())
    Draft202012Validator(SCHEMA).validate(record)
    [(given, typed)] = trained
    assert given[-6:] == ["--preset", "tiny-signs", "--seed", "3", "--name", "reproduce/sft-tiny-signs-3"]
    assert typed.startswith("python scripts/reproduce.py sft/tiny-signs --seed 3 --model ")
    lines = load_metrics(folder / "metrics.jsonl")
    assert record["curves"]["eval/reward"] == [[line["step"], line["eval/reward"]] for line in (lines[0], lines[2])]
    assert record["hours"] == pytest.approx(sum(line["time/step_s"] for line in lines) / 3600)
    assert record["memory_mb"]["perf/peak_memory_mb"] == max(line.get("perf/peak_memory_mb", 0) for line in lines)
    [(name, digest)] = record["weights"].items()
    assert digest == hashlib.sha256((folder / "weights" / name).read_bytes()).hexdigest()
    assert (record["recipe"], record["ranks"], record["device"]) == ("sft/tiny-signs", 1, "cpu")
    assert datetime.fromisoformat(record["started"]).tzinfo
    assert bright_url not in json.dumps(record)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1} | {"time/step_s": 1.0}) + "\n")
    with pytest.raises(ValueError, match=r"must have taken 2 steps, has 1: the same command continues it"):
        reproduce.record_of(folder, "sft/tiny-signs", [])


def test_a_record_joins_no_evaluations_of_other_settings_and_has_all_starts(trained, bright_url, capsys):
    few = ["--eval.num-prompts", "2"]
    words = [*SMALL, "--scorer.url", bright_url, "--eval.every", "1", "--optim.lr-scheduler-type", "constant"]
    reproduce.main(["sft/tiny-signs", *words, *few])
    reproduce.main(["sft/tiny-signs", *words, "--train-steps", "4"])
    folder = Path("runs/reproduce/sft-tiny-signs-0")
    lines = load_metrics(folder / "metrics.jsonl")
    assert [line.get("eval/settings_since") for line in lines] == [None, None, None, 3, 3]
    record = json.loads((folder / "record.json").read_text())
    Draft202012Validator(SCHEMA).validate(record)
    assert record["curves"] == {
        name: [[line["step"], line[name]] for line in lines[3:]]
        for name in ("eval/reward", "eval/reward_stderr", "eval/abstained_ratio")
    }
    (earlier,) = record["earlier_starts"]
    assert "--eval.num-prompts 2" in earlier["command"]
    assert earlier["started"] <= record["started"]
    assert "--eval.num-prompts 2" not in record["words"]
    said = capsys.readouterr().out
    last = f"{lines[3]['eval/reward']:.3f} -> {lines[4]['eval/reward']:.3f}"
    assert f"held-out score {last}" in said
    card = (folder / "weights" / "README.md").read_text()
    assert "held-out, base" not in card
    assert card.count("--preset tiny-signs") == 2
    shown = run_data(folder)["curves"]
    assert (shown["eval/reward"]["x"], shown["policy/lr"]["x"]) == ([3, 4], [1, 2, 3, 4])
    assert "eval/settings_since" not in shown


def test_prompts_are_fetched_and_the_scorer_that_a_recipe_names_is_started(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    fetched, started = [], []
    monkeypatch.setattr(reproduce, "fetch_set", lambda wanted, folder: fetched.append((wanted, folder)))
    monkeypatch.setattr(reproduce, "train", lambda words, typed: started.append(words) or 7)
    for words in ([], ["--scorer.url", "http://127.0.0.1:8100"]):
        with pytest.raises(SystemExit, match=r"^7$"):
            reproduce.main(["flowgrpo/sd35-medium-flowgrpo-ocr", "--nproc-per-node", "8", *words])
    assert fetched == [(reproduce.prompt_sets()["ocr"], Path("data/ocr"))] * 2
    assert started[0][1:5] == ["--nproc-per-node", "8", "--scorer", "ocr --option formula=contained"]
    assert "--scorer" not in started[1]


def test_every_scorer_that_a_recipe_tells_to_serve_is_one_that_is_started():
    for trainer in reproduce.trainers():
        for text in load_recipes(f"train_{trainer}").values():
            if "# Scorer: omni-rl serve" in text:
                assert len(reproduce.SCORER.findall(text)) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("flowgrop/tiny-signs", "the trainer of TRAINER/PRESET must be one of .*did you mean 'flowgrpo'"),
        ("flowgrpo/tiny-sings", "the preset of TRAINER/PRESET must be one of .*did you mean 'tiny-signs'"),
        ("tiny-signs", "the trainer of TRAINER/PRESET must be one of"),
    ],
)
def test_a_recipe_that_is_none_is_named_in_one_line(name, said, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        reproduce.main([name])
    with pytest.raises(ValueError, match=said):
        reproduce.recipe_of(name)


def test_ctrl_c_is_left_to_the_trainer(monkeypatch):
    """It saves its step and ends; who waits for it does not kill it."""

    class Stopped:
        def __init__(self, command, env):
            self.returncode, self.waits, self.command, self.typed = None, 0, command, env["OMNI_RL_COMMAND"]

        def __enter__(self):
            return self

        def __exit__(self, *_):
            assert self.command[-2:] == ["sft", "--x"]
            assert self.typed == "again"

        def wait(self):
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            self.returncode = 130

    monkeypatch.setattr(subprocess, "Popen", Stopped)
    assert reproduce.train(["sft", "--x"], "again") == 130


CHILD = """
import pathlib, signal, sys, time
def stop(number, frame):
    time.sleep(0.1)
    pathlib.Path("saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
pathlib.Path("runs").touch()
time.sleep(30)
"""
PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
import reproduce
reproduce.COMMAND = ["child.py"]
sys.exit(reproduce.train([], ""))
"""


def test_sigterm_is_passed_on_to_the_program_that_a_command_waits_for(tmp_path):
    """As a container sends it, to its first process only."""
    (tmp_path / "child.py").write_text(CHILD)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(REPO / "scripts")], cwd=tmp_path)
    until = time.monotonic() + 30
    while not (tmp_path / "runs").exists() and time.monotonic() < until:
        time.sleep(0.02)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(10) == 143
    assert (tmp_path / "saved").exists()


# The page


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_of_the_docs_has_the_schema_and_a_recipe(name):
    Draft202012Validator(SCHEMA, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(RECORDS[name])
    assert reproduce.recipe_of(RECORDS[name]["recipe"])


def test_the_schema_is_one_and_refuses_what_is_no_record():
    Draft202012Validator.check_schema(SCHEMA)
    found = {error.message for error in Draft202012Validator(SCHEMA).iter_errors({"recipe": "x", "more": 1})}
    assert any("'hours' is a required property" in fault for fault in found)
    assert any("'more' was unexpected" in fault for fault in found)


def test_published_scores_are_of_recipes():
    published = tomllib.loads((REPO / "docs" / "records" / "published.toml").read_text("utf-8"))
    for recipe, told in published.items():
        assert reproduce.recipe_of(recipe)
        assert told.keys() - {"steps", "curve"} == {"scores", "source"}
        assert len(told.get("steps", [0, 1])) == len(told["scores"]) >= 2


def test_a_record_and_a_published_score_without_one_are_rows():
    record = {
        "recipe": "nft/tiny-signs", "curves": {"eval/reward": [[0, 0.5], [9, 0.75]]}, "hours": 0.5, "ranks": 2,
        "memory_mb": {"perf/peak_memory_mb": 1234.0}, "device_name": "", "device": "cpu", "commit": "ab" * 20,
        "started": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    table = records_page.table({"mine": record}, {"a/b": {"scores": [0.1, 0.2], "source": "there"}})
    assert "| `a/b` | 0.1 to 0.2: there | none yet |" in table
    row = "| `nft/tiny-signs` | nothing | [mine](records/mine.json) | 0.500 to 0.750 | 0.50 | 1,234 | 2 x cpu |"
    assert row in table
    assert "images/records/nft-tiny-signs.svg" in table
    assert [*records_page.pictures({"mine": record}, {})] == ["nft-tiny-signs.svg"]
