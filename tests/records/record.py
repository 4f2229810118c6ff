"""Short runs of trainers that draw media, and the record that is kept of each: metrics, a digest of exported weights.

    python tests/records/record.py            write tests/records/runs.json anew, from this tree
    python tests/records/record.py --check    run all and say which differ from the record
    python tests/records/record.py nft-full   only these; the rest of the file stays

`--repo FOLDER` takes the trainers of another tree, whose environment must be active.
"""

import argparse
import hashlib
import json
import os
import platform
import runpy
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omni_reward.serving import serving_in_thread
from omni_rl.settings.fields import change
from omni_rl.settings.toml import to_toml
from PIL import Image
from safetensors.torch import load_file

REPO = Path(__file__).parents[2]
FILE = Path(__file__).with_name("runs.json")

TINY: dict[str, Any] = {
    "name": "run", "eval_prompts": "eval.txt", "prompts_per_step": 2, "group_size": 4, "batch_size": 2, "height": 32,
    "width": 64, "num_inference_steps": 3, "eval_num_inference_steps": 2, "train_steps": 2, "eval_every": 2,
    "save_every": 1, "lr": 1e-3, "hang_timeout_s": 120.0,
}  # fmt: skip
FOUR: dict[str, Any] = {"num_inference_steps": 4}
LORA: dict[str, Any] = {"lora_rank": 2, "lora_alpha": 4, "lr": 1e-2}
SLOW_LORA = LORA | {"lr": 1e-3}
DPO: dict[str, Any] = {"levels_per_pair": 2, "dpo_beta": 100.0, "lr": 1e-4}
SRPO: dict[str, Any] = {"prompts_per_step": 4, "group_size": 1, "width": 96, "lr": 1e-4, "optim_max_grad_norm": 1.0}


@dataclass(frozen=True)
class Case:
    """A short run: trainer, what differs from TINY, ranks, whether it stops after two steps and goes on to a third."""

    app: str
    settings: Mapping[str, Any]
    ranks: int = 1
    resumes: bool = False


def grpo(*, ranks: int = 1, resumes: bool = False, **settings: Any) -> Case:
    return Case("train_flowgrpo", TINY | {"noise_level": 0.7} | settings, ranks, resumes)


def nft(*, ranks: int = 1, resumes: bool = False, **settings: Any) -> Case:
    return Case("train_nft", TINY | {"nft_beta": 0.1} | settings, ranks, resumes)


def dpo(*, ranks: int = 1, resumes: bool = False, **settings: Any) -> Case:
    return Case("train_dpo", TINY | DPO | settings, ranks, resumes)


def srpo(*, ranks: int = 1, resumes: bool = False, **settings: Any) -> Case:
    return Case("train_srpo", TINY | SRPO | settings, ranks, resumes)


def distill(*, ranks: int = 1, resumes: bool = False, **settings: Any) -> Case:
    return Case("train_distill", TINY | {"teacher_substeps": 2} | settings, ranks, resumes)


def sft(*, ranks: int = 1, resumes: bool = False, **settings: Any) -> Case:
    return Case("train_sft", TINY | {"prompts": "pairs.jsonl", "group_size": 2} | settings, ranks, resumes)


