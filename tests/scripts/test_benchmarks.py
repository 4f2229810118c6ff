"""The benchmarks of the training loop run, and what they count is there; seconds are not looked at."""

import pytest
import torch
from diffusers import AutoencoderKLWan
from helpers import REPO, capture_graphs, in_turn, sampled
from torch.utils.flop_counter import FlopCounterMode


@pytest.fixture(autouse=True)
def place(monkeypatch, tmp_path):
    """Benchmarks as a user starts them, in a folder of their own."""
    monkeypatch.syspath_prepend(REPO / "benchmarks")
    monkeypatch.chdir(tmp_path)


def table(text):
    """The rows of the table that was printed, as cells."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"][2:]


def test_the_work_beside_the_model_is_told_of_every_step(capfd):
    import step_cost

    step_cost.beside(step_cost.Beside(steps=4, start=2, side=32, work_s=0.0, eval_every=3))
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["3 to 6"]
    assert all(float(cell) > 0 for row in rows for cell in row[1:])


def test_checkpoint_tells_the_copy_from_the_save(capfd, monkeypatch):
    import step_cost

    monkeypatch.setattr(step_cost, "ROWS", 8)
    step_cost.checkpoint(step_cost.Saves(gb=1e-6, saves=1, folder="."))
    rows = dict(table(capfd.readouterr().out))
    assert {"save that training waits for, s", "copy, s", "until complete, s"} < rows.keys()
    assert all(float(value) > 0 for value in rows.values())


def test_the_frameworks_cost_is_a_step_over_the_model_in_it(capfd, monkeypatch):
    import runner
    import step_cost

    sizes = ["--prompts-per-step", "1", "--group-size", "2", "--batch-size", "2", "--num-inference-steps", "5"]
    subjects = step_cost.framework, step_cost.noise
    runner.run("", *subjects, argv=["framework", *sizes, "--steps", "1"])
    ((step, forward, backward, decode, tax, without),) = table(capfd.readouterr().out)
    assert float(step) > float(forward) + float(backward) > float(backward) > 0
    assert float(decode) > 0
    assert float(tax) > float(without) > 1


@in_turn(4, 8)
def test_a_step_of_the_demonstration_is_shared_out_among_its_parts():
    import demonstration

    moments = demonstration.moments_of(2, prompts_per_step=1, group_size=4, batch_size=4)
    assert {"the net's forwards", "the net's backwards", "decoding", "ours"} <= moments.parts.keys()
    assert max(moments.parts, key=moments.parts.get) == "the net's forwards"
    assert sum(moments.functions.values()) == pytest.approx(moments.parts["ours"])


@pytest.mark.slow  # four graphs, whose compiler's part tests/train/test_train_compiled.py has
def test_a_rollout_by_the_graphs_that_are_trained_is_compared_with_one_without_gradients(capfd, monkeypatch):
    """As captured, without code of the compiler."""
    import step_cost

    graphs, _ = capture_graphs(monkeypatch)
    step_cost.sampling(step_cost.Sampling(**{k: v for k, v in TINY.items() if k != "prompts_per_step"}, rounds=1))
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["graphs that are trained", step_cost.WITHOUT, "not compiled"]
    assert [float(row[2]) for row in rows][1] == float(rows[1][4]) == 1
    assert float(rows[0][4]) > 1  # what a block saves
    assert len(graphs) > 1


TINY = {"random": 1, "random_heads": 1, "height": 32, "width": 32, "num_inference_steps": 6, "prompts_per_step": 1,
        "lora_rank": 2}  # fmt: skip


def test_padded_batches_are_refused_where_a_compiler_would_count(capfd):
    import runner
    import step_cost

    for words, fault in (
        (["--compile", "--batch-size", "3"], "--batch-size must divide --group-size with --compile"),
        (["--steps", "0"], "--steps must be >= 1, got 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            runner.run("", step_cost.framework, argv=words)
        assert stopped.value.code == 2
        assert fault in capfd.readouterr().err


def test_calls_take_turns_and_a_ratio_has_the_range_of_its_rounds():
    import runner

    called, clock = [], iter(range(100))
    calls = {name: lambda name=name: called.append(name) for name in ("one", "two")}
    assert runner.take_turns(calls, 2, lambda: next(clock)) == {"one": [1, 1], "two": [1, 1]}
    assert called == ["one", "two"] * 3
    assert runner.ratio([2, 6, 3], over=[1, 2, 2]) == "2.000 (1.500 to 3.000)"
    assert runner.ratio([1], over=[4]) == "0.250"


def test_noise_is_drawn_in_turn_with_torchs(capfd):
    import step_cost

    step_cost.noise(step_cost.Noise(rounds=1))
    ((ours, plain, ratio),) = table(capfd.readouterr().out)
    assert float(ratio) == pytest.approx(float(ours) / float(plain), rel=0.05)


@in_turn(5, 8)
def test_a_step_computes_what_its_samples_need_and_recomputed_blocks_more(capfd, monkeypatch):
    import step_cost
    import trainer

    names = list(step_cost.CASES)[:3]
    monkeypatch.setattr(step_cost, "CASES", {name: step_cost.CASES[name] for name in names})
    step_cost.redundancy(trainer.Args(**TINY))
    ratios = {name: float(ratio) for name, *_, ratio in table(capfd.readouterr().out)}
    assert [ratios[name] for name in (names[0], names[2])] == [1, 1]
    assert 1.05 < ratios[names[1]] < 1.3


def test_the_plain_loop_takes_the_trainers_step(capfd):
    import versus_plain

    versus_plain.versus_plain(versus_plain.Args(**TINY, rounds=1, variant="recomputed"))
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["trainer", *list(versus_plain.ARMS)[:2]]
    assert len({row[3] for row in rows}) == 1  # gradient norms, to six digits
    assert all(float(seconds) > 0 for _, seconds, *_ in rows)


@in_turn(6, 8)
def test_the_roofline_speaks_of_each_phase(capfd, monkeypatch):
    import roofline

    monkeypatch.setattr(roofline, "measure_ceilings", lambda device: roofline.ASSUMED["H100"])
    roofline.roofline(roofline.Args(**TINY, variant="recomputed"))
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


NFT_PEER = """
import os
import time

