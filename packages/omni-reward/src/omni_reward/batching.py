"""Feeds one scorer, a call at a time, from the requests of many clients.

The queue belongs to the event loop; only the calls themselves run in the worker, which is a thread of this process. A
process of its own would cost a second copy of the media (12 ms for 16 images of 512 x 512) and could only run what can
be imported there. What it would bring is small: the libraries that scorers use let go of the interpreter's lock while
they compute. On 2 cores `/healthz` then answers within 1 ms at the median and 76 ms at worst; with a scorer of pure
Python within 11 ms and 46 ms. A scorer that holds the lock for seconds in one C call does delay it by as much, and one
that crashes takes the server down, which the client's retries bridge once something starts it again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from types import TracebackType

import numpy as np

from omni_reward.media import ScoreRequest
from omni_reward.wire import Score, Scorer


class ScorerFailedError(Exception):
    """The scorer raised, or returned something else than scores: the cause."""


@dataclass(eq=False)
class _Job:
    """A request in the queue: when it came, how many of its samples have been taken, and the scores so far."""

    request: ScoreRequest
    done: asyncio.Future[list[Score]]
    since: float = field(default_factory=time.monotonic)
    num_taken: int = 0
    scores: list[Score] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        return len(self.request.prompts) - self.num_taken

    @property
    def form(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype by kind; the samples of jobs of the same form can be put into one array."""
        return {kind: (array.shape[1:], array.dtype) for kind, array in self.request.media.items()}


_Piece = tuple[_Job, slice]  # samples of one job that one call scores


class Batcher:
    """Scores requests in the order of their arrival, in calls of at most the scorer's batch size."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._queue: deque[_Job] = deque()  # first come first; only the event loop touches it
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._feeding: asyncio.Task[None] | None = None

    async def score(self, request: ScoreRequest) -> list[Score]:
        """Return the scores of one request.

        Raises:
            ScorerFailedError: the scorer failed on it.
        """
        job = _Job(request, asyncio.get_running_loop().create_future())
        self._queue.append(job)
        if self._feeding is None or self._feeding.done():
            self._feeding = asyncio.create_task(self._feed())
        return await job.done

    def drop(self, request: ScoreRequest) -> bool:
        """Take a request off the queue, unless its scoring has begun; True when it was there."""
        jobs = [job for job in self._queue if job.request is request and not job.num_taken]
        for job in jobs:
            self._queue.remove(job)
        return bool(jobs)

    async def _feed(self) -> None:
        """Call the scorer until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            pieces = self._take()
            outcomes = await loop.run_in_executor(self._worker, self._score_pieces, pieces)
            for (job, _), outcome in zip(pieces, outcomes, strict=True):
                self._settle(job, outcome)

    def _take(self) -> list[_Piece]:
        """Take samples for the next call off the queue: those of the first job, and of later ones that fit it."""
        first, room = self._queue[0], self._scorer.batch_size
        if room is None:
            return [self._cut(first, first.num_left)]
        pieces, form = [], first.form
        for job in [job for job in self._queue if job.form == form]:
            size = min(room, job.num_left)
            pieces += [self._cut(job, size)] if size else []
            room -= size
        return pieces

    def _cut(self, job: _Job, size: int) -> _Piece:
        samples = slice(job.num_taken, job.num_taken + size)
        job.num_taken += size
        if not job.num_left:
            self._queue.remove(job)
        return job, samples

    def _settle(self, job: _Job, outcome: list[Score] | ScorerFailedError) -> None:
        if isinstance(outcome, ScorerFailedError):
            if job.num_left:
                self._queue.remove(job)
            if not job.done.cancelled():
                job.done.set_exception(outcome)
            return
        job.scores += outcome
        if len(job.scores) == len(job.request.prompts) and not job.done.cancelled():
            job.done.set_result(job.scores)

    def _score_pieces(self, pieces: list[_Piece]) -> Sequence[list[Score] | ScorerFailedError]:
        """Return the scores of each piece, or how the scorer failed on it; runs in the worker."""
        try:
            scores = iter(self._call(pieces))
        except BaseException as exc:  # a scorer may raise anything, even a panic of Rust
            if len(pieces) > 1:  # one client's samples must not fail another's
                return [self._score_pieces([piece])[0] for piece in pieces]
            failure = ScorerFailedError()
            failure.__cause__ = exc.with_traceback(_skip_ours(exc.__traceback__))
            return [failure]
        return [list(islice(scores, samples.stop - samples.start)) for _, samples in pieces]

    def _call(self, pieces: list[_Piece]) -> list[Score]:
        parts = [(job.request, samples) for job, samples in pieces]
        media = {kind: _join([req.media[kind][samples] for req, samples in parts]) for kind in self._scorer.media}
        prompts = [prompt for req, samples in parts for prompt in req.prompts[samples]]
        meta = [sample for req, samples in parts for sample in req.meta[samples]]
        references = [own for req, samples in parts for own in req.references[samples]]
        return self._scorer(media, prompts, meta, references, since=min(job.since for job, _ in pieces))


def _skip_ours(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the scorer's first line on."""
    while traceback and traceback.tb_next and traceback.tb_frame.f_globals.get("__package__") == "omni_reward":
        traceback = traceback.tb_next
    return traceback


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
