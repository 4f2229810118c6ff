"""The names of README's first screen are those of the tree, and its figures can be read."""

import re
import tomllib

import numpy as np
from helpers import REPO
from leaderboard_page import INK
from omni_reward.scorers import SCORERS
from omni_rl.report import write_eval
from omni_rl.settings.toml import recipes
from picture import GAP, LINE, before_and_after
from PIL import Image, ImageColor
from plan_recipes import read_line
from rl.report_runs import images, samples

TEXT = (REPO / "README.md").read_text("utf-8")


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


def test_a_figure_has_no_ground_so_that_a_dark_page_shows_through():
    white = re.compile(r"fill(: |=\")(#ffffff|white)")
    figures = [*(REPO / "docs" / "images").rglob("*.svg")]
    assert len(figures) > 15
    assert [path.name for path in figures if white.search(path.read_text("utf-8"))] == []
    for name in ("before_after", "edits", "videos"):
        image = Image.open(REPO / "docs" / "images" / f"{name}.png")
        assert image.mode == "RGBA"
        assert image.getpixel((0, image.height - 1))[3] == 0


def test_the_first_image_says_before_and_after_and_its_words_read_on_light_and_dark_pages(tmp_path):
    for step, read in ((0, "nothing"), (8, "SIGN")):
        write_eval(tmp_path, step, images(4), samples([0.1] * 4, read=read))
    image = before_and_after(tmp_path, count=4)
    size = images(1)[0].shape
    width, height = 2 * size[1] + GAP, 2 * size[0] + GAP
    left = image.width - (3 * width - GAP) - 2 * GAP
    for row in range(2):  # beside both images of the first cell
        assert np.asarray(image)[row * height : (row + 1) * height - GAP, : left - GAP, 3].max() == 255
    assert np.asarray(image)[2 * height : 2 * height + LINE, left:, 3].max() == 255  # below it
    ink = np.array(ImageColor.getrgb(INK)) / 255
    light = np.where(ink <= 0.04045, ink / 12.92, ((ink + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722]
    for ground in (1.0, 0.006):  # white, and GitHub's dark page
        assert (max(light, ground) + 0.05) / (min(light, ground) + 0.05) > 3.5  # contrast as WCAG has it
