"""Scorers: clients of reward servers, or a function in this process."""

import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import numpy as np
import torch
from omni_reward import RewardClient, RewardError, Score
from omni_reward.cli import read_options
from omni_reward.files import read_token
from omni_reward.media import TEXT
from omni_reward.scorers import device_options
from omni_reward.scorers.gradable import find_fault
from omni_reward.serving import serving
from omni_rollout import Prompt
from omni_train.dist import Dist, gather_json, same_error
from omni_train.prompts.files import PromptRecord
from omni_train.terminal import one_line

from omni_rl.media.images import read_image
from omni_rl.settings import groups
from omni_rl.settings.args import RunArgs, split_options
from omni_rl.settings.eval_sets import MACHINE_URL, resolve_host
from omni_rl.settings.fields import change, flag_of, prefix_errors, require

ArgsT = TypeVar("ArgsT", bound=RunArgs)
S = TypeVar("S")
T = TypeVar("T")

Pending = Future[list[Score]]
Arrays = Mapping[str, np.ndarray]  # media by kind
Metas = Sequence[Mapping[str, object]]
References = Sequence[Sequence[np.ndarray]] | None  # per sample, for a scorer that takes them
Groups = Sequence[int] | None  # per sample, for a scorer that takes them
Grade = Callable[[Arrays, Sequence[str]], list[Score]]


class AnyScorer(Protocol):
    """A scorer of finished samples."""

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""

    def close(self) -> None:
        """Free the scorer's resources."""


class Scorer(AnyScorer, Protocol):
    """A scorer of media."""

    @property
    def kinds(self) -> Sequence[str]:
        """The exact kinds of media that it takes."""

    @property
    def takes_references(self) -> bool:
        """True if it takes the reference images of the samples."""

    @property
    def takes_groups(self) -> bool:
        """True if it compares the samples of a group and takes whole groups."""

    def submit(
        self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None, groups: Groups = None
    ) -> Pending:
        """Return the future scores of N samples, as `omni_reward.RewardClient.submit` does."""


class TextScorer(AnyScorer, Protocol):
    """A scorer of texts."""

    def submit(self, answers: Sequence[str], prompts: Sequence[Prompt]) -> list[Pending]:
        """Return futures of the scores of answers to prompts, in order, in one request or several."""


class LocalScorer:
    """A scorer in this process that calls `grade(media, texts) -> scores` immediately, with media of these kinds."""

    takes_references = takes_groups = False

    def __init__(self, grade: Grade, kinds: Sequence[str] = ("image",)) -> None:
        self.grade, self.kinds = grade, kinds
        self.busy_s = 0.0

    def submit(self, media: Arrays, prompts: Sequence[str], *others: object) -> Pending:
        """Return a completed future of the scores."""
        start = time.perf_counter()
        future: Pending = Future()
        future.set_result(self.grade(media, prompts))
        self.busy_s += time.perf_counter() - start
        return future

    def close(self) -> None:
        """Do nothing."""


class SleepingScorer:
    """A scorer whose servers offload their weights except while they score.

    Requests are held back until every rank reads a score, because then no rank is sampling.
    """

    def __init__(self, client: RewardClient, dist: Dist) -> None:
        self.client, self.dist, self.kinds = client, dist, client.kinds
        self.takes_references, self.takes_groups = client.takes_references, client.takes_groups
        self._deferred: list[tuple[Pending, Callable[[], Pending]]] = []
        client.sleep()

    @property
    def busy_s(self) -> float:
        """Seconds of work so far."""
        return self.client.busy_s

    def submit(
        self, media: Arrays, prompts: Sequence[str], meta: Metas, references: References = None, groups: Groups = None
    ) -> Pending:
        """Return the future scores of N samples, which are requested when the future is read."""
        deferred = DeferredScores(self._score)
        self._deferred.append((deferred, partial(self.client.submit, media, prompts, meta, references, groups)))
        return deferred

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def _score(self) -> None:
        """Send the requests held back, which wakes the servers, then let them sleep again. A collective."""
        deferred, self._deferred = self._deferred, []
        gather_json(self.dist, None)  # no rank is sampling any more
        pending = [try_submit(send) for _, send in deferred]
        wait(pending)
        gather_json(self.dist, None)  # no rank is scoring any more
        try:
            self.client.sleep()
        except RewardError as exc:  # the scores have arrived
            print(
                f"--scorer.sleep: {one_line(exc)}; the scorer's weights stay on the device", file=sys.stderr, flush=True
            )
        for (future, _), result in zip(deferred, pending, strict=True):
            if error := result.exception():
                future.set_exception(error)
            else:
                future.set_result(result.result())


def try_submit(send: Callable[[], Pending]) -> Pending:
    """Return the requested future. If the request cannot be sent, the future raises the error when read."""
    try:
        return send()
    except ValueError as exc:
        failed: Pending = Future()
        failed.set_exception(exc)
        return failed


