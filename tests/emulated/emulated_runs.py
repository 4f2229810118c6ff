"""Short runs of the trainers on the CPU and on the emulated accelerator."""

import gc
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, chdir, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import omni_rl.run.run
import torch
import trainer_table
from build_tiny_models import tiny_checkpoint
from emulated.npu import Event, load, load_strict, watch
from model_rows import ROWS
from omni_reward import RewardClient
from omni_reward.combine import score_in_batches
from omni_reward.scorers import load_scorer, neural
from omni_rl.flow.scorers import start_scorer_servers
from omni_rl.settings.fields import change, values_of
from omni_rl.tools import plan_tokens
from omni_rollout import Prompt
from omni_rollout.engines.transformers import TransformersEngine
from omni_rollout.models import open_model, qwen_image_net, z_image_net
from omni_rollout.models.hunyuan_image_moe import Mixture
from omni_rollout.models.tokens import open_token_model
from omni_rollout.sampler import Sampler
from omni_rollout.tokens import TokenParams
from omni_train.dist import Dist
from omni_train.optim import StepResult
from omni_train.planned import PLANNED, PlannedDevice
from records import record
from torch import Tensor, nn
from trainer_runs import spared
from transformers import GenerationMixin

TEXTS: dict[str, Any] = {"prompts": "texts.jsonl", "eval_prompts": "texts.jsonl"}
SMALL: dict[str, Any] = {"train_steps": 2, "eval_every": 1}
FEW: dict[str, Any] = SMALL | {"group_size": 2}
RECOMPUTED = {"memory_gradient_checkpointing": True}


def tokens(*, ranks: int = 1, **settings: Any) -> record.Case:
    """Return a run of the text trainer, graded by a rule."""
    own = {"name": "run", "scorer_url": "", "prompts_per_step": 2, "group_size": 4, "batch_size": 4, "lr": 1e-3}
    own |= {"max_new_tokens": 5, "save_every": 1, "reward": "regex", "hang_timeout_s": 120.0}
    return record.Case("train_gspo", {"model": model("qwen3")} | own | TEXTS | SMALL | settings, ranks)


def model(name: str) -> str:
    """Return the folder of a small checkpoint with random weights."""
    return str(tiny_checkpoint(name, record.REPO / ".pytest_cache" / "tiny-models"))


CASES = {  # runs whose bytes are counted
    "flowgrpo full": record.grpo(**FEW),
    "flowgrpo LoRA": record.grpo(**FEW, **record.LORA, **RECOMPUTED, kl_coef=0.1, true_cfg_scale=3.0),
    "nft LoRA": record.nft(**FEW, **record.LORA, **RECOMPUTED, kl_coef=0.1),
    "flowgrpo LoRA, fsdp2": record.grpo(ranks=2, sharding_mode="fsdp2", adv_std="group", **FEW, **record.LORA),
    "flowgrpo full, fsdp2, context": record.grpo(
        ranks=4, sharding_mode="fsdp2", sharding_size=2, sharding_context_parallel=2, **FEW
    ),
    "nft LoRA, ddp": record.nft(ranks=2, sharding_mode="ddp", adv_std="group", **FEW, **record.LORA, kl_coef=0.1),
}


@dataclass(frozen=True)
class Outcome:
    """Result of a run: the log without times and memory, a digest of its weights, and rank 0's last output."""

    lines: list[dict[str, Any]]
    weights: dict[str, Any]
    text: str


def run(
    case: record.Case, folder: Path, url: str, *, lives: Iterable[int] = (2,), before: Callable[[], None] = lambda: None
) -> Outcome:
    """Train in that folder, in as many lives as there are numbers of steps; each calls `before` first.

    lives: the step after which each life ends. Unlike `run_row`, count no operations and write no report.
    """
    folder.mkdir()
    record.write_data(folder)
    (folder / "texts.jsonl").write_text(
        '{"prompt": "a sign", "pattern": "[a-m]"}\n{"prompt": "red", "pattern": "[A-Z]"}\n'
    )
    with spared(report=False, flops=False):
        return live(case.app, record.flags(case, record.REPO, url), case.ranks, folder, lives, before)


def run_row(
    row: trainer_table.Case,
    folder: Path,
    url: str,
    *,
    lives: Iterable[int] = (2,),
    before: Callable[[], None] = lambda: None,
    **changes: Any,
) -> Outcome:
    """Train a row of the trainer table with changed settings, as `run` does."""
    folder.mkdir()
    own = {"eval_every": 1, "save_every": 1, "optim_lr_scheduler_type": "constant"}  # so that lives may end anywhere
    with chdir(folder):
        app, args = trainer_table.settings(row[0], url, *row[1:], **(own | changes))
    return live(app.__name__, values_of(args), trainer_table.ranks(row[2]), folder, lives, before)


def live(
    app: str, settings: dict[str, Any], ranks: int, folder: Path, lives: Iterable[int], before: Callable[[], None]
) -> Outcome:
    """Run the trainer's lives with these settings."""
    for steps in lives:
        record.train(app, settings | {"train_steps": steps}, record.REPO, folder, ranks=ranks, before=before)
    lines = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    return Outcome(
        [record._timeless(line) for line in lines], record.digest(folder), (folder / "out-0.txt").read_text()
    )


