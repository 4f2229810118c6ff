"""The page on choosing says what the leaderboard, the recipes and the plan say."""

import re
import tomllib
from statistics import mean

from helpers import REPO
from leaderboard_page import ENTRIES, by_algorithm, read_rows
from scripts.test_algorithm_docs import tables

PAGE = (REPO / "docs" / "choosing.md").read_text("utf-8")
MEDIA = ("train_flowgrpo", "train_nft", "train_dpo", "train_srpo")
POLICY_GRADIENTS = {entry.name for entry in ENTRIES if entry.app == "train_flowgrpo"}


def test_scores_and_forwards_are_those_of_the_leaderboard():
    rows = {entry.name: rows for entry, rows in by_algorithm(read_rows(REPO / "docs" / "leaderboard.jsonl")).items()}
    score = {name: mean(row["evaluations"][-1]["score"] for row in rows[name]) for name in rows}
    forwards = {name: mean(row["forwards"] / row["images"] for row in rows[name]) for name in rows}
    gradients = [score[name] for name in POLICY_GRADIENTS]
    assert f"they reach {score['nft']:.3f} and {score['awm']:.3f}, policy gradients" in PAGE
    assert f"policy gradients {min(gradients):.3f} to {max(gradients):.3f}" in PAGE
    few = [forwards[name] for name in POLICY_GRADIENTS]
    assert f"at {forwards['nft']:.0f} forwards an image against {min(few):.0f} to {max(few):.0f}" in PAGE
    assert f"{forwards['awm']:.0f}" == f"{forwards['nft']:.0f}"
    table = (REPO / "docs" / "leaderboard.md").read_text("utf-8")
    minutes = [float(cell) for cell in re.findall(r"^\| \[.*\| ([\d.]+) \| *[\d.]* *\|$", table, re.MULTILINE)]
    assert len(minutes) == len(ENTRIES)
    assert f"took {min(minutes)} to {max(minutes)} minutes a run" in PAGE


def test_most_recipes_lie_within_the_bounds():
    recipes = [
        tomllib.loads(path.read_text("utf-8"))
        for app in MEDIA
        for path in (REPO / "recipes" / app).glob("*.toml")
        if not path.stem.startswith("tiny-")
    ]
    (bounds,) = [rows for names, rows in tables(PAGE) if names[0] == "setting"]
    for setting, low, high, _ in bounds:
        key = setting.split("`")[1]
        other = {"grpo-guard", "awm"} if key == "clip_range" else set()
        kin = [recipe for recipe in recipes if key in recipe and recipe.get("algo") not in other]
        values = [recipe[key] for recipe in kin if "LoRA" not in setting or recipe.get("lora_rank")]
        within = [value for value in values if float(low) <= value <= float(high)]
        assert len(values) >= 10, key
        assert len(within) >= 0.8 * len(values), (key, sorted(set(values)))


def test_names_of_settings_and_metrics_are_known():
    known = (REPO / "docs" / "metrics.md").read_text("utf-8") + (REPO / "docs" / "configuration.md").read_text("utf-8")
    names = re.findall(r"`((?:eval|reward|policy|perf)/\w+|[a-z_]+)`", PAGE)
    assert len(names) > 15
    assert [name for name in names if f"`{name}`" not in known] == []


def test_the_arithmetic_of_the_example_holds():
    plan = (REPO / "docs" / "performance.md").read_text("utf-8")
    rollout, update = (int(text.replace(",", "")) for text in re.findall(r"(\d\d,\d{3}) in the", PAGE))
    assert f"| {rollout:,}, {update:,} |" in plan
    steps = tomllib.loads((REPO / "recipes/train_flowgrpo/qwen-image-ocr-lora.toml").read_text("utf-8"))["train_steps"]
    seconds = (rollout + update) / 400
    assert f"a step would take {seconds:.0f} s" in PAGE.replace("\n", " ")
    assert f"{steps} steps {seconds * steps / 3600:.0f} hours" in PAGE.replace("\n", " ")
    (rows,) = [rows for names, rows in tables(PAGE) if names[0] == "predicted for"]
    for _, ranks, memory, seconds, hours in rows:
        of_plan = rf"\| {ranks} \|.* {re.escape(memory)} \| [\d.]+ \| ([\d,]+), ([\d,]+) \|"
        assert round(sum(int(n.replace(",", "")) for n in re.search(of_plan, plan).groups()) / 400) == int(seconds)
        assert round(int(seconds) * 300 / 3600) == int(hours)
