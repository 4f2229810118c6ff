"""The benchmarks of the training loop run, and what they count is there; seconds are not looked at."""

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers import REPO, sampled
from torch.utils.flop_counter import FlopCounterMode


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


def test_progress_takes_a_thousandth_of_a_step_at_most(capfd):
    import progress_cost

    progress_cost.main(["--prompts", "2"])
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows if float(row[1]) > 0] == [row[0] for row in rows]
    assert sum(float(row[3].removesuffix(" %")) for row in rows) < 0.1


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


PEER = """
import time

import flow_grpo.rewards
import wandb
from absl import app, flags
from ml_collections import config_flags

config_flags.DEFINE_config_file("config")

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def main(argv):
    config = flags.FLAGS.config
    found, _ = flow_grpo.rewards.multi_score("cpu", config.reward_fn)(["image"] * 3, [], [], only_strict=True)
    assert len(found["avg"]) == 3 and config.sample.num_steps == 3 and config.given
    while True:
        burn(0.01)
        wandb.log({"reward_avg": 0.0}, step=0)
        wandb.log({"actual_batch_size": 2}, step=0)
        for _ in range(config.sample.num_batches_per_epoch):
            burn(0.02)
            wandb.log({"inner_epoch": 0}, step=0)

if __name__ == "__main__":
    app.run(main)
"""
DEFAULTS = """
import ml_collections

def get_config():
    sections = {name: ml_collections.ConfigDict() for name in ("sample", "train", "pretrained", "reward_fn")}
    return ml_collections.ConfigDict(given=True, **sections)
"""


def test_a_peers_program_runs_beside_the_trainer(capfd, tmp_path):
    import versus_peer

    for name, text in zip(versus_peer.PEER_FILES, (PEER, DEFAULTS, ""), strict=True):
        (tmp_path / "peer" / name).parent.mkdir(parents=True)
        (tmp_path / "peer" / name).write_text(text)
    sizes = ["--height", "16", "--width", "16", "--num-inference-steps", "3", "--blocks", "2", "--heads", "1"]
    versus_peer.main(["--peer", "peer", "--rounds", "1", "--steps", "1", "--batch-size", "2", *sizes])
    rows = {name: cells for name, *cells in table(capfd.readouterr().out)}
    peer, own = ([float(rows[name][side].split()[0]) for name in ("rollout", "update", "step")] for side in (0, 1))
    assert peer[0] >= 0.01
    assert peer[1] >= 0.04
    assert min(own) > 0
    for seconds in (peer, own):
        assert seconds[2] == pytest.approx(seconds[0] + seconds[1], abs=0.02)


def test_a_folder_without_the_peers_files_is_refused(capfd):
    import versus_peer

    for given in ([], ["--peer", "nowhere"]):
        with pytest.raises(SystemExit) as stopped:
            versus_peer.main(given)
        assert stopped.value.code == 2
        assert "--peer must be a folder with flow_grpo's files" in capfd.readouterr().err


@pytest.mark.parametrize("kind", sampled(["all weights", "LoRA"], 1))
def test_what_two_ranks_exchange_predicts_four(kind):
    """Of a step of other batches and optimizer steps too."""
    import scaling

    given = scaling.cases(lora=kind == "LoRA")
    known = scaling.rates(given, scaling.count(given, 2))
    case = scaling.Case(batches=4, updates=2, lora=kind == "LoRA")
    (found,) = scaling.count([case], 4)
    assert found == scaling.predicted(known, case, 4)
    assert found["messages"] > 0
    assert found["reductions" if kind == "LoRA" else "gathers"] > 0


