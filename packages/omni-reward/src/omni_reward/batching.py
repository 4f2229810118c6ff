"""Batching of requests from many clients for one scorer, which is called from one thread.

The event loop owns the queue; only the scorer's calls run in the worker, a thread of this process. A separate process
would need a second copy of the media (12 ms for 16 images of 512 x 512) and could run only importable functions. It
would gain little, because scorers' libraries release the GIL while they compute: on 2 cores `/healthz` then answers
within 1 ms at the median and 76 ms at worst, or 11 ms and 46 ms with a scorer in pure Python. A scorer that holds the
GIL for seconds delays it as long. A scorer that crashes ends the server; clients retry until a supervisor restarts it.
"""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

import numpy as np

from omni_reward.media import ScoreRequest, group_slices
from omni_reward.wire import Score, Scorer


class ScorerFailedError(Exception):
    """The scorer raised an exception (the cause) or returned something other than scores."""


@dataclass(eq=False)
class _Piece:
    """Samples of a request that are scored in one call."""

    request: ScoreRequest
    samples: slice
    since: float  # when the request arrived
    scores: asyncio.Future[list[Score]]

    @property
    def size(self) -> int:
        return len(self.request.prompts[self.samples])

    @property
    def form(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Shape and dtype by kind; samples with equal forms can be concatenated."""
        return {kind: (array.shape[1:], array.dtype) for kind, array in self.request.media.items()}


class Batcher:
    """Queue of requests, scored in order of arrival. A call takes at most the scorer's batch size, or one group."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self._queue: list[_Piece] = []  # only the event loop touches it
        self._is_asleep = False  # only the worker touches it
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="scorer")
        self._feeding: asyncio.Task[None] | None = None

    async def score(self, request: ScoreRequest) -> list[Score]:
        """Return the scores of one request.

        Raises:
            ScorerFailedError: the scorer failed on it.
        """
        loop, now, count = asyncio.get_running_loop(), time.monotonic(), len(request.prompts)
        size = self._scorer.batch_size or count
        cuts = group_slices(request.groups) or [slice(start, start + size) for start in range(0, count, size)]
        pieces = [_Piece(request, cut, now, loop.create_future()) for cut in cuts]
        self._queue += pieces
        if self._feeding is None or self._feeding.done():
            self._feeding = asyncio.create_task(self._feed())
        results = await asyncio.gather(*(piece.scores for piece in pieces))  # raises as soon as a piece fails
        return [score for scores in results for score in scores]

    async def sleep(self, asleep: bool) -> None:
        """Move the scorer's weights to the host after the running call, or back; a later call moves them back too.

        Raises:
            ScorerFailedError: they could not be moved.
        """
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, self._move, asleep)
        except Exception as exc:  # for example, out of memory
            raise ScorerFailedError from exc

    def drop(self, request: ScoreRequest) -> bool:
        """Remove a request from the queue unless its scoring has begun; return True if it was removed."""
        is_whole = sum(piece.size for piece in self._queue if piece.request is request) == len(request.prompts)
        if is_whole:
            self._drop_pieces(request)
        return is_whole

    async def _feed(self) -> None:
        """Call the scorer until the queue is empty."""
        loop = asyncio.get_running_loop()
        while self._queue:
            pieces = self._take_pieces()
            outcomes = await loop.run_in_executor(self._worker, self._score_pieces, pieces)
            for piece, outcome in zip(pieces, outcomes, strict=True):
                if piece.scores.cancelled():
                    continue
                if isinstance(outcome, ScorerFailedError):
                    self._drop_pieces(piece.request)
                    piece.scores.set_exception(outcome)
                else:
                    piece.scores.set_result(outcome)

    def _take_pieces(self) -> list[_Piece]:
        """Take the pieces of the next call off the queue: the first one, and later ones of its form that fit."""
        first = self._queue[0]
        pieces, room = [first], (self._scorer.batch_size or 0) - first.size
        for piece in self._queue[1:]:
            if piece.size <= room and piece.form == first.form:
                pieces.append(piece)
                room -= piece.size
        self._queue = [piece for piece in self._queue if piece not in pieces]
        return pieces

    def _drop_pieces(self, request: ScoreRequest) -> None:
        """Remove the remaining pieces of a request from the queue."""
        self._queue = [piece for piece in self._queue if piece.request is not request]

    def _score_pieces(self, pieces: list[_Piece]) -> Sequence[list[Score] | ScorerFailedError]:
        """Return each piece's scores or the scorer's failure; runs in the worker."""
        try:
            self._move(False)
            scores = iter(self._call(pieces))
        except BaseException as exc:  # a scorer may raise anything, even a panic of Rust
            if len(pieces) > 1:  # one client's samples must not make another client's fail
                return [self._score_pieces([piece])[0] for piece in pieces]
            failure = ScorerFailedError()
            failure.__cause__ = exc
            return [failure]
        return [list(islice(scores, piece.size)) for piece in pieces]

    def _move(self, asleep: bool) -> None:
        """Move the scorer's weights if they can move and are not there yet; runs in the worker."""
        if self._scorer.move and asleep != self._is_asleep:
            self._is_asleep = True  # until all have moved: the next call moves all back
            self._scorer.move(asleep)
            self._is_asleep = asleep

    def _call(self, pieces: list[_Piece]) -> list[Score]:
        parts = [(piece.request, piece.samples) for piece in pieces]
        media = {kind: _join([req.media[kind][samples] for req, samples in parts]) for kind in self._scorer.media}
        prompts = [prompt for req, samples in parts for prompt in req.prompts[samples]]
        meta = [sample for req, samples in parts for sample in req.meta[samples]]
        references = [image for req, samples in parts for image in req.references[samples]]
        return self._scorer(media, prompts, meta, references, since=min(piece.since for piece in pieces))


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