def future_of_rules(grade: Callable[[], T], name: str) -> Future[T]:
    """Return a future of the rules' result, or of a RewardError if one fails. name: the flag that holds the rules."""
    future: Future[T] = Future()
    try:
        future.set_result(grade())
    except (Exception, SystemExit) as exc:  # a user's function may raise anything
        error = RewardError(f"a rule of {name} fails: {type(exc).__name__}: {exc}")
        error.__cause__ = exc
        future.set_exception(error)
    return future


class DeferredScores(Future[list[Score]]):
    """Scores that are requested when they are first read."""

    def __init__(self, request: Callable[[], None]) -> None:
        super().__init__()
        self._request = request

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the exception, or None."""
        if not self.done():
            self._request()
        return super().exception(timeout)

    def result(self, timeout: float | None = None) -> list[Score]:
        """Return the scores."""
        if not self.done():
            self._request()
        return super().result(timeout)


def join_scores(first: Future[list[S]], second: Future[list[T]], join: Callable[[S, T], Score]) -> Pending:
    """Return future scores that join two results sample by sample when read, or the error of either."""

    def request() -> None:
        try:
            joined.set_result([join(*pair) for pair in zip(first.result(), second.result(), strict=True)])
        except Exception as exc:  # handled as a scorer's error
            joined.set_exception(exc)

    joined = DeferredScores(request)
    return joined


def abstaining_scorer(reason: str = "there is no scorer") -> LocalScorer:
    """Return a scorer that gives no sample a score."""
    return LocalScorer(lambda media, texts: [Score(None, abstained=reason)] * len(texts), ())


def scorer_to_start(scorer_args: groups.Scorer) -> tuple[str, list[str]]:
    """Return the name and options of the scorer for which the run starts a server, or "" if it starts none."""
    return split_options("" if scorer_args.url else scorer_args.name)


def check_gradable(scorer_args: groups.Scorer, prompts: Mapping[str, Sequence[PromptRecord]], *, prints: bool) -> None:
    """Check that the scorer started by the run can score the prompts, given their texts and meta.

    prompts: the prompts to grade, by the setting that names them. prints: True if this rank prints a line when some
    prompts get no score.

    Raises:
        ValueError: more than half of the training prompts or all prompts of an evaluation get no score. With so many,
            training steps without any score are likely.
    """
    name, options = scorer_to_start(scorer_args)
    if not name:
        return
    find_reason = find_fault(name, read_options(options))
    for setting, records in prompts.items():
        ungradable = [(record, reason) for record in records if (reason := find_reason(record.text, record.meta))]
        is_train = setting == "--prompts"
        for record, reason in ungradable[:1]:
            line = f"{setting}: {len(ungradable)} of {len(records)} prompts get no score from --scorer {name}, first "
            line += f"prompt {record.index + 1}, {record.text!r:.80}: {reason}"
            if len(ungradable) == len(records) or (is_train and 2 * len(ungradable) > len(records)):
                raise ValueError(f"{line}. Leave these lines out, or give another --scorer")
            if prints:
                print(one_line(line), flush=True)


def start_scorer_servers(args: ArgsT, dist: Dist, open_servers: ExitStack) -> ArgsT:
    """Start servers for the scorers that are named without a URL, and return the settings with their URLs.

    The first rank of each machine starts them, with one token; they end with `open_servers` or with the process. A
    scorer with networks gets a server on each accelerator of the machine's ranks, other scorers get one. A collective.
    """
    if args.scorer.url:  # a recipe's scorer is not used
        args = change(args, scorer_name="")
    gold = split_options("" if args.eval.gold_scorer_url else args.eval.gold_scorer)
    named = {"scorer.url": scorer_to_start(args.scorer), "eval.gold_scorer_url": gold}
    to_start = {name: spec for name, spec in named.items() if spec[0]}
    if not to_start or args.run.dry_run:
        return args
    settings, token_file = dict[str, str](), args.scorer.token_file
    with same_error(dist):
        if dist.local_rank == 0:
            with prefix_errors("--scorer.token-file: "):
                token = read_token(token_file) or secrets.token_urlsafe(32)
            for name, (scorer, options) in to_start.items():
                with (
                    prefix_errors(f"{flag_of(name.removesuffix('url').rstrip('._'))}: "),
                    ThreadPoolExecutor() as threads,
                ):
                    options_by_server = server_options(scorer, options, dist)
                    contexts = [
                        serving(scorer, *(f"--option={option}" for option in server_args), token=token)
                        for server_args in options_by_server
                    ]
                    servers = [*threads.map(open_servers.enter_context, contexts)]
                urls = ",".join(server.url for server in servers)
                settings |= {name: urls, "scorer.token_file": str(servers[0].token_file)}
    return change(args, **[option for option in gather_json(dist, settings)[: dist.rank + 1] if option][-1])


def server_options(scorer: str, options: list[str], dist: Dist) -> list[list[str]]:
    """Return the options of each server of a scorer on this machine, one server per accelerator of its ranks.

    There is only one server if the ranks have no accelerator, or the scorer has no network that can be placed on any.

    Raises:
        ValueError: an option or the scorer does not exist.
    """
    count = min(int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size)), torch.accelerator.device_count())
    if dist.device.type == "cpu" or count < 2:
        return [options]
    try:
        names = device_options(scorer, read_options(options))
    except ImportError:  # reported by the server
        return [options]
    devices = [f"{dist.device.type}:{i}" for i in range(count if names else 1)]
    return [[*options, *(f"{name}={device}" for name in names)] for device in devices]


def connect(
    urls: str,
    scorer_args: groups.Scorer,
    dist: Dist,
    canary: PromptRecord,
    kinds: Sequence[str],
    *,
    samples: Arrays = MappingProxyType({}),
    name: str = "",
    parts: Mapping[str, str] = MappingProxyType({}),
) -> tuple[RewardClient | SleepingScorer, str]:
    """Open a client of a scorer at one URL, or of identical scorers at several, separated by commas.

    Each server first scores a canary: a sample with the text, meta and references of a prompt, sent by the first rank,
    or by the first rank of each machine if the URLs are of its own servers, or contain {host} or {node}.

    kinds: kinds of media that the model generates; the scorer may take only some. samples: media of the canary for
    these kinds; by default the client makes them. name: the flag that holds the URLs; default: the run's scorer.
    parts: the parts that the scores must have, each with the flag that names it.

    Returns:
        The client and the scorer's name and version.

    Raises:
        ValueError: a server does not answer, refuses the token or the canary, takes other media, or takes references
            although the prompt has none.
    """
    with prefix_errors("--scorer.token-file: "):
        token = read_token(scorer_args.token_file)
    is_first, num_ranks = dist.is_main, dist.world_size
    if MACHINE_URL.search(urls):
        is_first, num_ranks = not dist.local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size))
    open_client = partial(
        RewardClient,
        resolve_host(urls).split(","),
        token=token,
        timeout_s=scorer_args.timeout_s,
        on_failure=scorer_args.on_failure,
        proxy=scorer_args.proxy,
    )
    sleeps = scorer_args.sleep and not name
    name = name or scorer_args.flag
    with prefix_errors(f"{name}: "):
        client = open_client()
    rule, replies = "be a reward server that answers", list[list[Score]]()
    try:
        info = client.info()
        max_batch = info["limits"]["max_batch"]
        count = min(2, max_batch)  # two samples, for comparison, and so that one number for all is not valid
        has_samples = info["media"] in [[kind] for kind in samples]
        media = {kind: np.repeat(samples[kind], count, axis=0) for kind in info["media"]} if has_samples else None
        references = [[read_image(path).numpy() for path in canary.images]] if client.takes_references else None
        require((references != [[]], f"{name} must be a scorer without references, as the prompts name no images"))
        rule = "score the first prompt"
        if is_first:
            canaries = [canary.text] * count, [canary.meta] * count, references and references * count
            replies = client.check(media, *canaries)
    except RewardError as exc:
        raise ValueError(f"{name} must {rule}: {exc}") from exc
    scores = [score for reply in replies for score in reply]
    invalid = [score.abstained for score in scores if (score.abstained or "").startswith("the scorer returned ")]
    require(
        (not invalid or len(invalid) < len(scores), f"{name} must {rule}: {invalid and invalid[0]}"),
        (set(info["media"]) <= set(kinds),
         f"{name} must be a server of rewards for {' and '.join(kinds)}, takes {', '.join(info['media'])}"),
        (not sleeps or info["sleeps"],
         f"--scorer.sleep needs a scorer whose weights can move to the host, {info['scorer']} has none"),
        (TEXT not in kinds or not client.takes_groups,
         f"{name} must be a scorer of single answers, this one compares those of a group"),
        *((part in score.parts, f"{setting} must name parts of the scores, got {part!r}; this scorer has "
           f"{', '.join(sorted(score.parts)) or 'no parts'}")
          for part, setting in parts.items() for score in scores if score.abstained is None),
    )  # fmt: skip
    max_waiting = info["limits"]["max_waiting"] * len(client.urls)  # requests of all ranks that may wait at the servers
    client.close()
    client = open_client(max_in_flight=max(1, max_waiting // num_ranks))
    client.takes_references, client.kinds = references is not None, tuple(info["media"])  # no further requests
    client.takes_groups, client.scorer = info["groups"], {key: info[key] for key in ("scorer", "scorer_version")}
    version = f"{info['scorer']} {info['scorer_version']}".strip()
    try:
        return SleepingScorer(client, dist) if sleeps else client, version
    except RewardError as exc:
        raise ValueError(f"--scorer.sleep: {exc}") from exc
