"""A run of a policy over tokens: its settings, its start, its rollout and evaluation, and the batches of an update.

Letters: N samples of a step over all ranks, B samples of a batch. A sample's place among the N is its prompt's `index`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from omni_losses.sequence import TokenMean, token_weights
from omni_reward import RewardClient, RewardError, Score
from omni_reward.media import TEXT
from omni_reward.rules import SCORER, Rules, check_meta, grade, judge, open_rules, version_of
from omni_rollout import Prompt
from omni_rollout.engines.transformers import TransformersEngine
from omni_rollout.models.tokens import open_token_model
from omni_rollout.tokens import TokenEngine, TokenModel, TokenParams, TokenTrajectory
from omni_train.dist import gather_by_index, gather_json, same_error
from omni_train.files import probe_digest, write_folder_atomically
from omni_train.memory.bits import reduce_bits
from omni_train.memory.recompute import Recompute
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.shard import gathered, shard
from omni_train.weights.card import CARD_FILE, model_card
from omni_train.weights.full import PEFT_FILE, PEFT_PART, check_adapter, named_weights, save_peft
from torch import Tensor, nn

from omni_rl.flow.evals import HeldOut, Shown, describe, mixed
from omni_rl.flow.sampling import deal, expand_groups
from omni_rl.flow.scorers import AnyScorer, Pending
from omni_rl.flow.scoring import collect, gather_rewards
from omni_rl.media.prompts import media_files, with_media
from omni_rl.report import Sample
from omni_rl.run.run import AnyRun, Step
from omni_rl.run.world import World
from omni_rl.settings.fields import flag, require
from omni_rl.settings.token_args import TokenArgs

TokenT = TypeVar("TokenT", bound=TokenArgs, covariant=True)
OwnArgsT = TypeVar("OwnArgsT", bound=TokenArgs)
MAX_GATHERED = 1e9  # bytes of weights that sharded ranks may gather for every token


class TextScorer(AnyScorer, Protocol):
    """A scorer of texts."""

    def submit(self, answers: Sequence[str], prompts: Sequence[Prompt]) -> list[Pending]:
        """The future scores of answers to prompts, in order, of some after the other."""


class RuleScorer:
    """Rules of `omni_reward.rules` in this process, and what a server says, where SCORER is among the terms.

    size: most samples in a request to the server; 0 is those of a batch.
    """

    def __init__(self, rules: Rules, client: RewardClient | None = None, size: int = 0) -> None:
        self.rules = rules
        self.client, self.size, self._busy_s = client, size, 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of work so far, the server's among them."""
        return self._busy_s + (self.client.busy_s if self.client else 0.0)

    def submit(self, answers: Sequence[str], prompts: Sequence[Prompt]) -> list[Pending]:
        """The future scores, or the RewardErrors of rules that fail: all ranks then save and end."""
        start, size = time.perf_counter(), self.size or len(answers)
        pieces = [slice(i, i + size) for i in range(0, len(answers), size)] if self.client else [slice(None)]
        asked = [self._ask(self.client, answers[piece], prompts[piece]) if self.client else None for piece in pieces]
        pending = [
            self._grade(answers[piece], prompts[piece], other) for piece, other in zip(pieces, asked, strict=True)
        ]
        self._busy_s += time.perf_counter() - start
        return pending

    def close(self) -> None:
        """Close the connections."""
        if self.client:
            self.client.close()

    def _ask(self, client: RewardClient, answers: Sequence[str], prompts: Sequence[Prompt]) -> Pending:
        """What the server will say."""
        future: Pending = Future()
        try:
            references = [[image.numpy() for image in p.images] for p in prompts] if client.takes_references else None
            metas = [p.meta for p in prompts]
            return client.submit({TEXT: answers}, [p.text for p in prompts], metas, references)
        except ValueError as exc:
            future.set_exception(exc)
        return future

    def _grade(self, answers: Sequence[str], prompts: Sequence[Prompt], asked: Pending | None) -> Pending:
        """The rewards of what the rules say now and what the server will."""
        future: Pending = Future()
        metas = [p.meta for p in prompts]
        try:
            if asked is None:
                future.set_result(grade(self.rules, answers, metas))
                return future
            own = judge(self.rules, answers, metas)
        except Exception as exc:  # a user's function may raise anything
            failed = RewardError(f"a rule of --reward fails: {type(exc).__name__}: {exc}")
            failed.__cause__ = exc
            future.set_exception(failed)
        else:
            asked.add_done_callback(partial(self._settle, future, own))
        return future

    def _settle(self, future: Pending, own: Sequence[Mapping[str, float]], asked: Pending) -> None:
        """Add what the server has said, in a thread of the client."""
        try:
            future.set_result([self._sum(*both) for both in zip(own, asked.result(), strict=True)])
        except RewardError as exc:
            future.set_exception(exc)
        except Exception as exc:  # a text or meta that cannot travel
            future.set_exception(RewardError(f"--scorer-url: {exc}", fatal=True))

    def _sum(self, own: Mapping[str, float], other: Score) -> Score:
        """The reward of the server's score and of what the rules say, with each in the parts."""
        reward = self.rules.reward
        if other.value is None or reward.is_plain:
            return other
        values = {**{name: other.value for name, spec in reward.specs.items() if spec == SCORER}, **own}
        value, gate = reward.total(values)
        parts = {**{f"{SCORER}.{name}": part for name, part in other.parts.items()}, **values, **gate}
        return Score.of(value, parts=parts, details={**other.details, **parts})