OFFLINE: dict[str, Any] = {"preferences": "pairs.jsonl", "group_size": 2, "prompts_per_step": 3}
CASES = {
    "grpo-full": grpo(),
    "grpo-lora-kl": grpo(**LORA, kl_coef=0.1),
    "grpo-two-updates": grpo(num_minibatches=2, adv_std="group"),
    "grpo-guidance": grpo(true_cfg_scale=3.0, **LORA),
    "grpo-cps": grpo(algo="flowgrpo-cps"),
    "grpo-dance": grpo(algo="dancegrpo", **FOUR, window_size=2, same_start_noise=True),
    "grpo-mix": grpo(algo="mixgrpo", **FOUR, window_size=1),
    "grpo-mix-decay": grpo(algo="mixgrpo-decay", **FOUR, window_size=2, window_stride=1, train_steps=3),
    "grpo-mix-compress": grpo(
        algo="mixgrpo-flash", num_inference_steps=6, window_size=2, window_high=3, iters_per_window=2,
        same_start_noise=True),
    "grpo-guard": grpo(algo="grpo-guard", **FOUR, num_minibatches=2),
    "grpo-dppo": grpo(algo="flow-dppo", **FOUR, num_minibatches=2),
    "grpo-tempflow": grpo(algo="tempflow", **FOUR, ema_decay=0.9, optim_warmup_steps=2),
    "grpo-best-worst": grpo(best_worst_n=2),
    "grpo-filter-kl": grpo(**LORA, filter_groups=True, kl_coef=0.1, adv_std="none"),
    "grpo-recompute": grpo(old_log_prob="recompute", num_minibatches=2),
    "grpo-correct": grpo(old_log_prob="correct", correction_level="step"),
    "grpo-decay-wd": grpo(optim_lr_scheduler_type="linear", optim_weight_decay=0.1, memory_gradient_checkpointing=True),
    "grpo-full-ddp": grpo(ranks=2, sharding_mode="ddp", ema_decay=0.9),
    "grpo-full-fsdp2": grpo(ranks=2, sharding_mode="fsdp2"),
    "grpo-lora-ddp": grpo(ranks=2, sharding_mode="ddp", **LORA, kl_coef=0.1, num_minibatches=2),
    "grpo-lora-fsdp2": grpo(ranks=2, sharding_mode="fsdp2", **LORA),
    "grpo-best-worst-ddp": grpo(ranks=2, sharding_mode="ddp", best_worst_n=2),
    "grpo-guard-fsdp2": grpo(ranks=2, sharding_mode="fsdp2", algo="grpo-guard", **FOUR),
    "grpo-bfloat16": grpo(dtype="bfloat16", **LORA),
    "grpo-resume": grpo(resumes=True, ema_decay=0.9),
    "grpo-resume-lora-fsdp2": grpo(resumes=True, ranks=2, sharding_mode="fsdp2", **LORA),
    "nft-full": nft(),
    "nft-lora-kl": nft(**LORA, kl_coef=0.1, old_schedule="linear", old_kl_coef=0.1, train_levels=2),
    "nft-policy": nft(sample_with="policy", num_minibatches=2),
    "nft-full-ddp": nft(ranks=2, sharding_mode="ddp"),
    "nft-full-fsdp2": nft(ranks=2, sharding_mode="fsdp2", old_schedule="linear"),
    "nft-lora-ddp": nft(ranks=2, sharding_mode="ddp", **LORA, kl_coef=0.1),
    "awm-full": nft(algo="awm"),
    "awm-lora-fsdp2": nft(ranks=2, sharding_mode="fsdp2", algo="awm", **LORA, weighting="t"),
    "nft-resume": nft(resumes=True, old_schedule="linear"),
    "nft-resume-lora": nft(resumes=True, **LORA, old_schedule="linear"),
    "dpo-online-full": dpo(),
    "dpo-online-lora": dpo(**SLOW_LORA, group_size=2, batch_size=4, prompts_per_step=4, num_minibatches=2),
    "dpo-online-guidance": dpo(**SLOW_LORA, true_cfg_scale=3.0, batch_size=8),
    "dpo-online-full-fsdp2": dpo(ranks=2, sharding_mode="fsdp2"),
    "dpo-online-lora-ddp": dpo(ranks=2, sharding_mode="ddp", **SLOW_LORA),
    "dpo-offline-full": dpo(**OFFLINE),
    "dpo-offline-lora-ddp": dpo(ranks=2, sharding_mode="ddp", **OFFLINE, **SLOW_LORA, level_shift=3.0),
    "dpo-offline-full-fsdp2": dpo(ranks=2, sharding_mode="fsdp2", **OFFLINE),
    "dpo-resume": dpo(resumes=True),
    "dpo-resume-offline-lora": dpo(resumes=True, **OFFLINE, **SLOW_LORA),
    "srpo-full": srpo(),
    "srpo-lora": srpo(**SLOW_LORA),
    "srpo-full-fsdp2": srpo(ranks=2, sharding_mode="fsdp2"),
    "srpo-lora-ddp": srpo(ranks=2, sharding_mode="ddp", **SLOW_LORA),
    "srpo-resume": srpo(resumes=True),
    "distill-full": distill(num_minibatches=2),
    "distill-lora-guided-ddp": distill(ranks=2, sharding_mode="ddp", algo="opd", **LORA, teacher_true_cfg_scale=3.0),
    "distill-resume-fsdp2": distill(resumes=True, ranks=2, sharding_mode="fsdp2", algo="opd-cps"),
}  # fmt: skip


def brightness(media: Mapping[str, Any], prompts: object, meta: object) -> list[float]:
    """The mean level of each image, in [0, 1]."""
    return [float(image.mean()) / 255 for image in media["image"]]


def scoring() -> AbstractContextManager[str]:
    """URL of a server in this process that scores brightness."""
    return serving_in_thread(brightness, name="brightness")


