"""Prompts and random seeds as pure functions of the step, so that a resumed run needs no saved state.

Letters: P prompts a step takes, M prompts in the file. Step s takes the places s*P ... s*P + P - 1 of an endless list
that strings one ordering of the M prompts (an epoch) after another. Up to `MAX_SORTED` prompts are ordered by sorting
their hashes; of more each place is computed when it is asked for, so that a million prompts take no time.
"""

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from omni_train.prompts.files import PromptRecord, RecordCheck, read_lines

MAX_SORTED = 2**16


class PromptSampler:
    """Draws P prompts a step, without replacement within an epoch and without repeats within a step.

    Files: `.txt` holds one prompt a line; `.jsonl` one object a line with "prompt", maybe "negative_prompt", maybe
    "images", the path of a reference, or a list of them, relative to the file, maybe "audio" and "video", paths too,
    maybe "height" and "width", and further keys that become `meta`, as do paths and sizes. Blank lines are skipped. In
    place of "prompt" it may hold "messages", a chat whose last message is the user's. `.parquet` holds such an object a
    row, in which files may also be bytes, as the datasets library has them: see `prompts.table.media_folder`.
    check, media_root: as `load_prompts`.

    Raises:
        ValueError: the file is empty or malformed, or `check` raises one (the line is named), or it holds fewer than P
            prompts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        prompts_per_step: int,
        seed: int,
        check: RecordCheck | None = None,
        media_root: str | Path = "",
    ) -> None:
        self._lines, self._split = read_lines(path, check, media_root)
        if not 1 <= prompts_per_step <= len(self):
            raise ValueError(
                f"prompts_per_step must be between 1 and the number of prompts in {path} ({len(self)}), "
                f"got {prompts_per_step}"
            )
        self.prompts_per_step = prompts_per_step
        self.seed = seed

    def __len__(self) -> int:
        return len(self._lines)

    def at(self, step: int) -> list[PromptRecord]:
        """The P prompts of a step; the same for the same file, P, seed and step, on every rank."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        num, first = len(self._lines), step * self.prompts_per_step
        places = range(first, first + self.prompts_per_step)
        orders = {epoch: self._order(epoch) for epoch in {place // num for place in places}}
        drawn = [orders[place // num](place % num) for place in places]
        return [PromptRecord(index, *self._split(self._lines[index])) for index in drawn]

    def _order(self, epoch: int) -> "Order":
        """The order of an epoch: a permutation whose head avoids what the shared step took from the epoch before."""
        num, per_step = len(self._lines), self.prompts_per_step
        start = epoch - epoch % (per_step // math.gcd(num, per_step))  # here a step and an epoch begin together
        if num >= 2 * per_step:
            start = max(start, epoch - 1)  # what moves in the head cannot reach the tail: one epoch back is enough
        order = _permutation(self.seed, start, num)
        for later in range(start + 1, epoch + 1):
            num_tail, num_head = later * num % per_step, -later * num % per_step  # the shared step's two parts
            tail = {order(place) for place in range(num - num_tail, num)}
            order = _avoid(_permutation(self.seed, later, num), tail, num_head)
        return order


Order = Callable[[int], int]  # from a place to the prompt that stands there


def _avoid(order: Order, avoid: set[int], num_head: int) -> Order:
    """The order, but the first `num_head` that are not in `avoid` come before all others."""
    first = [order(place) for place in range(num_head + len(avoid))]  # which hold that many
    head = [i for i in first if i not in avoid][:num_head]
    taken = set(head)
    first = head + [i for i in first if i not in taken]
    return lambda place: first[place] if place < len(first) else order(place)


def _permutation(seed: int, epoch: int, num: int) -> Order:
    """0 ... num-1 as hashes say: the same on every machine and Python version, which `random` does not promise."""
    return _sorted(seed, epoch, num).__getitem__ if num <= MAX_SORTED else partial(_shuffled, seed, epoch, num)


@lru_cache(maxsize=4)
def _sorted(seed: int, epoch: int, num: int) -> list[int]:
    return sorted(range(num), key=lambda i: _hash(seed, epoch, i))


def _shuffled(seed: int, epoch: int, num: int, place: int) -> int:
    """What stands at one place of a permutation, from that place alone.

    A Feistel network (Luby and Rackoff, "How to construct pseudorandom permutations", 1988) permutes the numbers below
    a power of 4; a number that it sends beyond 0 ... num-1 goes through it again.
    """
    bits = ((num - 1).bit_length() + 1) // 2
    while True:
        left, right = place >> bits, place & (2**bits - 1)
        for turn in range(6):
            left, right = right, left ^ (_hash(seed, epoch, num, turn, right) & (2**bits - 1))
        place = left << bits | right
        if place < num:
            return place


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one sample's noise, in [0, 2**63): BLAKE2b over the four numbers.

    Each number, in [-2**63, 2**63), enters as 8 bytes, little-endian, signed; the digest is 8 bytes, little-endian, top
    bit cleared. Nothing else enters, so neither the number of ranks nor the batch size changes a sample.
    """
    return _hash(run_seed, step, prompt_index, sample_index)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & (2**63 - 1)
