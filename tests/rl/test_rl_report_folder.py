"""What the trainer leaves in a run folder: exact, bounded, whole at any moment."""

import io
import json
import subprocess
from dataclasses import replace
from importlib.metadata import version

import numpy as np
import pytest
import torch
from omni_rl.report import Sample, write_eval, write_samples, write_versions
from omni_rl.report import folder as folder_module
from omni_rl.report.data import evaluations
from omni_rl.report.folder import command_line, step_folders
from omni_train.files import read_jsonl
from PIL import Image
from rl.report_runs import images, samples


def decoded(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def rows_of(folder, name="rows.json"):
    return json.loads((folder / name).read_text())


@pytest.mark.parametrize("convert", [np.asarray, torch.from_numpy])
def test_an_evaluation_keeps_its_first_images_with_what_is_known_of_them(tmp_path, convert, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_IMAGES", 3)
    pictures = images(5)
    write_eval(tmp_path, 80, convert(pictures), samples([0.0, 0.25, None, 0.75, 1.0]))
    folder = tmp_path / "eval" / "000080"
    rows = rows_of(folder)
    assert [row["reward"] for row in rows] == [0.0, 0.25, None]
    assert [row["size"] for row in rows] == [[96, 32]] * 3
    assert rows[1]["details"] == {"target": "SIGN", "read": "SIGN"}
    assert sorted(path.name for path in folder.iterdir()) == [*(row["file"] for row in rows), "rows.json"]
    for row, picture in zip(rows, pictures, strict=False):
        np.testing.assert_array_equal(decoded((folder / row["file"]).read_bytes()), picture)


def test_of_many_evaluations_the_first_and_the_last_stay_and_others_evenly_between(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_EVALS", 6)
    for step in range(0, 110, 10):
        write_eval(tmp_path, step, images(1), samples([0.5]))
    kept = [step for step, _ in step_folders(tmp_path / "eval")]
    assert len(kept) == 6
    assert sorted(int(path.stem) for path in (tmp_path / "eval").glob("*.png")) == kept
    assert kept[0] == 0
    assert kept[-1] == 100
    assert max(np.diff(kept)) <= 40


def test_best_and_worst_of_the_first_groups_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "MAX_GROUPS", 3)
    rewards = [0.1, 0.9, None, 0.4] + [None] * 4 + [0.3] * 4 + [0.0, 1.0, 0.5, 0.5]
    pictures = images(16)
    write_samples(tmp_path, 7, pictures, samples(rewards, group_size=4))
    folder = tmp_path / "samples" / "000007"
    groups = rows_of(folder, "groups.json")
    assert [[row["reward"] for row in group["shown"]] for group in groups] == [[0.9, 0.1], [None], [0.3]]
    assert [group["rewards"] for group in groups] == [rewards[:4], rewards[4:8], rewards[8:12]]
    best = groups[0]["shown"][0]
    np.testing.assert_array_equal(decoded((folder / best["file"]).read_bytes()), pictures[1])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((2, 4, 4, 3), dtype=np.float32), "image must be a uint8 array, got float32"),
        (np.zeros((2, 3, 4, 4), dtype=np.uint8), r"image must have the shape .*'H', 'W', 3\), got \(1, 3, 4, 4\)"),
        (np.zeros((3, 4, 4, 3), dtype=np.uint8), "media must have 2 samples, got 3"),
        (np.zeros((2, 4, 3), dtype=np.uint8), "image must have the shape"),
        ([{"video": np.zeros((2, 4, 4, 3), dtype=np.uint8)}] * 2, r"'fps'\] must be a finite number > 0 for video"),
        ([{"speech": np.zeros((2, 1), dtype=np.float32)}] * 2, "media must be of the kinds"),
    ],
)
def test_other_images_are_refused(tmp_path, bad, message):
    for write in (write_eval, write_samples):
        with pytest.raises(ValueError, match=message):
            write(tmp_path, 1, bad, samples([0.0, 1.0]))
    assert list(tmp_path.iterdir()) == []


def test_starts_are_lines_and_a_torn_one_is_dropped(tmp_path):
    path = tmp_path / "versions.jsonl"
    write_versions(tmp_path, argv=["first.py"])
    with path.open("a") as file:
        file.write('{"started": "to')
    assert [entry["command"] for entry in read_jsonl(path)] == ["python first.py"]
    write_versions(tmp_path, argv=["second.py"])
    assert [entry["command"] for entry in read_jsonl(path)] == ["python first.py", "python second.py"]