import flow_grpo.rewards
import torch
import torch.distributed as dist
import wandb
from absl import app, flags

def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def main(argv):
    config, local_rank, lock_rank = flags.FLAGS.config, int(os.environ["LOCAL_RANK"]), 0
    dist.init_process_group("nccl", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    torch.cuda.set_device(lock_rank)
    torch.zeros(1, device=torch.device(f"cuda:{local_rank}"))
    dict(device_ids=[local_rank], output_device=local_rank, find_unused_parameters=False)
    assert config.to_dict()["debug"] and config.sample.solver == "dpm2" and config.given
    while True:
        burn(0.01)
        wandb.log({"reward_avg": 0.0}, step=0)
        wandb.log({"group_size": 2}, step=0)
        for _ in range(config.sample.num_batches_per_epoch):
            burn(0.02)
            wandb.log({"inner_epoch": 0})

if __name__ == "__main__":
    app.run(main)
"""
PROGRAMS = {"flow_grpo": PEER, "DiffusionNFT": NFT_PEER}


@in_turn(2, 8)
@pytest.mark.parametrize(
    ("name", "one_by_one"),
    [("flow_grpo", False), ("DiffusionNFT", False), pytest.param("flow_grpo", True, marks=pytest.mark.slow)],
)
def test_a_peers_program_runs_beside_the_trainer(capfd, tmp_path, monkeypatch, name, one_by_one):
    """One by one without what compiles, for which a small net is too small to take a minute."""
    import versus_peer

    monkeypatch.setattr(versus_peer, "ours_compiled", versus_peer.ours)
    (peer,) = (peer for peer in versus_peer.PEERS if peer.name == name)
    for file, text in zip((peer.program, *peer.files), (PROGRAMS[name], DEFAULTS, ""), strict=True):
        (tmp_path / "peer" / file).parent.mkdir(parents=True)
        (tmp_path / "peer" / file).write_text(text)
    sizes = {"side": 16, "num_inference_steps": 3, "blocks": 2, "heads": 1, "batch_size": 2}
    versus_peer.versus_peer(versus_peer.Args(peer="peer", rounds=1, steps=1, device_rows=one_by_one, **sizes))
    found = {(phase, side): float(cell.split()[0]) for phase, side, cell, _ in table(capfd.readouterr().out)}
    sides = [name, "trainer", *["trainer, compiled"] * one_by_one]
    assert [*found] == [(what, side) for what in ("rollout", "update", "step", "most memory, GB") for side in sides]
    assert found["rollout", name] >= 0.01
    assert found["update", name] >= 0.04
    assert min(found.values()) > 0
    for side in sides:
        assert found["step", side] == pytest.approx(found["rollout", side] + found["update", side], abs=0.02)


def test_rows_beside_a_peer_have_its_time_and_memory():
    import versus_peer

    found = {
        "flow_grpo": [versus_peer.Result([versus_peer.Seconds(1.0, 2.0), versus_peer.Seconds(1.0, 4.0)], 2000.0)],
        "trainer": [versus_peer.Result([versus_peer.Seconds(0.5, 1.0), versus_peer.Seconds(1.0, 1.0)], 1500.0)],
    }
    assert versus_peer.rows_of(found)[3::2] == [
        ("update", "trainer", "1.00 (1.00 to 1.00)", "0.375 (0.250 to 0.500)"),
        ("step", "trainer", "1.75 (1.50 to 2.00)", "0.450 (0.400 to 0.500)"),
        ("most memory, GB", "trainer", "1.50", "0.750"),
    ]


def test_sizes_that_are_not_given_are_those_of_the_device_rows_or_small():
    import versus_peer

    assert versus_peer.Args(blocks=3).sized() == versus_peer.Args(**versus_peer.SMALL | {"blocks": 3})
    assert versus_peer.Args(device_rows=True).sized().blocks == 24


def test_a_folder_without_the_peers_files_is_refused(capfd):
    import runner
    import versus_peer

    for given in ([], ["--peer", "nowhere"]):
        with pytest.raises(SystemExit) as stopped:
            runner.run("", versus_peer.versus_peer, argv=given)
        assert stopped.value.code == 2
        assert "--peer must be a folder with flow_grpo's scripts/train_sd3.py" in capfd.readouterr().err


def test_a_peer_whose_words_for_cuda_have_changed_is_refused(tmp_path):
    import versus_peer

    with pytest.raises(ValueError, match='must have "nccl" once, got 0'):
        versus_peer.for_cpu("dist.init()", versus_peer.PEERS[1])


@in_turn(7, 8)
@pytest.mark.parametrize("kind", sampled(["all weights", "LoRA"], 1))
def test_what_two_ranks_exchange_predicts_four(kind):
    """Of a step of other batches and optimizer steps too."""
    import scaling

    given = scaling.cases(lora=kind == "LoRA")
    known = scaling.rates(given, scaling.count(given, 2))
    case = scaling.Case(batches=3, updates=2, lora=kind == "LoRA")
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
    import scaling

    sizes = {"ranks": 4, "servers": 2, "images": 8, "side": 16}
    scaling.waits(scaling.Waits(**sizes, image_ms=1.0, rollout_s=0.01, batches="1,2"))
    rows = table(capfd.readouterr().out)
    assert [row[0] for row in rows] == ["1", "2"]
    with pytest.raises(ValueError, match="--batches must divide the 2 images of a rank, got 3"):
        scaling.Waits(**sizes, batches="3").check()
