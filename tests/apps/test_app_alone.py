"""Each app is one file: copied alone to an empty folder it answers, plans and trains with what is installed."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from apps import app_lives as lives
from helpers import CHECKPOINT, REPO, TEXT_TRAINERS, sampled
from omni_train.files import load_metrics
from PIL import Image

APPS = sorted(path.stem for path in (REPO / "apps").glob("*.py"))
PROMPTS = REPO / "data" / "tiny-signs" / "eval.txt"
SMALL = {
    "model": CHECKPOINT, "prompts": PROMPTS, "eval.prompts": "eval.txt", "prompts_per_step": 2, "group_size": 2,
    "batch_size": 2, "height": 32, "width": 96, "num_inference_steps": 3, "eval.num_inference_steps": 2,
    "train_steps": 2, "eval.every": 2,
}  # fmt: skip
BEEPS = {
    "model": REPO / "checkpoints" / "tiny-beeps-qwen3-omni",
    "prompts": REPO / "data" / "tiny-beeps" / "train.jsonl",
    "eval.prompts": REPO / "data" / "tiny-beeps" / "eval.jsonl",
    "prompts_per_step": 2,
    "group_size": 2,
    "batch_size": 2,
    "max_new_tokens": 2,
    "train_steps": 2,
    "eval.every": 2,
}
OWN = {
    "train_srpo": {"reward_model": REPO / "checkpoints" / "tiny-signs-reader"},
    "train_gspo": BEEPS,
    "train_sft_tokens": BEEPS | {"completion_key": "answer", "prompts_per_step": 4, "group_size": 1},
    "train_dpo_tokens": BEEPS,
    "train_distill_tokens": BEEPS | {"teacher": REPO / "checkpoints" / "tiny-beeps-qwen3-omni"},
    "train_unigrpo": {
        "model": REPO / "checkpoints" / "tiny-colors-bagel",
        "prompts": REPO / "data" / "tiny-colors" / "train.jsonl",
        "eval.prompts": REPO / "data" / "tiny-colors" / "eval.jsonl",
        "width": 32,
        "max_thought_tokens": 2,
    },
    "train_sft": {"prompts": "samples.jsonl"},
    "flowgrpo_by_hand": {
        "model": CHECKPOINT,
        "prompts": PROMPTS,
        "eval_prompts": "eval.txt",
        "prompts_per_step": 2,
        "group_size": 2,
        "batch_size": 1,
        "num_inference_steps": 4,
        "window_high": 3,
        "train_steps": 2,
        "name": "run",
    },
    "sample": {name: SMALL[name] for name in ("model", "prompts", "batch_size", "num_inference_steps")},
}


def forget_the_tree():
    """Leave what `python -I` would find of this process's path and modules: nothing of apps, scripts and tests."""
    inside = tuple(f"{REPO / name}{os.sep}" for name in ("apps", "scripts", "tests"))
    sys.path[:] = [path for path in sys.path if path and not f"{path}{os.sep}".startswith(inside)]
    for name, module in [*sys.modules.items()]:
        if name != "__main__" and (getattr(module, "__file__", "") or "").startswith(inside):
            del sys.modules[name]


@pytest.fixture
def alone(tmp_path):
    """`alone(app, flags)`: the output of the app's copy, in a fork that has nothing of this tree but its packages."""
    (tmp_path / "eval.txt").write_text('a blue sign that says "AB"\n')
    Image.new("RGB", (96, 32)).save(tmp_path / "sign.png")
    (tmp_path / "samples.jsonl").write_text('{"prompt": "a sign", "sample": "sign.png"}\n' * 2)

    def alone(app, *flags):
        shutil.copy(REPO / "apps" / f"{app}.py", tmp_path)

        def work():
            forget_the_tree()
            os.chdir(tmp_path)
            sys.argv = [f"{app}.py", *flags]
            runpy.run_path(sys.argv[0], run_name="__main__")

        life = lives.start(tmp_path, work, counts_flops=True, reports=True)
        assert life.wait(200) == [0], life.text()
        return life.text()

    return alone


def small(app, url):
    """Flags of a small run of the app."""
    is_whole = app in ("sample", "flowgrpo_by_hand", *TEXT_TRAINERS)
    settings = OWN[app] if is_whole else SMALL | OWN.get(app, {})
    if app not in ("sample", "train_srpo", *TEXT_TRAINERS):
        settings = settings | {"scorer-url" if app == "flowgrpo_by_hand" else "scorer.url": url}
    return [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]


@pytest.mark.parametrize("app", sampled(APPS, 1))
def test_an_app_answers_alone(tmp_path, app):
    """In a process of its own, in which neither its folder nor PYTHONPATH is searched."""
    shutil.copy(REPO / "apps" / f"{app}.py", tmp_path)
    command = [sys.executable, "-I", f"{app}.py", "--help"]
    assert "usage:" in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("app", sampled(APPS, 1))
def test_an_app_plans_trains_and_samples_alone(alone, tmp_path, bright_url, app):
    flags = small(app, bright_url)
    if app == "sample":
        alone(app, *flags, "--num-images", "2")
        assert (tmp_path / "sheet.png").stat().st_size > 1000
        return
    if app != "flowgrpo_by_hand":  # which plans nothing
        assert "plan: samples per step: 4," in alone(app, *flags, "--dry-run")
    assert not (tmp_path / "runs").exists()
    alone(app, *flags)
    assert [line["step"] for line in load_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")] == [0, 1, 2]


@pytest.fixture
def bare_env(tmp_path):
    """An environment in which our packages are folders on the path, and not installed."""
    (tmp_path / "site").mkdir()
    for entry in Path(purelib := sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("omni_") and entry.suffix != ".pth":
            (tmp_path / "site" / entry.name).symlink_to(Path(purelib) / entry.name)
    folders = [*REPO.glob("packages/*/src"), tmp_path / "site"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def test_packages_run_that_are_not_installed(bare_env, tmp_path, bright_url):
    (tmp_path / "eval.txt").write_text('a blue sign that says "AB"\n')
    python = [sys.executable, "-S"]  # without the folder of what is installed
    code = "from importlib.metadata import distributions as all; print([x.name for x in all() if 'omni' in x.name])"
    told = subprocess.run([*python, "-c", code], env=bare_env, capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
    flags = [*small("train_nft", bright_url), "--train-steps", "1", "--memory.text-cache", "texts"]
    command = [*python, REPO / "apps" / "train_nft.py", *flags]
    result = subprocess.run(command, cwd=tmp_path, env=bare_env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert list((tmp_path / "runs" / "run" / "checkpoints").glob("step-*/checkpoint.json"))
