"""Train a full-size model with random weights on this machine, and measure each phase.

    python scripts/real_size.py sd35-medium wan21-1.3b qwen3-0.6b --write
    python scripts/real_size.py sd35-medium --cut

It builds a folder in the released layout from the configuration included in omni-rollout: every width and layer count
is the released one, except that text encoders keep a few layers. The recipe then trains two steps on it, started as by
a
user: its LoRA, optimizer, dtype and memory settings are kept, and only sizes, sample counts and the reward change.
The plan comes first. The run is killed once the checkpoint of step 1 is complete, and started again. The exported
weights are loaded into the stock pipeline, whose sample must differ from that without them.

Each phase is a separate process. Its memory is that of the process and its children, with shared pages counted once,
sampled about twice per second. Random weights show what a step costs and that it runs, but nothing about learning.
--write adds the models' columns to docs/evidence/real_size.json and the table of that page.
"""

import argparse
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from inspect import signature
from pathlib import Path

import psutil
import torch
from leaderboard_page import fill
from omni_train.files import load_metrics
from released_folder import Cut, build, build_language_model

REPO = Path(__file__).parents[1]
PAGE = REPO / "docs" / "evidence" / "real_size.md"
DATA = PAGE.with_suffix(".json")  # the cells of each model that has run
GB, MB = 1e9, 1e6
SAMPLE_S = 0.5  # between two samples of the memory
REWARD = '''"""A reward that tells samples of random weights apart."""

import zlib


def score(media, prompts, meta):
    """Return the brightness of each image, 0 to 1."""
    return [float(image.mean()) / 255 for image in media["image"]]


def grade(answer, line):
    """Return a number in [0, 1] that any other answer has otherwise."""
    return zlib.crc32(answer.encode()) / 2**32
'''
QWEN3 = {  # Qwen3-0.6B as released
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SMALL = {  # replaced in every recipe
    "--prompts-per-step": "2",
    "--group-size": "2",
    "--batch-size": "2",
    "--train-steps": "2",
    "--save-every": "1",
    "--eval.num-prompts": "2",
    "--name": "real",
    "--prompts": "prompts.jsonl",
    "--eval.prompts": "prompts.jsonl",
}
MEDIA = {
    "--scorer": "python:reward.py:score",
    "--num-inference-steps": "2",
    "--eval.num-inference-steps": "2",
    "--window-low": "0",
    "--window-size": "1",
    "--window-high": "1",
    "--height": "16",
    "--width": "16",
}


@dataclass(frozen=True)
class Row:
    """A model, the recipe that trains it, and the minimal settings for the recipe.

    release: hub id of the configuration, or "" for QWEN3. layers: number of layers kept in text encoders.
    """

    release: str
    app: str
    recipe: str
    changes: Mapping[str, str]
    layers: int = 2


ROWS = {
    "sd35-medium": Row("stabilityai/stable-diffusion-3.5-medium", "flowgrpo", "sd35-medium-1x16gb-ocr", MEDIA),
    "wan21-1.3b": Row(
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        "flowgrpo",
        "wan21-1.3b-1x16gb-pickscore",
        MEDIA | {"--num-frames": "5", "--scorer": "frames:python:reward.py:score"},
    ),
    "qwen3-0.6b": Row(
        "",
        "gspo",
        "qwen25-dapo",
        {
            "--lora.rank": "32",
            "--lora.alpha": "64",
            "--sharding.mode": "none",
            "--sharding.unshard": "auto",
            "--max-new-tokens": "8",
            "--reward": "python:reward.py:grade",
        },
        layers=28,
    ),
    "flux2-klein-4b": Row(
        "black-forest-labs/FLUX.2-klein-base-4B", "flowgrpo", "flux2-klein-base-4b-1x16gb-pickscore", MEDIA
    ),
    "z-image-turbo": Row("Tongyi-MAI/Z-Image-Turbo", "flowgrpo", "z-image-turbo-1x16gb-pickscore", MEDIA),
    "flux-dev": Row("black-forest-labs/FLUX.1-dev", "flowgrpo", "flux-dev-1x24gb-pickscore", MEDIA),
    "qwen-image": Row("Qwen/Qwen-Image", "flowgrpo", "qwen-image-1x24gb-ocr", MEDIA),
}


@dataclass(frozen=True)
class Phase:
    """The cost of a process: seconds, CPU seconds, peak bytes including its children, and its output."""

    seconds: float
    cpu: float
    peak: int
    said: str


@dataclass
class Result:
    """The result for a model: its phases by name, the metrics of its steps by number, and the bytes of its files."""

    row: Row
    phases: dict[str, Phase] = field(default_factory=dict)
    steps: dict[int, Mapping[str, float]] = field(default_factory=dict)
    model: int = 0
    checkpoint: int = 0
    weights: int = 0


def main() -> None:
    """Run the models of the command line, print their table, and with --write add it to the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=ROWS, metavar="NAME", help=f"models: {', '.join(ROWS)}")
    parser.add_argument("--out", type=Path, default=Path("build/real-size"), help="folder for models and runs")
    parser.add_argument("--cut", action="store_true", help="shrink the models, to try this script in a minute")
    parser.add_argument("--keep", action="store_true", help="keep models and runs on the disk")
    parser.add_argument("--write", action="store_true", help="add each model to docs/evidence/real_size.md")
    parser.add_argument("--phase", choices=PHASES, help="run only this phase, in this process")
    given = parser.parse_args()
    if given.phase:
        PHASES[given.phase](ROWS[given.names[0]], given.out, cut=given.cut)
        return
    here, columns = where(), {}  # before --write changes the page
    for name in given.names:
        folder = given.out.absolute() / name
        columns[name] = here | column(measure(name, folder, cut=given.cut))
        if not given.keep:
            shutil.rmtree(folder)
        if given.write:
            write({name: columns[name]})
    print(table(columns))


# The phases


def measure(name: str, folder: Path, *, cut: bool) -> Result:
    """Run all phases of a model in a new folder."""
    row = ROWS[name]
    result = Result(row)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD, "utf-8")
    lines = [json.dumps({"prompt": f"a quiet street with {number} wooden houses"}) for number in range(4)]
    (folder / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    own = [__file__, name, "--out", str(folder), *(["--cut"] if cut else []), "--phase"]
    flags = [word for pair in {**SMALL, **row.changes}.items() for word in pair]
    train = ["-m", "omni_rl.tools.command", "train", row.app, "--preset", row.recipe, "--model", "model", *flags]
    run = folder / "runs" / "real"
    first = run / "checkpoints" / "step-00000001"
    phases = result.phases
    phases["build"] = watch([*own, "build"], folder)
    phases["plan"] = watch([*train, "--dry-run", "--memory.device-gb", "80"], folder)
    phases["killed"] = watch(train, folder, until=first)
    if not first.is_dir():
        raise RuntimeError(f"{name} ended before it could be killed:\n{phases['killed'].said}")
    result.checkpoint = bytes_of(first)
    phases["continued"] = watch(train, folder)
    if "continues after step 1" not in phases["continued"].said:
        raise RuntimeError(f"{name} did not continue:\n{phases['continued'].said}")
    result.steps = {int(line["step"]): line for line in load_metrics(run / "metrics.jsonl")}
    result.model, result.weights = bytes_of(folder / "model"), bytes_of(run / "weights")
    phases["open"] = watch([*own, "open"], folder)
    return result


def watch(words: Sequence[str], folder: Path, *, until: Path | None = None) -> Phase:
    """Run Python with these arguments in the folder; kill it and its children as soon as `until` exists.

    Raises:
        RuntimeError: it failed.
    """
    log, began, before, peak, killed = folder / "log.txt", time.monotonic(), cpu_seconds(), 0, False
    print("+", " ".join(words), flush=True)
    env = {**os.environ, "OMP_NUM_THREADS": threads(), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=env, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            if until and until.is_dir():
                os.killpg(process.pid, signal.SIGKILL)
                killed = True
            time.sleep(SAMPLE_S if not until or peak > GB else SAMPLE_S / 10)
    phase = Phase(time.monotonic() - began, cpu_seconds() - before, peak, log.read_text("utf-8"))
    print(f"{phase.seconds:.0f} s, {phase.cpu:.0f} s of a CPU core, {phase.peak / GB:.3g} GB", flush=True)
    if process.returncode and not killed:
        raise RuntimeError(f"{' '.join(words)} ended with exit code {process.returncode}:\n{phase.said}")
    return phase


def threads() -> str:
    """Return the number of threads of a process on a CPU."""
    return os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))


def cpu_seconds() -> float:
    """Return the CPU seconds of all children that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def resident(pid: int) -> int:
    """Return the memory of a process and its children in bytes, counting shared pages once."""
    total = 0
    with suppress(psutil.Error):
        for each in (parent := psutil.Process(pid), *parent.children(recursive=True)):
            with suppress(psutil.Error):
                total += each.memory_full_info().pss
    return total


def bytes_of(folder: Path) -> int:
    """Return the total size of all files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def build_model(row: Row, folder: Path, *, cut: bool) -> None:
    """Write the folder of a model."""
    how = Cut() if cut else Cut(is_whole=True, encoder_layers=row.layers)
    if row.release:
        build(row.release, folder / "model", how)
        return
    released = folder / "released"
    released.mkdir()
    (released / "config.json").write_text(json.dumps(QWEN3), "utf-8")
    build_language_model(released, folder / "model", how)
    name_words(folder / "model")


def name_words(folder: Path) -> None:
    """Give each row of the vocabulary a word, as a random net would otherwise answer with tokens that have none."""
    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text("utf-8"))
    known = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])}
    tokenizer["model"]["vocab"] |= {f"w{number}": number for number in range(size) if number not in known}
    path.write_text(json.dumps(tokenizer), "utf-8")


def open_stock(row: Row, folder: Path, *, cut: bool) -> None:
    """Sample in the stock pipeline without and with the exported weights, and print the difference of the samples.

    Raises:
        RuntimeError: a sample is not finite, or the two are equal.
    """
    before, after = (answer if row.app == "gspo" else draw)(folder / "model", folder / "runs" / "real" / "weights")
    if not (before.isfinite().all() and after.isfinite().all()) or before.equal(after):
        raise RuntimeError("the exported weights must change a sample, and both must be finite")
    print(f"difference: {(after - before).abs().mean() / before.std():.2g}")


def draw(model: Path, weights: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an image or a video without and with LoRA, from the same noise."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(model, torch_dtype=torch.bfloat16)
    frames = {"num_frames": 5} if "num_frames" in signature(pipe.__call__).parameters else {}
    drawn = []
    for loads in (False, True):
        if loads:
            pipe.load_lora_weights(weights)
        noise = torch.Generator().manual_seed(0)
        given = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "pt", "generator": noise}
        drawn.append(torch.as_tensor(pipe(prompt="a quiet street", **given, **frames)[0][0]).float())
    return drawn[0], drawn[1]


def answer(model: Path, weights: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the next token without and with LoRA."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, trust_remote_code=False)
    inputs = AutoTokenizer.from_pretrained(model, trust_remote_code=False)("a quiet street", return_tensors="pt")
    with torch.no_grad():
        before = net(**inputs).logits[0, -1].float().log_softmax(-1)
        net.load_adapter(str(weights))
        return before, net(**inputs).logits[0, -1].float().log_softmax(-1)


PHASES = {"build": build_model, "open": open_stock}


# The table


def table(columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table of cells, with one column per model."""
    labels = list(dict.fromkeys(label for cells in columns.values() for label in cells))
    lines = [["", *(f"`{name}`" for name in columns)], ["---"] * (len(columns) + 1)]
    lines += [[label, *(cells.get(label, "") for cells in columns.values())] for label in labels]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def write(columns: Mapping[str, Mapping[str, str]]) -> None:
    """Add the columns to the data, replacing earlier ones of these models, and write all of them to the page."""
    kept = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {}
    known = {name: cells for name in ROWS if (cells := {**kept, **columns}.get(name))}
    DATA.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
    PAGE.write_text(fill(PAGE.read_text("utf-8"), {"measured": table(known)}), "utf-8")


def column(result: Result) -> dict[str, str]:
    """Return the cells of a model by label."""
    phases, steps = result.phases, result.steps
    plan = phases["plan"].said
    planned = re.search(r"plan: most memory per rank, GB: (.*)", plan)
    host = re.search(r"plan: most host memory .*: (\S+)", plan)
    assert planned, plan
    assert host, plan
    device = max(float(number) for number in re.findall(r"\w+ ([\d.]+)", planned[1]))
    trainer = [step["perf/peak_memory_mb"] for step in steps.values() if "perf/peak_memory_mb" in step]
    opened = re.search(r"difference: (\S+)", phases["open"].said)
    assert opened
    cells = {
        "recipe": f"`{result.row.app}`, `{result.row.recipe}`",
        "model's folder, GB": f"{result.model / GB:.3g}",
        "build it, s": f"{phases['build'].seconds:.0f}",
        "plan a step, s": f"{phases['plan'].seconds:.0f}",
        "start to the checkpoint of step 1, then killed, s": f"{phases['killed'].seconds:.0f}",
        "started again, to the end of step 2 and the export, s": f"{phases['continued'].seconds:.0f}",
    }
    for number in (1, 2):
        parts = {name: steps[number].get(f"time/{name}_s", 0.0) for name in ("rollout", "update", "eval", "save")}
        cells[f"step {number}: rollout, update, evaluation, wait for the save, s"] = ", ".join(
            f"{seconds:.3g}" for seconds in parts.values()
        )
    return cells | {
        "open it in the stock pipeline and sample twice, s": f"{phases['open'].seconds:.0f}",
        "all, s; of a CPU core, s": f"{sum(each.seconds for each in phases.values()):.0f}; "
        f"{sum(each.cpu for each in phases.values()):.0f}",
        "mean difference of the two samples, in standard deviations": opened[1],
        "checkpoint, MB": f"{result.checkpoint / MB:.4g}",
        "exported weights, MB": f"{result.weights / MB:.4g}",
        "planned, GB: device + host": f"{device:.3g} + {float(host[1]):.3g}",
        "most memory, GB: build": f"{phases['build'].peak / GB:.3g}",
        "plan": f"{phases['plan'].peak / GB:.3g}",
        "run, until it was killed": f"{phases['killed'].peak / GB:.3g}",
        "run, started again": f"{phases['continued'].peak / GB:.3g}",
        "its trainer alone, as it counts itself": f"{max(trainer) * 2**20 / GB:.3g}",
        "stock pipeline": f"{phases['open'].peak / GB:.3g}",
        "distance of the first ratio from 1": f"{steps[1]['policy/first_ratio_max_dev']:g}",
    }


def where() -> dict[str, str]:
    """Return the cells of the date, the commit, the device and the versions."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    commit = subprocess.run(describe, cwd=REPO, capture_output=True, text=True, check=True).stdout.strip()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "day, commit": f"{datetime.now(UTC).date().isoformat()}, {commit}",
        "device": torch.get_device_module(device).get_device_name() if device else processor(),
        "threads of a process": threads(),
        "torch, diffusers, transformers": ", ".join(map(version, ("torch", "diffusers", "transformers"))),
    }


def processor() -> str:
    """Return the name of the CPU and the number of its cores."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", info.read_text("utf-8")) if info.exists() else []
    return f"{os.cpu_count()} cores of {names[0] if names else platform.machine()}"


if __name__ == "__main__":
    main()
