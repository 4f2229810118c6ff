"""A run of a policy that thinks before it draws: its start, its engine, and rules for thoughts beside the scorer."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from omni_reward import RewardError, Score
from omni_reward.rules import Rules, check_meta, grade, version_of
from omni_rollout.conditioning import TextCache
from omni_rollout.engines.thinking import ThinkingEngine
from omni_rollout.models import open_thinking_model
from omni_rollout.thoughts import ThinkingModel, ThinkingParams
from omni_rollout.tokens import TokenParams
from omni_train.dist import gather_json
from omni_train.prompts.files import PromptRecord
from torch import Tensor, nn

from omni_rl.flow.scorers import Arrays, Metas, Pending, References, Scorer
from omni_rl.flow.tokens import check_gathered
from omni_rl.run.engines import ENGINES
from omni_rl.run.run import MediaT, OwnArgsT, Run
from omni_rl.run.world import World
from omni_rl.settings.fields import require

FLAG = "--thought-reward"


class ThoughtScorer:
    """A scorer of what was drawn, and rules for the thoughts before: the sum of both, which are parts of the score."""

    def __init__(self, scorer: Scorer, rules: Rules) -> None:
        self.scorer, self.rules = scorer, rules
        self.kinds, self.takes_references = scorer.kinds, scorer.takes_references

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self.scorer.busy_s

    def submit(self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None) -> Pending:
        """The future scores of N samples, whose meta say the `thought`."""
        said: Pending = Future()
        try:
            said.set_result(grade(self.rules, [str(each["thought"]) for each in meta], meta))
        except Exception as exc:  # a user's function may raise anything
            failed = RewardError(f"a rule of {FLAG} fails: {type(exc).__name__}: {exc}")
            failed.__cause__ = exc
            said.set_exception(failed)
        return _Sum(self.scorer.submit(media, prompts, meta, references), said)

    def close(self) -> None:
        """Free what the scorer holds."""
        self.scorer.close()


class _Sum(Future[list[Score]]):
    """The sums of scores that are still to come."""

    def __init__(self, drawn: Pending, said: Pending) -> None:
        super().__init__()
        self.drawn, self.said = drawn, said

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What either of them failed with, if one did; waits for both."""
        return self.drawn.exception(timeout) or self.said.exception(timeout)

    def result(self, timeout: float | None = None) -> list[Score]:
        """Of each sample the sum; none where what was drawn has no score."""
        pairs = zip(self.drawn.result(timeout), self.said.result(timeout), strict=True)
        return [drawn if drawn.value is None else _add(drawn, said) for drawn, said in pairs]


def _add(drawn: Score, said: Score) -> Score:
    parts = {"image": float(drawn.value or 0.0), "thought": float(said.value or 0.0)}
    return replace(drawn, value=sum(parts.values()), parts=parts, details={**drawn.details, **parts})


class ThinkingRun(Run[MediaT]):
    """One rank of a run that thinks and draws.

    base_params, eval_params: as `omni_rollout.thoughts.ThinkingParams`. parts: of the scores, which steps log.
    """

    model: ThinkingModel
    engine: ThinkingEngine
    base_params: ThinkingParams
    eval_params: ThinkingParams

    def __init__(
        self,
        args: MediaT,
        algorithm: str,
        world: World,
        *,
        thought: TokenParams,
        eval_thought: TokenParams,
        rules: Rules | None = None,
        reference: bool = False,
    ) -> None:
        super().__init__(args, algorithm, world, reference=reference)
        rule = f"--engine must be diffusers, which alone writes thoughts, got {args.engine}"
        require((not ENGINES[args.engine].library, rule))
        self.rules, self.parts = rules, ("image", "thought") if rules else ()
        self.base_params = ThinkingParams(**vars(self.base_params), thought=thought)
        self.eval_params = ThinkingParams(**vars(self.eval_params), thought=eval_thought)

    @staticmethod
    def begin(  # noqa: PLR0913 - as `Run.start`
        args: OwnArgsT,
        world: World,
        algorithm: str,
        *,
        scorer: str,
        thought: TokenParams,
        eval_thought: TokenParams,
        rules: Rules | None = None,
        reference: bool = False,
        steps: tuple[int, int] | None = None,
    ) -> "ThinkingRun[OwnArgsT]":
        """A new run, or the one that runs/NAME holds where it stopped. With --dry-run, print the plan and end.

        thought, eval_thought: how training and evaluations write. rules: that grade thoughts. The others are those of
        `Run.start`, which also says what is raised.
        """
        run = ThinkingRun(
            args, algorithm, world, thought=thought, eval_thought=eval_thought, rules=rules, reference=reference
        )
        return run._start(scorer, steps=steps)

    def _open_checkpoint(self) -> ThinkingModel:
        return open_thinking_model(self.args.model)

    def _read_inputs(self) -> None:
        super()._read_inputs()
        self.config["rules"] = version_of(self.rules) if self.rules else ""
        if self.mode == "fsdp2" and self.args.unshard == "none":
            check_gathered(self.model.empty_net(), self.dtype, self.args.engine)

    def _canary(self, records: Sequence[PromptRecord]) -> PromptRecord:
        canary = super()._canary(records)
        return replace(canary, meta={**canary.meta, "thought": ""})  # as every sample's meta

    def _check_graded(self, record: PromptRecord) -> None:
        if self.rules:
            check_meta(self.rules, record.meta, flag=FLAG)
        super()._check_graded(record)

    def _check_record(self, record: PromptRecord) -> None:
        super()._check_record(record)
        require(
            ("thought" not in record.meta, 'must not have the key "thought", under which scorers get the model\'s own')
        )

    def _describe(self) -> str:
        return f"{super()._describe()}, thoughts of at most {self.base_params.thought.max_new_tokens} tokens"

    def _open_scorers(self, scorer: str, parts: Sequence[str]) -> None:  # type: ignore[override]
        super()._open_scorers(scorer, parts)
        self.scorer = ThoughtScorer(self.scorer, self.rules) if self.rules else self.scorer

    def _make_engine(self, net: nn.Module | None, texts: TextCache) -> tuple[ThinkingEngine, nn.Module]:
        dist = self.dist
        parts = self.model.load(device=dist.device, dtype=self.dtype, net=net)
        together = (lambda ended: all(gather_json(dist, ended))) if self.mode == "fsdp2" else bool
        return ThinkingEngine(self.model, parts, texts=texts, together=together), parts.net

    def _unshard(self) -> tuple[str, ...]:
        phases = super()._unshard()
        if "rollout" not in phases:
            check_gathered(self.net, self.dtype, self.args.engine)
        return phases

    def _count(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        """Count the samples that pass the net to be drawn, and not what is written, whose lengths differ."""
        if torch.is_floating_point(next(iter((*args, *kwargs.values())))):
            super()._count(module, args, kwargs)
