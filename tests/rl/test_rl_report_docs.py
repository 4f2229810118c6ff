"""What docs/report.md tells its readers to run, runs."""

import re
import shlex
import subprocess
import sys
import tomllib

from helpers import REPO

DOCS = (REPO / "docs" / "report.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS, flags=re.DOTALL)


def test_the_example_and_the_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks("python")
    exec(compile(code, "report.md", "exec"), {})
    for name in ("a", "b"):
        found = {path.name for path in (tmp_path / "runs" / name).iterdir()}
        assert found == {"metrics.jsonl", "versions.jsonl", "eval", "samples", "report.html"}
    commands, live = blocks("sh")
    assert live == "omni-rl report --serve runs/\n"  # tests/rl/test_rl_report_serve.py runs it
    printed = []
    for line in commands.splitlines():
        python, *words = shlex.split(line)
        assert python == "python"
        printed += subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout.split()
    assert printed == ["runs/a/report.html", "runs/comparison.html"]


def test_the_extras_and_numbers_are_those_of_the_code():
    from omni_rl.report import data, media

    project = tomllib.loads((REPO / "packages" / "omni-rl" / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"`omni-rl\[(\w+)\]`", DOCS)) == set(project["optional-dependencies"]) - {"scorer", "parquet"}
    assert f"at most {data.EVAL_BYTES // 10**6} MB" in DOCS
    assert f"{data.SAMPLE_BYTES / 10**6} MB of samples" in DOCS
    assert f"up to {media.EXACT_SIDE} pixels" in DOCS
    assert f"to {media.MAX_SIDE}." in DOCS
    assert f"at most {media.MAX_FRAMES}\nframes" in DOCS
    assert f"first {media.MAX_SOUND_S} s" in DOCS
    assert f"less than {2 * media.SOUND_RATE // 1000} kHz" in DOCS
