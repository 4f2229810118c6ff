"""A section of docs/contributing.md that adds something, taken literally on a copy of the tree."""

import json
import os
import re
import shutil
import subprocess
import sys

from helpers import REPO

PAGE = (REPO / "docs" / "contributing.md").read_text("utf-8")
TINY = """
eval_prompts = "eval.txt"
width = 64
num_inference_steps = 4
eval_num_inference_steps = 2
prompts_per_step = 2
group_size = 4
batch_size = 4
train_steps = 2
eval_every = 2
"""


class Guide:
    """What a section says: changes as diffs, `changed` the files they change, and one new `file`, which holds `code`.

    commands: what it runs with Python, without that word. package: the one of packages/ that it adds to.
    """

    def __init__(self, title: str, package: str) -> None:
        self.package = package
        self.section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
        self.diffs = re.findall(r"^```diff\n(.*?)^```", self.section, re.DOTALL | re.MULTILINE)
        self.changed = [re.search(r"^\+\+\+ b/(.+)$", diff, re.MULTILINE)[1] for diff in self.diffs]
        ((self.file, self.code),) = re.findall(
            r"`(\S+\.py)`:\n\n```python\n(.*?)^```", self.section, re.DOTALL | re.MULTILINE
        )
        self.commands = re.findall(r"^`python (.*)`$", self.section, re.MULTILINE)

    def lines(self, sign):
        """The lines that the diffs add, or take away."""
        return [line for diff in self.diffs for line in diff.splitlines() if line[:1] == sign and line[:3] != sign * 3]

    def follow(self, folder, *copied):
        """Copies those files and folders of the tree, and makes the section's changes there."""
        for name in copied:
            source, place = REPO / name, folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(source, place)
        for name in ("data", "checkpoints"):
            (folder / name).symlink_to(REPO / name)
        (folder / self.file).parent.mkdir(parents=True, exist_ok=True)
        (folder / self.file).write_text(self.code, "utf-8")
        for path, diff in zip(self.changed, self.diffs, strict=True):
            result = subprocess.run(
                ["git", "apply", "--verbose", "-"],
                cwd=folder,
                input=diff,
                capture_output=True,
                text=True,
                env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)},
            )
            advice = (
                f"the block of docs/contributing.md for {path} does not apply: bring its lines up to those of {path}"
            )
            assert result.returncode == 0, f"{advice}\n{result.stderr}"

    def python(self, folder, *words):
        """Runs Python in the copy, whose package stands before the installed one; what it printed."""
        package = folder / "packages" / self.package / "src"
        env = os.environ | {"PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"}
        result = subprocess.run([sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr
        return result.stdout

    def train(self, folder, words, url):
        """Runs a command of the section, tiny and graded by the scorer at `url`; the log's lines of its two steps."""
        (folder / "tiny.toml").write_text(TINY)
        (folder / "eval.txt").write_text('a blue sign that says "AB"\n')
        self.python(folder, *words, "--config", "tiny.toml", "--scorer.url", url)
        log = folder / "runs" / words[words.index("--name") + 1] / "metrics.jsonl"
        steps = [line for line in map(json.loads, log.read_text("utf-8").splitlines()) if "policy/loss" in line]
        assert len(steps) == 2
        for line in steps:
            assert line["policy/first_ratio_max_dev"] == 0
            assert line["policy/skipped_updates"] == 0
            assert line["policy/grad_norm"] > 0
        return steps

    def leaves_the_tree_alone(self, word):
        """Whether neither the changed files of the repository name what was added, nor its file is there."""
        named = [path for path in self.changed if word in (REPO / path).read_text("utf-8").lower()]
        return named == [] and not (REPO / self.file).exists()
