"""The benchmarks of the training loop run, and what they count is there; seconds are not looked at."""

import pytest
from helpers import REPO


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Benchmarks as a user starts them, in a folder of their own."""
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    monkeypatch.chdir(tmp_path)


def table(text):
    """The rows of the table that was printed, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_fixed_cost_speaks_of_every_step(capfd):
    import fixed_cost

    fixed_cost.main(["--steps", "4", "--start", "2", "--side", "32", "--work-s", "0", "--eval-every", "3"])
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["3 to 6"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_checkpoint_tells_the_copy_from_the_save(capfd, monkeypatch):
    import checkpoint

    monkeypatch.setattr(checkpoint, "ROWS", 8)
    checkpoint.main(["--gb", "1e-6", "--saves", "1", "--folder", "."])
    rows = dict(table(capfd.readouterr().out))
    assert {"save that training waits for, s", "copy, s", "until complete, s"} < rows.keys()
    assert all(float(value) > 0 for value in rows.values())


def test_framework_tax_is_a_step_over_the_model_in_it(capfd, monkeypatch):
    import framework_tax

    sizes = ["--prompts-per-step", "1", "--group-size", "2", "--batch-size", "2", "--num-inference-steps", "5"]
    framework_tax.main([*sizes, "--steps", "1"])
    ((step, forward, backward, decode, tax, without),) = table(capfd.readouterr().out)
    assert float(step) > float(forward) + float(backward) > float(backward) > 0
    assert float(decode) > 0
    assert float(tax) > float(without) > 1


TINY = ["--random", "1", "--random-heads", "1", "--height", "32", "--width", "32", "--num-inference-steps", "6",
        "--prompts-per-step", "1", "--lora-rank", "2"]  # fmt: skip


def test_a_step_computes_what_its_samples_need_and_recomputed_blocks_more(capfd, monkeypatch):
    import redundancy

    names = list(redundancy.CASES)[:3]
    monkeypatch.setattr(redundancy, "CASES", {name: redundancy.CASES[name] for name in names})
    redundancy.main(TINY)
    ratios = {name: float(ratio) for name, *_, ratio in table(capfd.readouterr().out)}
    assert [ratios[name] for name in (names[0], names[2])] == [1, 1]
    assert 1.05 < ratios[names[1]] < 1.3


def test_the_plain_loop_takes_the_trainers_step(capfd):
    import versus_plain

    versus_plain.main([*TINY, "--rounds", "1", "--variant", "recomputed"])
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["trainer", *list(versus_plain.ARMS)[:2]]
    assert len({row[3] for row in rows}) == 1  # gradient norms, to six digits
    assert all(float(seconds) > 0 for _, seconds, *_ in rows)


def test_the_roofline_speaks_of_each_phase(capfd, monkeypatch):
    import roofline

    monkeypatch.setattr(roofline, "measure_ceilings", lambda device: roofline.ASSUMED["H100"])
    roofline.main([*TINY, "--variant", "recomputed"])
    rows = {row[0]: [float(cell.replace(",", "")) for cell in row[1:]] for row in table(capfd.readouterr().out)[-4:]}
    assert list(rows) == [*roofline.PHASES, "all"]
    assert all(number > 0 for row in rows.values() for number in row)
    assert rows["all"][:3] == pytest.approx(
        [sum(rows[name][i] for name in roofline.PHASES) for i in range(3)], rel=1e-3
    )
    H100, H200, here, limit, took, share = rows["update"][3:]
    assert here == H100 >= H200
    assert share == pytest.approx(limit / took, rel=1e-3)


def test_startup_names_every_kind_of_start(capfd, monkeypatch):
    import startup

    monkeypatch.setattr(startup, "CASES", {"help": ["--help"]})
    startup.main(["--rounds", "1"])
    ((case, seconds),) = table(capfd.readouterr().out)
    assert (case, float(seconds) > 0) == ("help", True)