def test_the_command_can_be_pasted_and_hides_what_it_should():
    argv = ["apps/train.py", "--prompt", 'a cat\'s "sign"', "--scorer-url", "http://me:pw@host", "--token=abc", "--x=1"]
    line = command_line(argv, hide=["--scorer-url", "--token"])
    assert line == """apps/train.py --prompt 'a cat'"'"'s "sign"' --scorer-url ... --token=... --x=1"""
    for words in (["--scorer_url", "http://host"], ["--scorer_url=http://host"]):
        assert "host" not in command_line(["train.py", *words], hide=["--scorer-url"])


def test_no_file_holds_the_credentials_of_a_url(tmp_path):
    told = "no answer from http://me:p@ss@host:80/score"
    write_eval(tmp_path, 1, images(1), [Sample("a cat", None, details={"via": told}, abstained=told)])
    write_samples(tmp_path, 1, images(1), [Sample("a cat", None, abstained=told)])
    write_versions(tmp_path, argv=["train.py", "--other-url", "https://me:p@ss@host"])
    texts = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert len(texts) == 3
    for text in texts:
        assert "host" in text
        assert "ss@" not in text


def test_what_a_scorer_nests_deeply_becomes_a_short_text(tmp_path):
    deep: object = "end"
    for _ in range(5000):
        deep = [deep]
    write_eval(tmp_path, 0, images(1), [Sample("a cat", 0.5, details={"deep": deep, "n": 1, "ok": True})])
    (row,) = rows_of(tmp_path / "eval" / "000000")
    assert len(row["details"].pop("deep")) < 50
    assert row["details"] == {"n": 1, "ok": True}


def test_versions_name_the_commit_and_whether_files_differ_from_it(tmp_path):
    program = tmp_path / "repo" / "train.py"
    program.parent.mkdir()
    program.write_text("1")

    def git(*words: str) -> str:
        command = ["git", "-C", program.parent, "-c", "user.name=n", "-c", "user.email=e", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first", "--no-gpg-sign", "--no-verify")
    write_versions(tmp_path, argv=[str(program)], facts={"ranks": 2})
    program.write_text("2")
    write_versions(tmp_path, argv=[str(program)])
    outside = tmp_path / "other.py"
    write_versions(tmp_path, argv=[str(outside)])
    clean, changed, none = read_jsonl(tmp_path / "versions.jsonl")
    assert clean["commit"] == git("rev-parse", "HEAD")
    assert changed["commit"] == clean["commit"] + "+"
    assert none["commit"] == ""
    assert clean["ranks"] == 2
    assert clean["packages"]["torch"] == version("torch")
    assert clean["command"].startswith("python ")


def test_references_stay_beside_their_samples_and_a_shared_one_is_one_file(tmp_path):
    small, wide = images(1, 8, 12)[0], torch.from_numpy(images(1, 400, 800)[0])
    rows = [Sample("edit", reward, 0, i, references=(small, wide)) for i, reward in enumerate((0.1, 0.9))]
    write_eval(tmp_path, 1, images(2), rows)
    write_samples(tmp_path, 1, images(2), rows)
    for folder, found in (
        (tmp_path / "eval" / "000001", rows_of(tmp_path / "eval" / "000001")),
        (tmp_path / "samples" / "000001", rows_of(tmp_path / "samples" / "000001", "groups.json")[0]["shown"]),
    ):
        assert [[each["size"] for each in row["references"]] for row in found] == [[[12, 8], [800, 400]]] * 2
        names = {each["file"] for row in found for each in row["references"]}
        assert sorted(path.name for path in folder.glob("reference-*")) == sorted(names)
        assert len(names) == 2
        exact, reduced = (folder / each["file"] for each in found[0]["references"])
        np.testing.assert_array_equal(decoded(exact.read_bytes()), small)
        assert decoded(reduced.read_bytes()).shape == (160, 320, 3)


def test_an_answer_in_text_needs_no_picture(tmp_path):
    rows = [
        Sample("how many?", 1.0, seed=0, answer="a\n<b>\x00" + "x" * 5000),
        Sample("and now?", None, seed=1, answer=""),
    ]
    write_eval(tmp_path, 0, [{}, {}], [replace(row, abstained=None if row.reward else "why") for row in rows])
    write_samples(tmp_path, 1, [{}, {}], rows)
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["groups.json", "rows.json"]
    told = evaluations(tmp_path, 0, 10**6)["evals"][0]["pictures"]
    assert [picture["src"] for picture in told] == [None, None]
    assert told[0]["answer"].startswith("a\n<b> xxx")
    assert len(told[0]["answer"]) == 2000
    assert told[1]["answer"] == ""