def test_a_simulated_step_is_its_operations_and_what_they_wait_for():
    """64 samples of 1 s on as many GPUs: without a scorer, with one of 50 ms a sample, and with a step ahead."""
    import scaling

    zero = {
        "kernels": 0,
        "decode": 0.0,
        "tiled": 0.0,
        "evaluation": 0.0,
        "eval_every": 1,
        "weights": 2.0,
        "trained": 1.0,
    }
    shape = {"batch": 1, "denoising": 10, "passes": 2, "updates": 1, "rollout": 0.6e12, "update": 0.4e12}
    job = scaling.Job("job", samples=64, forward=1.0, score_s=0.0, **zero, **shape)
    speed = scaling.Args(tflops=1.0, hop_us=0.0)
    counts = {"messages": scaling.Rates(7, 0, 0), "reductions, whole": scaling.Rates(0, 0, 1)}

    def share(how, **changes):
        return scaling.efficiency(scaling.replace(job, **changes), how, 64, speed, counts)

    assert share(scaling.How(""))[0] == pytest.approx(1)
    assert share(scaling.How(""), score_s=0.05) == (pytest.approx(1 / 4.2), "scorer 3.20 s of 4.20")
    assert share(scaling.How("", ahead=True), score_s=0.05)[0] == pytest.approx(1 / 3.2)
    assert share(scaling.How("", server_gpus=8), score_s=0.05)[0] == pytest.approx(1 / 1.4)
    assert share(scaling.How(""), samples=32) == (0, "fewer samples than ranks")
    assert share(scaling.How("", context=True), samples=32)[0] == pytest.approx(1 / 1.08)
    decoded = {"samples": 32, "decode": 200e12, "tiled": 240e12}  # 2 s whole, 1 s of two GPUs
    assert share(scaling.How("", context=True), **decoded) == (pytest.approx(1.5 / 2.54), "decoding 1.00 s of 2.54")
    assert share(scaling.How("", context=True, tiles=True), **decoded)[0] == pytest.approx(1.5 / 1.74)
    even = scaling.replace(job, rollout=0.5e12, update=0.5e12, trained=0.0)
    assert scaling.apart(even, 64, speed) == (32, pytest.approx(1))  # a step of 1 s either way
    assert scaling.apart(even, 64, speed, more=128, share=0.5) == (128, pytest.approx(2))
    assert scaling.apart(even, 64, speed, more=32, share=0.5) == (32, pytest.approx(0.5))
    sent = scaling.replace(even, trained=10e9)  # 40 GB at 40 GB/s
    assert scaling.apart(sent, 64, speed, more=128, share=0.5) == (128, pytest.approx(2 / 3))


@pytest.mark.parametrize(
    ("own", "shape", "tile", "job"),
    [
        ({}, (16, 21, 60, 104), (34, 56), 4),
        (
            {
                "base_dim": 160,
                "decoder_base_dim": 256,
                "z_dim": 48,
                "is_residual": True,
                "in_channels": 12,
                "out_channels": 12,
                "patch_size": 2,
                "temperal_downsample": [False, True, True],
                "scale_factor_spatial": 16,
                "latents_mean": [0.0] * 48,
                "latents_std": [1.0] * 48,
            },
            (48, 31, 44, 80),
            (24, 42),
            5,
        ),
    ],
    ids=["Wan2.1", "Wan2.2"],
)
def test_a_video_s_decoding_is_what_torch_counts_in_its_vae(own, shape, tile, job):
    """Frames after the second cost the same each. tile: one of four, in latents."""
    import scaling

    with torch.device("meta"):
        vae = AutoencoderKLWan(**own)

        def count(frames, height, width):
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                vae.decode(torch.empty(1, shape[0], frames, height, width))
            return counter.get_total_flops()

        def whole(height, width):
            two, three = count(2, height, width), count(3, height, width)
            return two + (shape[1] - 2) * (three - two)

        found = whole(*shape[2:]), 4 * whole(*tile)
    assert found == pytest.approx((scaling.JOBS[job].decode, scaling.JOBS[job].tiled), rel=2e-3)


def test_each_rank_waits_for_the_scores_of_its_own_images(capfd):
    import rewards

    sizes = ["--ranks", "4", "--servers", "2", "--images", "8", "--side", "16"]
    rewards.main(["waits", *sizes, "--image-ms", "1", "--rollout-s", "0.01", "--batches", "1,2"])
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["1", "2"]
    with pytest.raises(SystemExit):
        rewards.main(["waits", *sizes, "--batches", "3"])
    assert "--batches must divide the 2 images of a rank, got 3" in capfd.readouterr().err
