"""`make gpu-check` on little, on an accelerator; and how it goes on, ends what hangs, and says that there is none."""

import time
from contextlib import suppress

import gpu_check
import pytest
from emulated import emulated_runs as runs
from emulated.npu import build
from helpers import sampled

EXACT = {"gate", "bits", "variants", "versus", "sleep", "learn"}  # the others tell speed alone, which a CPU cannot


@pytest.mark.timeout(600)
@pytest.mark.parametrize("parts", sampled(["ceilings,gate,learn", "bits", "variants", "versus,sleep", "benchmarks"], 1))
def test_it_passes_on_the_emulated_accelerator(tmp_path, alone, parts):
    build()
    parts = parts.split(",")
    assert alone(runs.check, tmp_path, parts) == 0
    for name in parts:
        done = gpu_check.read(name, tmp_path)
        assert (done.device.split()[0], done.size, done.error) == ("npu", "small", "")
        assert done.rows
        verdicts = {row.verdict for row in done.rows}
        assert gpu_check.FAILS not in verdicts
        assert name not in EXACT or "holds" in verdicts
        assert f"| {name}, " in (tmp_path / "page.md").read_text()
        held = {row.what for row in done.rows if row.verdict == "holds"}
        assert name != "variants" or {"offloaded: peak, GB", "gathered: peak, GB"} <= held  # as they were planned


def test_all_parts_together_take_at_most_25_minutes():
    assert sum(limit for _, limit in gpu_check.PARTS.values()) <= 25 * 60


def one(size):
    yield gpu_check.Row("a number", "1", "1", "holds")


def bad(size):
    yield gpu_check.exact("a difference", 0.5, 0.0)


def broken(size):
    yield from one(size)
    raise RuntimeError("no")


@pytest.fixture
def parts(monkeypatch):
    """Three parts that take no time: one that holds, one that fails, one that breaks."""
    monkeypatch.setattr(gpu_check, "PARTS", {"one": (one, 1), "bad": (bad, 1), "broken": (broken, 1)})


def test_a_second_call_runs_what_did_not_hold(tmp_path, parts, capfd):
    ran = []

    def launch(name, size, folder):
        ran.append(name)
        with suppress(RuntimeError):
            gpu_check.run_part(name, size, folder)

    flags = ["--small", "--folder", str(tmp_path)]
    assert [gpu_check.main(flags, launch), gpu_check.main(flags, launch)] == [1, 1]
    assert ran == ["one", "bad", "broken", "bad", "broken"]
    rows = [line for line in (tmp_path / "page.md").read_text().splitlines() if line.startswith("| 2")]
    assert [row.split(" | ")[-1] for row in rows] == ["holds |", "FAILS |", "holds |", "FAILS |"]
    assert gpu_check.main([*flags, "--only", "one"], launch) == 0


def test_a_part_ends_at_its_limit_and_its_rows_stay(tmp_path, parts, monkeypatch):
    before = gpu_check.Done(*gpu_check.where(gpu_check.SMALL), 1.0, list(one(None)), "broke off")
    gpu_check.write("one", before, tmp_path)
    (tmp_path / "hangs.py").write_text("import time; time.sleep(60)")
    monkeypatch.setattr(gpu_check, "__file__", str(tmp_path / "hangs.py"))
    start = time.monotonic()
    gpu_check.start("one", gpu_check.SMALL, tmp_path)
    assert time.monotonic() - start < 30
    done = gpu_check.read("one", tmp_path)
    assert (done.error, [row.found for row in done.rows]) == ("took more than 1 s", ["1"])


def test_a_machine_without_an_accelerator_is_told_so_in_a_line(tmp_path, capsys):
    assert gpu_check.main(["--folder", str(tmp_path)], launch=gpu_check.run_part) == 1
    assert capsys.readouterr().out.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def found_on(card, torch="2.13.0", date="2030-01-02"):
    """The parts of a visit in full size that found a number."""
    return {"gate": gpu_check.Done(date, "abc", f"{card}, torch {torch}", "full", 1.0, list(one(None)))}


def test_the_page_says_whether_it_has_something_of_an_accelerator():
    text = gpu_check.DOCS.read_text()
    assert gpu_check.published(text, {}) == text
    assert (gpu_check.NOTHING in text) != (gpu_check.ALONE in text)


@pytest.mark.parametrize(("device", "is_there"), [("Card X", True), ("npu x86_64", False), ("cpu aarch64", False)])
def test_only_a_card_is_on_the_page_even_where_one_part_alone_ran(tmp_path, parts, device, is_there):
    (docs := tmp_path / "page.md").write_text(f"{gpu_check.FIRST}{gpu_check.LAST}")
    gpu_check.write("one", found_on(device)["gate"], tmp_path)
    gpu_check.main(["--publish", "--folder", str(tmp_path), "--docs", str(docs)])
    assert (f"### {device}" in docs.read_text()) == is_there


def test_what_is_found_in_small_is_not_published(tmp_path, parts):
    docs = gpu_check.DOCS.read_bytes()
    gpu_check.main(["--small", "--folder", str(tmp_path), "--only", "one"], gpu_check.run_part)
    gpu_check.main(["--publish", "--folder", str(tmp_path)], gpu_check.run_part)
    assert gpu_check.DOCS.read_bytes() == docs
