"""A run: its settings, ranks, policy, session, engine and scorer, and the operations shared by all training steps.

`omni_rl.run.start.open_run` builds a run from settings; tests build one by hand.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, Literal, TypeVar, get_args

import torch
from omni_rollout import Engine, Model, Params
from omni_rollout.models.routing import ExpertLoad, find_routing
from omni_rollout.thoughts import ThinkingModel, ThinkingParams
from omni_rollout.tokens import TokenEngine, TokenModel, TokenParams
from omni_rollout.types import WeightedEngine
from omni_train.breaker import Breaker
from omni_train.dist import Dist, Memory, gather_json, mean_metrics, memory, merge_metric
from omni_train.flops import Calls, FlopTable
from omni_train.optim import StepResult, optimizer_step, scheduled_lr
from omni_train.progress import advance, count_forward, phase
from omni_train.prompts.sampler import PromptSampler, sample_seed
from omni_train.shard import gathered
from omni_train.weights.full import named_weights
from torch import Tensor, nn

from omni_rl.flow.evals import HeldOut
from omni_rl.flow.scorers import AnyScorer, Scorer, TextScorer
from omni_rl.run.metrics import EXTREMES
from omni_rl.run.policy import Policy
from omni_rl.run.samplers import Samplers
from omni_rl.run.session import Session
from omni_rl.run.world import World
from omni_rl.settings.args import RunArgs

ArgsT = TypeVar("ArgsT", bound=RunArgs, covariant=True)
ModelT = TypeVar("ModelT", bound=Model | TokenModel, covariant=True)
EngineT = TypeVar("EngineT", bound=WeightedEngine, covariant=True)
ParamsT = TypeVar("ParamsT", bound=Params | TokenParams, covariant=True)
ScorerT = TypeVar("ScorerT", bound=AnyScorer, covariant=True)


CountSamples = Callable[[Mapping[str, Tensor], tuple[Tensor, ...]], tuple[int, torch.Size] | None]
Gate = Literal["exact", "by-gradients", "noisy", "wrong"]
REPEATS = 4  # repeats of a forward, to test determinism: rounding may hide noise once
PHASE_LABELS = {"eval": "evaluating", "reward_wait": "", "save": "saving", "sync": "sending weights", "read": "reading"}
ROUNDING = {"float32": 1e-5, "bfloat16": 4e-3, "float16": 1e-3}  # largest |ratio - 1| due to other kernels or batches


@dataclass(frozen=True)
class Breakers:
    """Measurements of a run, each disabled by its first failure."""

    memory: Breaker = field(default_factory=partial(Breaker, "the memory in use"))
    calls: Breaker = field(default_factory=partial(Breaker, "the count of forwards"))
    load: Breaker = field(default_factory=partial(Breaker, "the load of experts"))
    pictures: Breaker = field(default_factory=partial(Breaker, "the samples of the report"))
    card: Breaker = field(default_factory=partial(Breaker, "the model card"))
    peak: Breaker = field(default_factory=partial(Breaker, "the peak of the device"))


@dataclass
class Run(Generic[ArgsT, ModelT, EngineT, ParamsT, ScorerT]):
    """One rank of a run.

    base_params: sampling parameters of training, without stochastic steps. held_out: the evaluation sets; the first is
    --eval.prompts. trained: the trained experts, as in `Model.nets`. streams: latent elements of each medium, if frames
    and sound have separate losses. algorithm, base: for the model card. score_parts: parts of scores to log. sleeps:
    True if the engine sleeps during updates. version: version of the engine's weights. counts: `sampled` is the number
    of samples. calls: samples that passed through the nets. flops: FLOPs of the net, and peak_tflops: of the device,
    both on the first rank. load: load of the experts in the engine, or None without a mixture of experts. samplers: the
    ranks that only sample, if there are any and this rank trains. num_updates: optimizer steps per training step.
    """

    args: ArgsT
    world: World
    model: ModelT
    policy: Policy
    engine: EngineT
    scorer: ScorerT
    session: Session
    prompts: PromptSampler
    base_params: ParamsT
    held_out: Sequence[HeldOut[Any, Any]] = ()
    trained: Mapping[str, str] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    algorithm: str = ""
    base: str = ""
    score_parts: Sequence[str] = ()
    sleeps: bool = False
    version: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    calls: Calls = field(default_factory=Counter)
    load: ExpertLoad | None = None
    flops: FlopTable | None = None
    peak_tflops: float | None = None
    samplers: Samplers | None = None
    num_updates: int = 1
    breakers: Breakers = field(default_factory=Breakers)

    @property
    def dist(self) -> Dist:
        """The process group and the device of this rank."""
        return self.world.dist

    @property
    def gate(self) -> Gate:
        """The class of the run, set by `reclassify` in this or an earlier start."""
        return self.session.config.get("gate", "exact")  # type: ignore[return-value]  # set by `reclassify`

    @property
    def rounding(self) -> float:
        """The largest |ratio - 1| that the rounding of other kernels or batches explains."""
        return ROUNDING[self.args.policy.dtype]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `time/<name>_s`, and report errors in it under this phase.

        Sharded weights are gathered in the block if `Policy.unshard` has the phase.
        """
        is_gathered = name in self.policy.unshard and not (name == "rollout" and self.samplers)
        gathering = gathered(self.policy.net) if is_gathered else nullcontext()
        with phase(PHASE_LABELS.get(name, name)), self.session.log.phase(name), gathering:
            yield

    def optimizer_step(self, step: "Step", *, has_signal: bool = True) -> StepResult:
        """Clip the gradients, already summed over ranks by `Policy.backward`, and step the optimizer.

        Without a signal, clear the gradients instead, because only momentum and weight decay would move the weights.

        has_signal: False if this minibatch has no signal.

        Raises:
            RewardError: from `step.finish_grading`, on every rank, before the weights change.
            FloatingPointError: float16 gradients are infinite or NaN at any loss scale; raised on every rank.
        """
        step.finish_grading()
        args, policy, optim = self.args, self.policy, self.args.optim
        lr = scheduled_lr(
            step.number, args.run.train_steps, args.lr or 0.0, optim.lr_scheduler_type, optim.warmup_steps
        )
        step.metrics["policy/lr"] = lr
        if not (step.has_signal and has_signal):
            policy.optimizer.zero_grad(set_to_none=True)
            return StepResult(grad_norm=0.0, skipped=True)
        options = {"lr": lr, "max_grad_norm": optim.max_grad_norm}
        result = optimizer_step(policy.optimizer, policy.params, **options, dist=self.dist, scaler=policy.scaler)
        if policy.scaler and result.skipped and policy.scaler.get_scale() < 1:
            raise FloatingPointError("gradients must be finite in float16 at some loss scale >= 1, but are at none")
        return result

    def minibatches(self, step: "Step", *, epochs: int) -> list[int]:
        """Return the minibatch of each update of a step: all in order, then shuffled in each later epoch.

        The order depends only on the seed, the step and the epoch, not on the number of ranks.
        """
        numbers = range(self.args.data.num_minibatches)
        keys = [[sample_seed(self.args.run.seed, step.number, -1 - e, i) for i in numbers] for e in range(1, epochs)]
        order = [*numbers, *(i for epoch_keys in keys for i in sorted(numbers, key=epoch_keys.__getitem__))]
        self.num_updates = len(order)
        return order

    @contextmanager
    def updating(self, step: "Step") -> Iterator[None]:
        """Let the engine sleep in the block, and update the moving average of the weights after it."""
        step.metrics |= self.memory("rollout_")
        self.num_updates = self.args.data.num_minibatches
        with self.phase("update"):
            if self.sleeps:
                self.engine.sleep()
            step.metrics |= self.memory("asleep_")
            yield
            if self.args.policy.ema_decay:
                self.policy.ema.update(step.number)
            if self.sleeps:
                self.engine.wake()

    def sync(self, step: "Step", *, version: int | None = None) -> None:
        """Send the weights to the engine as `version` (default: the number of finished steps including this one)."""
        with self.phase("sync"):
            step.metrics["perf/sync_mb"] = self.sync_weights(step.number + 1 if version is None else version) / 2**20

    def sync_weights(self, version: int) -> int:
        """Send the weights to the engine; return the bytes that were copied. Every rank calls it."""
        self.engine.load_weights(() if self.engine.shares_weights else named_weights(self.policy.net), version=version)
        self.version = version
        return self.engine.moved_bytes

    def memory(self, when: str, *, peak: bool = False) -> dict[str, float]:
        """Return metrics of the memory in use, and with `peak` also of peak, reserved and used memory."""
        return self.breakers.memory(lambda: memory_metrics(memory(self.dist.device), when, peak=peak)) or {}

    def check_ratio(
        self,
        deviations: Sequence[Tensor],
        tolerance: float,
        step: "Step",
        *,
        gap_of: Callable[[int], Tensor] | None = None,
        limit: float = 0.0,
    ) -> float | None:
        """Return the largest |ratio - 1| of all ranks before a step's first update. Every rank calls it.

        Return None if the run has changed its class; the caller then repeats the update, with gradients cleared.

        Args:
            deviations: 0-d tensors, one per forward of this rank, equally many on every rank: the largest |ratio - 1|
                of its samples, with ratio = exp(log_prob - old_log_prob).
            tolerance: largest deviation allowed; 0 if sampling and update share functions, weights and shapes.
            gap_of: returns the log-probs of a forward, given its index in `deviations`, minus the old ones, in any
                shape. If given, the first step after a start may change the class; see `reclassify`.
            limit: largest deviation that rounding explains, for `gap_of`.

        Raises:
            RuntimeError: the deviation of some rank is larger. Raised on every rank; the message names the rank, the
                forward and possible causes.
            FloatingPointError: the deviation of some rank is NaN. Raised on every rank.
        """
        by_rank = torch.tensor(gather_json(self.dist, torch.stack([*deviations]).detach().float().tolist()))
        worst = by_rank.max().item()
        if math.isnan(worst):
            rank = int(by_rank.isnan().any(dim=1).nonzero()[0])
            raise FloatingPointError(f"step {step.number}: log-probs must be finite, but are not on rank {rank}")
        if worst <= tolerance or not self.world.has_values:
            return worst
        is_first = step.number == max(self.session.num_done, 0)
        if gap_of and is_first and self.gate == "exact" and worst <= limit and self.reclassify(step, by_rank, gap_of):
            return None
        raise ratio_error(by_rank, tolerance, step.number)

    def reclassify(self, step: "Step", by_rank: Tensor, gap_of: Callable[[int], Tensor]) -> bool:
        """Return True on every rank if the run can continue although the ratio is not exactly 1.

        It then continues with old log-probs from forwards with gradients. All ranks take the worst class of any rank:

            exact: every deviation is 0;
            by-gradients: forwards without gradients reproduce the old log-probs, forwards with gradients do not;
            noisy: forwards are not deterministic;
            wrong: forwards are deterministic, but do not reproduce the old log-probs.

        by_rank: deviations [ranks, forwards] of an update. gap_of: as in `check_ratio`.
        """
        forward = int(by_rank.max(dim=0).values.argmax())
        with torch.no_grad():
            first, *repeats = [gap_of(forward) for _ in range(REPEATS)]
        is_deterministic = all(torch.equal(first, repeat) for repeat in repeats)
        rank_gate: Gate = "noisy" if not is_deterministic else "wrong" if first.any() else "by-gradients"
        gate = max(gather_json(self.dist, rank_gate), key=get_args(Gate).index)
        if gate == "wrong":
            return False
        self.session.config["gate"] = gate
        step.metrics[f"policy/gap_{gate.replace('-', '_')}"] = by_rank.max().item()  # raises an alarm
        self.policy.optimizer.zero_grad(set_to_none=True)
        return True

    def policy_metrics(
        self, forwards: Sequence[Mapping[str, Tensor]], results: Sequence[StepResult]
    ) -> dict[str, float]:
        """Return metrics `policy/...` of an update: means or extremes over forwards and ranks, and of optimizer steps.

        forwards: metrics of each forward of this rank, 0-d tensors.

        Raises:
            FloatingPointError: the loss is not finite; raised on every rank.
        """
        values: dict[str, list[Tensor]] = {}
        for name, value in chain.from_iterable(metrics.items() for metrics in forwards):
            values.setdefault(name, []).append(value)
        merged = [merge_metric(torch.stack(tensors), EXTREMES.get(name, "mean")) for name, tensors in values.items()]
        rank_metrics = dict(zip(values, torch.stack(merged).tolist(), strict=True))
        merged_metrics = mean_metrics(self.dist, rank_metrics, merges=EXTREMES, finite=("loss",))
        if self.policy.scaler:  # overflows are expected while it searches for the scale
            results = [result for result in results if math.isfinite(result.grad_norm)]
            merged_metrics["loss_scale"] = self.policy.scaler.get_scale()
        merged_metrics["skipped_updates"] = sum(result.skipped for result in results)
        if results:
            merged_metrics["grad_norm"] = sum(result.grad_norm for result in results) / len(results)
        if shares := [result.eps_share for result in results if not result.skipped]:
            merged_metrics["eps_share"] = sum(shares) / len(shares)
        return {f"policy/{name}": value for name, value in merged_metrics.items()}

    def count_calls(self, count_samples: CountSamples) -> None:
        """Count, from here on, the samples that pass through the nets, and those that reach each expert."""

        def count_call(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            count_forward()
            if counted := count_samples(kwargs, args):
                samples, shape = counted
                self.calls[self.session.log.last_phase, torch.is_grad_enabled(), shape] += samples

        def count_expert(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
            self.counts[kwargs["expert"]] += torch.is_grad_enabled()

        policy = self.policy
        for net in {self.engine.net, policy.net, policy.reference_net, *policy.teachers.values()}:
            if net is not None:  # the embedded engine's net is the trainer's
                net.register_forward_pre_hook(self.breakers.calls.wrap(count_call), with_kwargs=True)
        if self.model.boundary:
            policy.net.register_forward_pre_hook(self.breakers.calls.wrap(count_expert), with_kwargs=True)
        if routing := find_routing(self.engine.net):
            self.load = ExpertLoad(routing.num_experts, counts=lambda: self.session.log.last_phase == "rollout")
            routing.register_forward_hook(self.breakers.load.wrap(self.load.count))

    def count_backwards(self) -> None:
        """Report the backward passes of updates as progress, from here on."""
        backward = self.policy.backward

        def backward_with_progress(loss: Tensor, *, of: int) -> None:
            backward(loss, of=of)
            advance(total=of * self.num_updates, unit="batches")

        self.policy.backward = backward_with_progress

    def close(self) -> None:
        """Close the engine, the scorers and their servers, and release the folder."""
        scorers = (
            self.scorer,
            *(candidate for eval_set in self.held_out for candidate in (eval_set.scorer, eval_set.watch) if candidate),
        )
        for scorer in {id(candidate): candidate for candidate in scorers}.values():
            scorer.close()
        if self.samplers:
            self.samplers.close()
        self.session.servers.close()
        self.engine.close()
        if self.session.lock:
            self.session.lock.release()


def memory_metrics(usage: Memory, when: str, *, peak: bool) -> dict[str, float]:
    """Return the metrics of `Run.memory`."""
    peaks = {"peak": usage.peak_mb, "reserved": usage.reserved_mb, "used": usage.used_mb} if peak else {}
    peak_metrics = {f"perf/{name}_memory_mb": value for name, value in peaks.items() if not math.isnan(value)}
    return {f"perf/memory_{when}mb": usage.current_mb} | peak_metrics


def ratio_error(by_rank: Tensor, tolerance: float, step: int) -> RuntimeError:
    """Return the error for deviations [ranks, forwards] above the tolerance: the first such forward, and the causes."""
    exceeds = by_rank > tolerance
    rank, forward = exceeds.nonzero()[0].tolist()
    return RuntimeError(
        f"step {step}: before the first update the ratio must be 1 within {tolerance}, but is off by "
        f"{by_rank.max().item():.3g}: in {int(exceeds.sum())} of {exceeds.numel()} forwards, first in forward "
        f"{forward} of rank {rank}. The update does not compute what the engine sampled with. Causes: other weights "
        "(a missed sync), another batch shape, padding, dtype or attention kernel, another sigma, window or "
        "guidance scale."
    )


AnyRun = Run[RunArgs, Any, Any, Any, Any]
MediaRun = Run[ArgsT, Model, Engine, Params, Scorer]
ThinkingRun = Run[ArgsT, ThinkingModel, Engine, ThinkingParams, Scorer]
TokenRun = Run[ArgsT, TokenModel, TokenEngine, TokenParams, TextScorer]


def first_input(kwargs: Mapping[str, Tensor], args: tuple[Tensor, ...]) -> tuple[int, torch.Size] | None:
    """Return the number of samples in a forward and the shape of one, from its first input, a batch."""
    first = next(iter((*args, *kwargs.values())))
    return len(first), first[0].shape


class Step:
    """One training step: its `number`, counted from 0, and its `metrics` to log.

    version: version of the weights that sample it, which is the number of finished steps at that time; by default all
    earlier steps. has_signal: True if any sample of any rank has a nonzero advantage; set by trainers that know it.
    grade_all: grades the samples of all ranks, on every rank, if the update begins before all scores have arrived; see
    `flow.batches`.
    """

    def __init__(self, number: int, version: int | None = None) -> None:
        self.number = number
        self.version = number if version is None else version
        self.metrics: dict[str, float] = {}
        self.has_signal = True
        self.grade_all: Callable[[], object] = lambda: None

    @property
    def staleness(self) -> int:
        """Number of updates between the weights that sampled the step and the trained ones; 0 for a repeated step."""
        return max(0, self.number - self.version)

    def finish_grading(self) -> None:
        """Call `grade_all` and drop it, because it references the samples. Later calls do nothing."""
        grade_all, self.grade_all = self.grade_all, lambda: None
        grade_all()