class TokenRun(AnyRun[TokenT], Generic[TokenT]):
    """One rank of a run that draws text. params, eval_params are in the sense of `omni_rollout.tokens.TokenParams`."""

    model: TokenModel
    engine: TokenEngine
    scorer: TextScorer
    eval_params: TokenParams

    def __init__(self, args: TokenT, algorithm: str, world: World, *, reference: bool = False) -> None:
        super().__init__(args, algorithm, world, reference=reference)
        self.base_params = TokenParams(args.max_new_tokens, args.temperature)
        self.eval_params = TokenParams(args.max_new_tokens, args.eval_temperature, args.eval_top_p)

    @staticmethod
    def start(args: OwnArgsT, world: World, algorithm: str, *, reference: bool = False) -> "TokenRun[OwnArgsT]":
        """A new run, or the one that runs/NAME holds where it stopped. With --dry-run, print the plan and end.

        algorithm: its name, for the model card. reference: keep the first policy, for `reference()`.

        Raises:
            ValueError, OSError: something in the settings does not fit; the same on every rank.
        """
        run = TokenRun(args, algorithm, world, reference=reference)
        with same_error(run.dist):
            run._read_inputs()
        run._check_settings()
        with same_error(run.dist):
            run._open_scorer()
        run._begin()
        return run

    def evaluate(self, step: int) -> dict[str, float]:
        """Metrics of answers to the held-out prompts, as `AnyRun.evaluate`; rank 0 adds them to the report."""
        metrics, shown = dict[str, float](), []
        for held in self.held_out:
            found, own = self._evaluate_set(held)
            metrics |= found
            shown.append((held.name, own))
        if self.report:
            self.report.show_eval(step, *mixed(shown))
        return metrics

    def _evaluate_set(self, held: HeldOut[TokenParams, TextScorer]) -> tuple[dict[str, float], Shown]:
        """Metrics of a set's answers, and this rank's answers for the report."""
        prompts = prompts_of(held.records, held.samples, seed=held.seed, step=-1)  # the same for every run
        unit = self.args.batch_size * self.dist.world_size
        places = range(-(-len(prompts) // unit) * unit)  # sharded ranks run equally many batches
        filled = [replace(prompts[i % len(prompts)], index=i, group=i) for i in places]
        with gathered(self.net) if "rollout" in self.unshard else nullcontext():
            batches, pending = draw_answers(self, filled, held.params, held.scorer)
        scores, groups = collect(self.dist, pending), torch.arange(len(filled))
        rewards = gather_rewards(self.dist, batches, scores, groups)[: len(prompts)]
        return describe(held, rewards), _shown(batches, scores)

    def export(self, card: Mapping[str, object] | None) -> None:
        """Write an adapter as peft has it, or full weights as transformers has them, as `AnyRun.export`."""
        folder = self.folder / "weights"
        if self.args.lora_rank:
            save_peft(self.net, folder, self.dist, prefix=self.model.prefix, base=self.base, card=card)
            return
        full = {name: tensor.cpu() for name, tensor in named_weights(self.net) if self.dist.is_main}
        with same_error(self.dist):
            if self.dist.is_main:
                write_folder_atomically(folder, partial(self._write, full, card))

    def _write(self, weights: Mapping[str, Tensor], card: Mapping[str, object] | None, folder: Path) -> None:
        self.model.save(self.net, weights, folder)
        if card is not None:
            (folder / CARD_FILE).write_text(model_card(card, is_lora=False, library="transformers"), "utf-8")

    # The parts of `start` that depend on what is drawn

    def _open_model(self) -> None:
        with flag("--model: "):
            self.model = open_token_model(self.args.model)
            self.model.dtype = self.dtype
            self.model.check_files()
        self.adapter_form = {"file": PEFT_FILE, "part": f"{PEFT_PART}.{self.model.prefix}".rstrip(".")}

    def _read_inputs(self) -> None:
        super()._read_inputs()
        records = load_prompts(self.args.prompts, media_root=self.args.media_root)
        self.canary = self._canary([*self.eval_records, *records])
        media = sorted({file for record in records for file in media_files(record)})
        if media:
            self.config["media_digest"] = probe_digest(media, num_blocks=1)
        self.config["rules"] = version_of(self.args.rules)
        if self.mode == "fsdp2" and self.args.unshard == "none":
            self._check_gathered(self.model.empty_net())

    def _canary(self, records: Sequence[PromptRecord]) -> PromptRecord:
        return max(records, key=lambda record: len(record.images))

    def _open_scorer(self) -> None:
        """Open the rules, and the server that they name."""
        args, version, client = self.args, "", None
        if args.scorer_url:
            client, version = self.world.connect(args.scorer_url, args, self.canary, (TEXT,))
        self.scorer = RuleScorer(args.rules, client, args.score_batch_size)
        self._name_scorer(version)
        ask = partial(self.world.connect, args=args, kinds=(TEXT,))
        only = open_rules(SCORER, remote=True)
        self._open_set_scorers(
            lambda url, name, canary: RuleScorer(only, ask(url, canary=canary, name=name)[0], args.score_batch_size)
        )

    def _check_graded(self, record: PromptRecord) -> None:
        """Raise ValueError for a prompt without what the rules ask for, too."""
        if record.index % self.dist.world_size == self.dist.rank:
            check_meta(self.args.rules, record.meta)
        super()._check_graded(record)

    def _check_record(self, record: PromptRecord) -> None:
        """Raise ValueError for a prompt with media that are missing, or too long.

        Each rank checks its share, as media are read for it.
        """
        if record.index % self.dist.world_size != self.dist.rank:
            return
        most = self.args.max_prompt_tokens
        if most or self.model.MEDIA or media_files(record) or "messages" in record.meta:
            (prompt,) = prompts_of([record], 1, seed=0, step=0)
            encoded = self.model.encode(prompt)
            if self.args.engine == "vllm":
                from omni_rollout.engines.vllm import media_of

                media_of(encoded, self.model.config)  # refuses what vLLM would not answer
            count = len(encoded["input_ids"])
            require((not most or count <= most, f"must have at most --max-prompt-tokens {most} tokens, got {count}"))

    def _read_start(self, folder: str) -> None:
        net = self._add_adapters(self.model.empty_net())
        rule = "must be the folder of an adapter, with --lora-rank > 0; full weights are a --model"
        require((self.args.lora_rank and (Path(folder) / PEFT_FILE).is_file(), f"{rule}, got {folder}"))
        check_adapter(net, folder, **self.adapter_form)
        self._adapters = {"": Path(folder)}

    def _describe(self) -> str:
        return f"{type(self.model).__name__}, answers of at most {self.args.max_new_tokens} tokens"

    def _open_engine(self, net: nn.Module | None) -> tuple[TokenEngine, nn.Module]:
        args, device = self.args, self.dist.device
        if args.engine == "vllm":
            from omni_rollout.engines.vllm import VllmEngine

            answer = max([args.max_new_tokens, *(held.max_new_tokens or 0 for held in args.eval)])
            most = args.max_prompt_tokens and args.max_prompt_tokens + answer
            share = args.gpu_memory_utilization
            engine = VllmEngine(self.model, device=device, dtype=self.dtype, memory_share=share, max_tokens=most)
            return engine, self.model.load_net(device="cpu", dtype=self.dtype) if net is None else net
        net = self.model.load_net(device=device, dtype=self.dtype) if net is None else net
        return TransformersEngine(self.model, net, synced=self.mode == "fsdp2"), net

    def _add_adapters(self, net: nn.Module, *frozen: str) -> nn.Module:
        """As `AnyRun`, but for parts of the model that stay as they are."""
        super()._add_adapters(net, *frozen)
        for name in () if self.args.lora_rank else self.model.FROZEN:
            net.get_submodule(name).requires_grad_(False)
        return net

    def _fill(self, *, trained: bool) -> nn.Module:
        args, is_sharded = self.args, self.mode == "fsdp2"
        dtype = torch.float32 if trained and not args.lora_rank else self.dtype
        net = self.model.load_net(device="cpu", dtype=dtype)
        if trained:
            self._add_adapters(net, *self.frozen)
        if args.base_dtype != "auto":
            net = reduce_bits(net, args.base_dtype, self.model.BLOCK_NAMES, self.dist.device)
        if not is_sharded:
            return net.to(self.dist.device)
        names = self.model.BLOCK_NAMES
        return shard(net, self.mesh, mode="fsdp2", block_names=names, compute_dtype=self.dtype)

    def _recompute(self, run_block: Recompute) -> None:
        """Have blocks computed again in backward passes alone: transformers asks whether a block is in training."""
        blocks = [m for m in self.net.modules() if hasattr(m, "gradient_checkpointing")]

        def choose(module: nn.Module, args: object) -> None:
            for block in blocks:
                block.training = torch.is_grad_enabled()  # of the block's own flag; dropout asks its parts

        for block in blocks:
            block.gradient_checkpointing, block._gradient_checkpointing_func = True, run_block  # type: ignore[assignment]
        self.net.register_forward_pre_hook(choose)

    def _unshard(self) -> tuple[str, ...]:
        phases = super()._unshard()
        if "rollout" not in phases:
            self._check_gathered(self.net)
        return phases

    def _check_gathered(self, net: nn.Module) -> None:
        """Raise ValueError where a token would gather too much."""
        if self.args.engine == "transformers":
            check_gathered(net, self.dtype, self.args.engine)

    def _count(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        self.calls[self.log.last_phase, torch.is_grad_enabled(), torch.Size()] += len(kwargs["input_ids"])


def check_gathered(net: nn.Module, dtype: torch.dtype, engine: str) -> None:
    """Raise ValueError where ranks would gather too much for each token."""
    size = sum(p.numel() for p in net.parameters()) * dtype.itemsize
    rule = (
        f"--shard fsdp2 would gather {size / 1e9:.1f} GB of weights for every token that --engine {engine} "
        "draws: give --unshard rollout, which gathers them once a step, or --shard ddp with --lora-rank > 0"
    )
    require((size <= MAX_GATHERED, rule))


def prompts_of(records: Sequence[PromptRecord], group_size: int, *, seed: int, step: int) -> list[Prompt]:
    """`group_size` samples of each prompt, group by group, each with a seed of its own, and with their media."""
    samples = expand_groups(records, group_size, seed=seed, step=step)
    return [with_media(sample, records[sample.group]) for sample in samples]


def draw_answers(
    run: TokenRun[TokenArgs], prompts: Sequence[Prompt], params: TokenParams, scorer: TextScorer | None = None
) -> tuple[list[TokenTrajectory], list[Pending]]:
    """This rank's batches of `prompts`, and their scores to come, of the run's scorer or another one.

    Raises:
        RuntimeError: the engine samples with other weights than those of the last sync.
    """
    batches: list[TokenTrajectory] = []
    pending: list[Pending] = []
    dealt = list(deal(prompts, run.dist, run.args.batch_size))
    for own, batch in zip(dealt, _generate(run.engine, dealt, params), strict=True):
        if batch.weight_version != run.version:
            raise RuntimeError(f"the engine samples with weights {batch.weight_version}, the trainer has {run.version}")
        batches.append(batch)
        run.counts["drawn"] += len(batch)
        pending += (scorer or run.scorer).submit(batch.answers, own)
    return batches, pending


def _generate(engine: TokenEngine, dealt: Sequence[Sequence[Prompt]], params: TokenParams) -> Iterator[TokenTrajectory]:
    """The answers to batches of prompts, one by one, or all at once from an engine that cuts batches itself."""
    if engine.shares_weights:
        yield from (engine.generate(own, params) for own in dealt)
        return
    rows = torch.arange(sum(map(len, dealt))).split([len(own) for own in dealt])
    whole = engine.generate([*chain(*dealt)], params)
    yield from (whole.select(own) for own in rows)


def show_answers(
    run: TokenRun[TokenArgs], step: Step, batches: Sequence[TokenTrajectory], scores: Sequence[Score]
) -> None:
    """Put the best and worst of some of rank 0's answers into the report."""
    if run.report:
        run.report.show_samples(step.number + 1, *_shown(batches, scores))


def _shown(batches: Sequence[TokenTrajectory], scores: Sequence[Score]) -> Shown:
    """The media of each of this rank's prompts, by kind, and what the report says of the answers."""
    media, rows = [], []
    drawn = [(p, answer) for batch in batches for p, answer in zip(batch.prompts, batch.answers, strict=True)]
    for (p, answer), score in zip(drawn, scores, strict=True):
        own = {"image": p.images[0] if p.images else None, "video": p.video, "audio": p.audio}
        media.append({kind: tensor for kind, tensor in own.items() if tensor is not None})
        said = (score.value, p.group, p.seed, score.details, score.abstained, p.images[1:], p.rates)
        rows.append(Sample(p.text, *said, answer=answer))
    return media, rows


@dataclass(frozen=True)
class TokenBatch:
    """Answers of one forward of an update. advantages: [B]. weights: [B], of each token of an answer; 0 fills up.

    by_answer, by_token: its answers and tokens over those of the mean forward of all ranks. A metric times one of them
    is, in the mean over forwards and ranks, a mean over all answers or tokens.
    """

    trajectory: TokenTrajectory
    advantages: Tensor
    weights: Tensor
    by_answer: float
    by_token: float


def pack(
    run: TokenRun[TokenArgs], batches: Sequence[TokenTrajectory], advantages: Tensor, keep: Tensor, *, mean: TokenMean
) -> list[list[TokenBatch]]:
    """This rank's batches of each minibatch, equally many on every rank, with the weights of a mean over all ranks.

    A minibatch is a consecutive share of the samples that are kept. A batch holds answers of like length, at most
    --batch-size, and with their prompts and padding at most --tokens-per-batch tokens.

    advantages, keep: [N], of all ranks' samples in order.
    """
    args, dist, drawn = run.args, run.dist, TokenTrajectory.cat(batches)
    lengths = gather_by_index(dist, drawn.indices, drawn.lengths.float(), len(keep))
    sizes = [(len(e["input_ids"]), n) for e, n in zip(drawn.encoded, drawn.lengths.tolist(), strict=True)]
    shares, own = keep.nonzero()[:, 0].tensor_split(args.num_minibatches), []
    for share in shares:
        rows = torch.isin(drawn.indices, share).nonzero()[:, 0].tolist()
        own.append(_cut(rows, sizes, args.batch_size, args.tokens_per_batch))
    counts = torch.tensor(gather_json(dist, [len(cuts) for cuts in own])).amax(dim=0)
    chosen: list[list[TokenBatch]] = []
    forwards = sum(max(1, count) for count in counts.tolist()) * dist.world_size
    mean_answers, mean_tokens = int(keep.sum()) / forwards, lengths[keep].sum().item() / forwards
    for share, cuts, count in zip(shares, own, counts.tolist(), strict=True):
        weights = torch.zeros(len(keep))
        weights[share] = token_weights(lengths[share], mean=mean, max_tokens=args.max_new_tokens)
        chosen.append([])
        for rows in [*cuts, *[[0]] * (max(1, count) - len(cuts))]:
            batch = drawn.select(rows).trim()
            is_real = len(chosen[-1]) < len(cuts)
            own_weights, own_advantages = weights[batch.indices] * is_real, advantages[batch.indices]
            by = len(batch) * is_real / mean_answers, batch.lengths.sum().item() * is_real / mean_tokens
            chosen[-1].append(TokenBatch(batch, own_advantages.to(dist.device), own_weights.to(dist.device), *by))
    return chosen


def _cut(rows: Sequence[int], sizes: Sequence[tuple[int, int]], most: int, budget: int) -> list[list[int]]:
    """Rows, the longest first, in batches of at most `most`, and of at most `budget` tokens (0: any) if one fits.

    sizes: tokens of the prompt and of the answer; each is padded to the batch's longest.
    """
    cuts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: -sum(sizes[row])):
        grown = [*(cuts[-1] if cuts else ()), row]
        width = sum(max(sizes[i][part] for i in grown) for part in (0, 1))
        if not cuts or len(grown) > most or (budget and len(grown) * width > budget):
            cuts.append([])
        cuts[-1].append(row)
    return cuts
