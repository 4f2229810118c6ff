"""The numbers and names of README's first screen are those of the tree."""

import re
import tomllib

from helpers import REPO
from omni_reward.scorers import SCORERS
from omni_rl.settings.toml import recipes
from plan_recipes import read_line

TEXT = (REPO / "README.md").read_text("utf-8")
NUMBERS = {"six": 6, "eight": 8, "twelve": 12}


def number(before: str, after: str) -> int:
    """The number that a word of the text means."""
    (word,) = re.findall(rf"{before}(\w+){after}", TEXT)
    return NUMBERS[word.lower()]


def test_it_counts_trainers_packages_and_the_files_of_a_step():
    assert number("", " trainers, each of which") == len([*(REPO / "apps").glob("train_*.py")])
    assert number("The ", " packages are useful") == len([*REPO.glob("packages/*")])
    assert number("a training step in ", " files") == len(re.findall(r"^\d+\. \[", TEXT, re.MULTILINE))


def test_its_rewards_are_scorers_and_its_algorithms_have_pages():
    (rewards,) = re.findall(r"\*\*Rewards\*\* \| ([^(]*) \(", TEXT)
    rewards = rewards.replace("a vision-language model", "vlm").replace("HPSv2.1", "HPSv2")
    named = {reward.strip().lower() for reward in rewards.split(",")}
    assert named <= set(SCORERS)
    (algorithms,) = re.findall(r"\*\*Algorithms\*\* \| ([^(]*) \(", TEXT)
    page = (REPO / "docs" / "algorithms.md").read_text("utf-8").lower().replace("-", "")
    assert [name for name in algorithms.split(", ") if name.lower().replace("-", "") not in page] == []


def test_the_recipes_that_it_names_are_planned_for_a_card_of_each_size_and_the_first_has_its_prompts():
    section = TEXT.partition("## Use it on a real model")[2]
    names = re.findall(r"[\w.-]+-1x\d+gb-\w+", section)
    texts = [recipes("train_flowgrpo")[name] for name in names]
    assert [read_line(text)[:2] for text in texts] == [(1, gb) for gb in (16, 24, 32, 48, 80)]
    (commands,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[:1]
    (prompts,) = re.findall(r"^# Prompts: (.*)$", texts[0], re.MULTILINE)
    assert commands == f"{prompts}\nomni-rl train flowgrpo --preset {names[0]}\n"


def test_the_package_s_page_installs_the_scorer_that_its_first_command_starts():
    text = (REPO / "packages" / "omni-rl" / "README.md").read_text("utf-8")
    lines = r"^    pip install .*omni-rl\[scorer\].*\n    omni-rl train flowgrpo --preset (\S+)$"
    (preset,) = re.findall(lines, text, re.MULTILINE)
    assert "ocr" in tomllib.loads(recipes("train_flowgrpo")[preset])["scorer"]["name"]
    extras = tomllib.loads((REPO / "packages" / "omni-rl" / "pyproject.toml").read_text("utf-8"))["project"]
    assert "[ocr]" in extras["optional-dependencies"]["scorer"][0]
