"""The vLLM-Omni engine as a guest: the process, its ranks and its group are as they were."""

import importlib.metadata
import os
import signal
import sys
import time
import tomllib

import psutil
import pytest
import setproctitle
import torch
from helpers import CHECKPOINT, REPO
from omni_rollout import Prompt
from omni_rollout.engines.versions import VLLM, VLLM_OMNI
from omni_rollout.engines.vllm_omni.worker import check_vllm_omni
from omni_rollout.models import open_model
from omni_train.dist import same_error
from omni_train.shard import shard
from omni_train.weights import full
from omni_train.weights.full import named_weights
from torch.multiprocessing.reductions import StorageWeakRef
from vllm_omni.diffusion.worker.diffusion_worker import DiffusionWorker
from vllm_omni.platforms import current_omni_platform
from vllm_omni_helpers import MODEL, PARAMS, gap, load_net, open_engine, train

PROMPTS = [Prompt(f'a red sign that says "{word}"', group=0, index=i, seed=i) for i, word in enumerate(["AB", "CD"])]


def process():
    """What a guest must leave alone."""
    return {
        "environment": {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")},
        "output": [(stream, stream.write) for stream in (sys.stdout, sys.stderr)],
        "title": setproctitle.getproctitle(),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "group": torch.distributed.is_initialized(),
        "children": [c.pid for c in psutil.Process().children() if "resource_tracker" not in " ".join(c.cmdline())],
        "default dtype": torch.get_default_dtype(),
        "generator": torch.get_rng_state().tolist(),
    }


def test_the_process_is_as_it_was_and_a_second_engine_can_follow():
    before = process()
    for _ in range(2):
        engine = open_engine()
        assert process() == before
        first = engine.generate(PROMPTS, PARAMS)
        assert process() == before
        engine.close()
        assert process() == before
    assert first.media["image"].shape == (2, 32, 96, 3)


@pytest.mark.parametrize(
    ("vllm", "omni", "found"),
    [
        ("0.29.0", "0.30.0", "vllm 0.29.0 with vllm-omni 0.30.0"),
        ("0.32.0", "0.30.0", "vllm 0.32.0 with vllm-omni 0.30.0"),
        ("0.31.0", "0.31.0", "vllm 0.31.0 with vllm-omni 0.31.0"),
        ("0.30.0", None, "vllm 0.30.0 with vllm-omni none"),
    ],
)
def test_another_pair_of_versions_is_refused(monkeypatch, vllm, omni, found):
    def version(name):
        if name == "vllm-omni" and omni is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return {"vllm": vllm, "vllm-omni": omni}[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    supported = "vllm 0.30.0 with vllm-omni 0.30.0"
    with pytest.raises(ImportError, match=f"needs {supported}, found {found}"):
        check_vllm_omni()


def test_a_local_version_is_the_same_version(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.30.0+cu130")
    check_vllm_omni()


def test_what_a_user_installs_is_a_pair_that_is_supported():
    project = tomllib.loads((REPO / "packages/omni-rollout/pyproject.toml").read_text("utf-8"))["project"]
    pins = [pin.partition(";")[0] for pin in project["optional-dependencies"]["vllm-omni"]]
    assert pins == [f"vllm=={VLLM}", f"vllm-omni=={VLLM_OMNI}"]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_two_ranks_sample_train_and_sync(run_ranks, mode):
    def work(dist):
        before = process()
        engine = open_engine(device=dist.device)
        kept = process() == before
        net = load_net()
        if mode == "ddp":
            engine.adopt(net.named_parameters())
        shard(net, dist.mesh, mode=mode, block_names=MODEL.BLOCK_NAMES)
        # Ranks draw other prompts in batches of other sizes: sampling is nobody else's business.
        trajectory = engine.generate(PROMPTS[: 1 + dist.rank], PARAMS)
        first = gap(net, trajectory)
        train(net, trajectory)
        engine.load_weights(named_weights(net), version=1)
        after = engine.generate(PROMPTS, PARAMS)
        engine.close()
        ones = torch.ones(1)
        torch.distributed.all_reduce(ones)
        return {
            "kept": kept and process() == before,
            "first": first,
            "stale": gap(net, trajectory),
            "after": gap(net, after),
            "moved": engine.moved_bytes,
            "ranks": ones.item(),
            "x0": after.x0.sum().item(),
        }

    results = run_ranks(work)
    for result in results:
        assert result["kept"]
        assert result["first"] <= 1e-5
        assert result["after"] <= 1e-5 < 1e-3 < result["stale"]
        assert (result["moved"] == 0) == (mode == "ddp")
        assert result["ranks"] == 2
    if mode == "fsdp2":
        assert results[0]["x0"] == results[1]["x0"]  # both engines have the weights that both ranks trained


def test_a_streamed_sync_has_one_gathered_group_at_a_time(run_ranks, monkeypatch):
    """Here of one parameter each."""
    monkeypatch.setattr(full, "GROUP_BYTES", 1)

    def work(dist):
        engine = open_engine(device=dist.device)
        net = load_net()
        shard(net, dist.mesh, mode="fsdp2", block_names=MODEL.BLOCK_NAMES)
        alive, most = [], 0

        def watched():
            nonlocal most
            for name, tensor in named_weights(net):
                alive.append(StorageWeakRef(tensor.untyped_storage()))
                most = max(most, sum(not storage.expired() for storage in alive))
                yield name, tensor
                del tensor

        engine.load_weights(watched(), version=1)
        engine.close()
        return [most, len(alive)]

    for most, total in run_ranks(work):
        assert total == 141
        assert most <= 2  # gloo's thread may let go of the one before a moment later


@pytest.mark.parametrize("where", ["config", "constructor", "load"])
def test_an_error_of_one_rank_ends_both(run_ranks, tmp_path, monkeypatch, where):
    (tmp_path / "empty").mkdir()

    def work(dist):
        model = open_model(CHECKPOINT)
        if where == "config" and dist.rank == 1:
            model.path = str(tmp_path / "empty")
        if where == "load" and dist.rank == 1:
            DiffusionWorker.load_model = fail
        if where == "constructor":  # it makes groups, so it can only fail on all ranks together
            DiffusionWorker._create_profiler = fail
        start = time.monotonic()
        try:
            open_engine(model, device=dist.device, together=lambda: same_error(dist))
        except (OSError, ValueError, RuntimeError) as exc:
            ones = torch.ones(1)
            torch.distributed.all_reduce(ones)
            return [str(exc), time.monotonic() - start, ones.item()]
        return ["no error", 0.0, 0.0]

    for message, seconds, ranks in run_ranks(work):
        assert "rank 1:" in message or where == "constructor"
        assert "out of memory" in message or where == "config"
        assert seconds < 60
        assert ranks == 2  # the trainer's group lives


def fail(*args, **kwargs):
    raise torch.OutOfMemoryError("out of memory")


def test_after_an_error_another_engine_can_follow(monkeypatch):
    before = process()
    with monkeypatch.context() as patch:
        patch.setattr(DiffusionWorker, "_create_profiler", fail)
        with pytest.raises(torch.OutOfMemoryError):
            open_engine()
    with monkeypatch.context() as patch:
        patch.setattr("vllm_omni.diffusion.worker.diffusion_worker.init_workspace_manager", fail)
        with pytest.raises(torch.OutOfMemoryError):
            open_engine()
    assert process() == before
    open_engine().close()


def test_the_local_rank_picks_the_device(run_ranks):
    def work(dist):
        asked = []
        platform = type(current_omni_platform)
        platform.get_torch_device = classmethod(lambda cls, rank=None: asked.append(rank) or torch.device("cpu"))
        open_engine(device=torch.device("cpu", 5 - dist.rank)).close()  # as on a second node
        return asked

    for rank, asked in enumerate(run_ranks(work)):
        assert set(asked) - {0} == {5 - rank}  # 0 is the current device, which a CPU always says
        assert asked[0] == 5 - rank
