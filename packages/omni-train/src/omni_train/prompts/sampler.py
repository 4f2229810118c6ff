"""Prompts and random seeds as pure functions of the step, so that a resumed run needs no saved state.

Letters: P prompts per step, M prompts in the file. Step s takes the places s*P ... s*P + P - 1 of an endless list:
one ordering of the M prompts (an epoch) after another. An epoch is ordered by hashes of the prompts' numbers.
"""

import hashlib
import math
from functools import lru_cache
from itertools import islice
from pathlib import Path

from omni_train.prompts.files import PromptRecord, RecordCheck, read_lines
from omni_train.prompts.splits import data_files


class PromptSampler:
    """A sampler of P prompts per step, without replacement within an epoch and without repeats within a step.

    Files: `.txt` holds one prompt a line; `.jsonl` one object a line with "prompt", maybe "negative_prompt", maybe
    "images", the path of a reference, or a list of them, relative to the file, maybe "audio" and "video", paths too,
    maybe "height" and "width", and further keys that become `meta`, as do paths and sizes. Blank lines are skipped. The
    prompt is a text, or a chat whose last message is the user's, also as "messages". `.parquet` holds such an object a
    row, in which files may also be bytes, as in the datasets library: see `prompts.table.media_folder`. `.csv` and
    `.tsv` have a header of the keys. `prompts.splits` says which folders and data sets of the hub serve too.
    check, media_root, key: as for `load_prompts`.

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
        key: str = "",
    ) -> None:
        self._lines, self._parse = read_lines(path, check, media_root, key)
        self.folder = data_files(path)[0].parent  # to which names in lines are relative
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
        """Return the P prompts of a step; the same for the same file, P, seed and step, on every rank."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        first = step * self.prompts_per_step
        places = [divmod(place, len(self)) for place in range(first, first + self.prompts_per_step)]
        indices = [_order(self.seed, epoch, len(self), self.prompts_per_step)[place] for epoch, place in places]
        return [self._parse(index, self._lines[index]) for index in indices]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, num: int, per_step: int) -> list[int]:
    """Return the order of an epoch: its head avoids what the shared step took from the epoch before."""
    start = epoch - epoch % (per_step // math.gcd(num, per_step))  # here a step and an epoch begin together
    if num >= 2 * per_step:
        start = max(start, epoch - 1)  # what moves in the head cannot reach the tail: one epoch back is enough
    order = _permutation(seed, start, num)
    for later in range(start + 1, epoch + 1):
        num_tail, num_head = later * num % per_step, -later * num % per_step  # the shared step's two parts
        tail, order = set(order[num - num_tail :]), _permutation(seed, later, num)
        head = dict.fromkeys(islice((i for i in order if i not in tail), num_head))
        order = [*head, *(i for i in order if i not in head)]
    return order


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num: int) -> list[int]:
    """Return 0 ... num-1 sorted by hash: the same on all machines and Python versions, unlike `random`."""
    return sorted(range(num), key=lambda i: _hash(seed, epoch, i))


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the seed of one sample's noise, in [0, 2**63): BLAKE2b over the four numbers.

    Each number, in [-2**63, 2**63), enters as 8 bytes, little-endian, signed; the digest is 8 bytes, little-endian, top
    bit cleared. Nothing else enters, so neither the number of ranks nor the batch size changes a sample.
    """
    return _hash(run_seed, step, prompt_index, sample_index)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & (2**63 - 1)