def rotate_in_real_numbers(is_real: bool = True) -> None:
    """Make every device rotate queries and keys like accelerators without complex numbers, or like others."""
    for net in (qwen_image_net, z_image_net):
        net.uses_real_rotation = lambda device: is_real


def compute_like_accelerators() -> None:
    """Have the CPU compute by the operations of accelerators.

    It rotates in real numbers, and transformers' experts take tokens one by one while answers are sampled.
    """
    rotate_in_real_numbers()

    @contextmanager
    def one_by_one(net: GenerationMixin) -> Iterator[None]:
        kinds = net.get_experts_implementation()
        net.set_experts_implementation({name: kind.replace("grouped", "batched") for name, kind in kinds.items()})
        yield
        net.set_experts_implementation(kinds)

    GenerationMixin._optimize_model_for_decode = one_by_one


def load_like_cuda() -> None:
    """Load the accelerator with complex rotations, as CUDA has and plans assume."""
    load()
    rotate_in_real_numbers(False)


def load_without_bfloat16() -> None:
    """Load the accelerator as one that only emulates bfloat16, like NVIDIA's V100."""
    load()
    torch.get_device_module("npu").is_bf16_supported = lambda including_emulation: including_emulation


def tell_factors() -> None:
    """Make each rank print each loss scale in float16, on such a device."""
    load_without_bfloat16()
    scale = torch.amp.GradScaler.scale

    def told(scaler: torch.amp.GradScaler, loss: Tensor) -> Tensor:
        scaler.set_growth_interval(1)  # so that each update changes the factor
        scaled = scale(scaler, loss)
        print(f"times {scaler.get_scale():g}", flush=True)
        return scaled

    torch.amp.GradScaler.scale = told


def tell_algorithms() -> None:
    """Make each rank print which algorithms its forward and backward passes use, on a strict device."""
    load_strict()
    seen, backward = set(), torch.autograd.backward

    def note(where: str) -> None:
        if (each := (where, torch.get_deterministic_debug_mode())) not in seen:
            seen.add(each)
            print(f"{where} by {('any', 'warned', 'deterministic')[each[1]]} algorithms", flush=True)

    def noted(tensors: Tensor | list[Tensor], *others: Any, **options: Any) -> None:
        if isinstance(tensors, Tensor):  # lists come from the meta device, on which operations are counted
            note("backward")
        backward(tensors, *others, **options)

    nn.modules.module.register_module_forward_pre_hook(lambda module, given: note("forward"))
    torch.autograd.backward = noted


def tell_moments() -> None:
    """Make each rank print, after every optimizer step, the device of its sharded AdamW moments."""
    load()
    step = omni_rl.run.run.optimizer_step

    def stepped(optimizer: torch.optim.Optimizer, *arguments: Any, **options: Any) -> StepResult:
        result = step(optimizer, *arguments, **options)
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        print("moments on", *{moment.to_local().device.type for moment in moments}, flush=True)
        return result

    omni_rl.run.run.optimizer_step = stepped


def peaks(variant: str) -> tuple[float, float]:
    """Return the peak bytes, counted and planned, of two steps of a variant of scripts/gpu_check.py (57.7M weights)."""
    load_like_cuda()
    import gpu_check
    from gpu_rows import FEW, peaks_of, take

    size = gpu_check.Size(random=6, random_heads=4, side=256, batch_size=4, rank=16)
    *_, step = take(size, variant, 2, **FEW)
    planned = peaks_of(size, variant)
    return step.peak, max(planned[phase] for phase in ("rollout", "decode", "update"))


def answers_peaks(name: str, num_tokens: int) -> tuple[int, int]:
    """Return the peak bytes, counted and planned, of a net that samples a batch of answers of `num_tokens`."""
    library, folder, found = load(), model(name), list[int]()
    prompts = [Prompt("a sign", 0, i, seed=i) for i in range(4)]
    for place in (torch.device("npu"), PLANNED):
        tokens = open_token_model(folder)
        tokens.ends, tokens.reads_weights = (10**6,), place != PLANNED  # a token that no answer contains
        with PlannedDevice() if place == PLANNED else nullcontext() as device:
            engine = TransformersEngine(tokens, tokens.load_net(device=place, dtype=torch.float32))
            params = TokenParams(num_tokens, 1.0)
            if device:
                with device.phase("rollout"):
                    plan_tokens.sample_ends(engine, device, prompts, params)
                found.append(device.peaks["rollout"])
            else:
                library.emulated_reset_peak()
                answers = engine.generate(prompts, params)
                found.append(library.emulated_peak())
                assert answers.tokens.shape == (len(prompts), num_tokens)
                del engine
    return found[0], found[1]