def write_data(folder: Path) -> None:
    """The evaluation's prompts, and pairs of pictures of which the brighter one is preferred."""
    prompts = [f'a {color} sign that says "{word}"' for color in ("blue", "red") for word in ("AB", "CD", "EF")]
    (folder / "eval.txt").write_text("\n".join(prompts[:3]) + "\n")
    lines = []
    for number, prompt in enumerate(prompts):
        pixels = np.random.default_rng(number).integers(0, 200, (4, 8, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
        Image.fromarray(pixels).save(folder / f"{number}-lose.png")
        Image.fromarray(pixels + np.uint8(55)).save(folder / f"{number}-win.png")
        lines.append({"prompt": prompt, "win": f"{number}-win.png", "lose": f"{number}-lose.png"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def run(case: Case, repo: Path, url: str) -> dict[str, Any]:
    """Train in forked processes and return the record: the log's lines without times, and the weights' digest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        last = case.settings["train_steps"]
        for steps in (last, last + 1) if case.resumes else (last,):
            train(case.app, flags(case, repo, url) | {"train_steps": steps}, repo, folder, ranks=case.ranks)
        text = (folder / "runs/run/metrics.jsonl").read_text()
        return {"metrics": [_timeless(json.loads(line)) for line in text.splitlines()], "weights": digest(folder)}


def flags(case: Case, repo: Path, url: str) -> dict[str, Any]:
    """The settings of a case with its files and servers."""
    data = {
        "model": f"{repo}/checkpoints/tiny-signs-qwen-image",
        "prompts": f"{repo}/data/tiny-signs/train.txt",
        "scorer_watch_url" if case.app == "train_srpo" else "scorer_url": url,
    }
    reader = {"reward_model": f"{repo}/checkpoints/tiny-signs-reader"} if case.app == "train_srpo" else {}
    return data | reader | dict(case.settings)


def digest(folder: Path) -> dict[str, Any]:
    """SHA-256 of the names, shapes and bytes of all exported tensors, and their number, whatever files they are in."""
    tensors = {k: v for path in folder.glob("runs/run/weights/**/*.safetensors") for k, v in load_file(path).items()}
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return {"tensors": len(tensors), "sha256": total.hexdigest()}


def _timeless(line: dict[str, Any]) -> dict[str, Any]:
    """The line without times and memory."""
    return {k: v for k, v in line.items() if not k.startswith(("time/", "perf/")) and k != "reward/busy_s"}


def train(
    app: str,
    settings: Mapping[str, Any],
    repo: Path,
    folder: Path,
    *,
    ranks: int = 1,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Run a trainer in that folder as a program, on forked ranks that call `before` first, to its end."""
    import_all()
    script = repo / f"apps/{app}.py"
    args = change(runpy.run_path(str(script))["Args"](), **settings)
    (folder / "settings.toml").write_text(to_toml(args))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} if ranks > 1 else {}
            os.environ |= {name: str(value) for name, value in place.items()} if ranks > 1 else {}
            _program(script, ["--config", "settings.toml"], folder, folder / f"out-{rank}.txt", before)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        texts = "\n".join((folder / f"out-{rank}.txt").read_text() for rank in range(ranks))
        raise RuntimeError(f"{app} ended with {codes}:\n{texts}")


def _program(script: Path, argv: list[str], folder: Path, output: Path, before: Callable[[], None]) -> None:
    """Run a program in this forked process to its end, with one thread."""
    code = 0
    sys.stdout = sys.stderr = output.open("w", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    try:
        os.chdir(folder)
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)  # sums in another order would be other numbers
        sys.argv = [str(script), *argv]
        before()
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 70
    finally:
        sys.stdout.flush()
        os._exit(code)


@cache
def import_all() -> None:
    """Import in this process what loading a model imports, so that no fork has to."""
    from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel  # noqa: F401
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration  # noqa: F401


def machine() -> dict[str, str]:
    """Where bits may be compared: equal versions and equal processor features."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    features = hashlib.sha256(facts.get("flags", facts.get("Features", "")).encode()).hexdigest()
    return {
        **{name: version(name) for name in ("torch", "diffusers", "transformers", "peft")},
        "processor": facts.get("model name", platform.machine()),
        "features": f"{torch.backends.cpu.get_cpu_capability()} {features[:16]}",
    }


def compare(result: Mapping[str, Any], expected: Mapping[str, Any] | None) -> str:
    """The largest relative difference of two records' metrics, in words; "same" where nothing differs at all."""
    if expected is None or len(result["metrics"]) != len(expected["metrics"]):
        return "new" if expected is None else "differs: another number of lines"
    if result == expected:
        return "same"
    largest, place = 0.0, "in the weights alone"
    for ours, theirs in zip(result["metrics"], expected["metrics"], strict=True):
        if ours.keys() != theirs.keys():
            return f"differs: names {sorted(ours.keys() ^ theirs.keys())}"
        for name, value in theirs.items():
            if ours[name] != value:
                size = abs(ours[name] - value) / max(abs(ours[name]), abs(value))
                largest, place = max((largest, place), (size, f"by at most {size:.1g}, {name} of step {ours['step']}"))
    return f"differs {place}"


def write(path: Path, record: Mapping[str, Any]) -> None:
    """One line of the log a line."""
    text = json.dumps(record, indent=1)
    path.write_text(text + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a case; all by default")
    parser.add_argument("--check", action="store_true", help="compare with the record, bit for bit, and write nothing")
    parser.add_argument("--repo", type=Path, default=REPO, help="tree whose trainers run")
    args = parser.parse_args()
    record = json.loads(FILE.read_text()) if FILE.exists() else {"machine": machine(), "runs": {}}
    different = []
    with scoring() as url:
        for name in args.names or CASES:
            start = time.perf_counter()
            result = run(CASES[name], args.repo.resolve(), url)
            verdict = compare(result, record["runs"].get(name))
            different += [] if verdict == "same" else [name]
            print(f"{name:26} {time.perf_counter() - start:5.1f} s  {verdict}", flush=True)
            if not args.check:
                record = {"machine": machine(), "runs": record["runs"] | {name: result}}
                write(FILE, record)
    return bool(args.check and different)


if __name__ == "__main__":
    sys.exit(main())
