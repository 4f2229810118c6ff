"""What docs/report.md tells its readers to run, runs."""

import re
import shlex
import subprocess
import sys

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