def waits_of(name: str) -> Counter[str]:
    """Return where the host waits in one guided forward pass of a model of tests/model_rows.py."""
    load()
    row = ROWS[name]
    folder, told, waits = row.checkpoint(), list[Event](), Counter[str]()
    model, device = open_model(folder), torch.device("npu")
    parts = model.load(device=device, dtype=torch.float32)
    prompts = [Prompt("a blue sign", 0, i, seed=i, negative="grey", images=row.references(0)) for i in range(2)]
    predict = model.predict_velocity

    def counted(*arguments: Any) -> Tensor:
        told.clear()
        with watch(told):
            velocity = predict(*arguments)
        waits.update(each.place for each in told if each.waits)
        return velocity

    params = replace(row.guided, num_inference_steps=2, sde_steps=())
    sampler = Sampler(model, parts)
    sampler.sample(prompts, params, weight_version=0)  # build what is built once
    model.predict_velocity = counted  # type: ignore[method-assign]
    sampler.sample(prompts, params, weight_version=0)
    return Counter({place: number // 2 for place, number in waits.items()})


def waits_of_experts() -> list[tuple[list[int], bool]]:
    """Return how often the host waits in HunyuanImage-3.0's expert layer, and if gradients leave its output unchanged.

    The waits are those of a forward pass without gradients, of one with them, and of its backward pass: first for the
    plain layer, then for the layer as one graph, whose backward pass keeps what torch's compiler would keep.
    """
    load()
    torch.manual_seed(0)
    mixture = Mixture(8, 4, shared=4, num_experts=4, top_k=2)
    for p in mixture.parameters():
        nn.init.normal_(p, std=0.3)
    plain, states = mixture.to("npu").forward, torch.randn(2, 5, 8).to("npu")
    compiled = torch.compile(plain, fullgraph=True, dynamic=True, backend="aot_eager_decomp_partition")
    found = []
    for forward in (plain, compiled):
        told, waits = list[Event](), [0]
        with watch(told):
            with torch.no_grad():
                sampled = forward(states, None)[0]
            waits.append(sum(each.waits for each in told))
            trained = forward(states, None)[0]
            waits.append(sum(each.waits for each in told))
            trained.sum().backward()
            waits.append(sum(each.waits for each in told))
        found.append(([end - start for start, end in pairwise(waits)], torch.equal(sampled.cpu(), trained.cpu())))
    return found


def check(words: Sequence[str]) -> int:
    """Return the exit code of scripts/gpu_check.py with all rows, in this process on the emulated accelerator."""
    load_like_cuda()
    import gpu_check

    gc.freeze()  # collections skip the libraries
    return gpu_check.main(words, here=True)


def scorer_peak(name: str, options: dict[str, str]) -> int:
    """Return the peak bytes of a scorer on the accelerator, its default device, when it scores more than a batch."""
    library = load()
    scorer = load_scorer(name, options=options)
    images = np.zeros((neural.BATCH_SIZE + 1, 32, 32, 3), np.uint8)
    score_in_batches(
        scorer, {"image": images}, ["a sign that says more than fits"] * len(images), [{}] * 17, [()] * 17, 0.0
    )
    return int(library.emulated_peak())


def scorer_naps(name: str, options: dict[str, str], kind: str) -> tuple[list[int], list[float | None], bool]:
    """Return a scorer's bytes on the accelerator (loaded, asleep, awake, asleep), its scores, and if they repeat."""
    library, sizes, scores = load(), [], []
    scorer = load_scorer(name, options=options)
    assert scorer.move
    media = np.random.default_rng(0).integers(0, 256, (2, *((4,) if kind == "video" else ()), 56, 56, 3), np.uint8)

    def score() -> list[float | None]:
        found = scorer({kind: media}, ["a sign"] * 2, [{"fps": 8.0}] * 2)
        return [each.value for each in found]

    for asleep in (None, True, False, True):
        if asleep is not None:
            scorer.move(asleep)
        gc.collect()
        sizes.append(int(library.emulated_bytes()))
        scores.append(score() if not asleep else scores[0])
    return sizes, scores[0], all(each == scores[0] for each in scores)


def start_scorers(folder: Path, scorer: str, num_ranks: int) -> tuple[list[str], list[list[float | None]]]:
    """Start a scorer like the first rank of a machine; return the device in each server's command, and the scores.

    folder: contains sitecustomize.py, which loads the accelerator in the servers.
    """
    load()
    os.environ |= {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path]), "LOCAL_WORLD_SIZE": str(num_ranks)}
    args = change(importlib.import_module("train_flowgrpo").Args(), scorer_name=scorer)
    dist = Dist(0, 1, 0, torch.device("npu", 0), None)
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    with ExitStack() as servers:
        args = start_scorer_servers(args, dist, servers)
        threads = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        children = [pid for own in threads for pid in own.read_text().split()]
        words = [word for pid in children for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
        devices = sorted(word.partition("device=")[2] for word in words if "device=" in word)
        token, scores = Path(args.scorer.token_file).read_text(), list[list[float | None]]()
        for url in args.scorer.url.split(","):
            with RewardClient(url, token=token) as client:
                scores.append([score.value for score in client.submit({"image": image}, ["a", "b"], [{}, {}]).result()])
    return devices, scores
