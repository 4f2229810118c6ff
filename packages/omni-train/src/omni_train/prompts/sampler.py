"""Prompts and random seeds as pure functions of the step, so that a resumed run needs no saved state.

Notation: P prompts per step, M prompts in the file. Step s takes positions s*P ... s*P + P - 1 of an endless list:
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

    Files: `.txt` has one prompt per line. `.jsonl` has one object per line with "prompt" and optional keys:
    "negative_prompt"; "images", the path of a reference image or a list of paths, relative to the file; "audio" and
    "video", also paths; "height" and "width"; further keys become `meta`, as do paths and sizes. Blank lines are
    skipped. The prompt is a text, or a chat whose last message is the user's, also under "messages". `.parquet` has
    such an object per row, in which files may also be bytes, as in the datasets library: see
    `prompts.table.media_folder`. `.csv` and `.tsv` have a header with the keys. `prompts.splits` describes the
    supported folders and data sets on the hub. check, media_root, key: as in `load_prompts`.

    Raises:
        ValueError: the file is empty or malformed, `check` raises (the message names the line), or there are fewer than
            P prompts.
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
        self.folder = data_files(path)[0].parent  # base folder of paths in lines
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
    """Return the order of an epoch: its head avoids the prompts that the shared step took from the previous epoch."""
    start = epoch - epoch % (per_step // math.gcd(num, per_step))  # a step and an epoch begin together here
    if num >= 2 * per_step:
        start = max(start, epoch - 1)  # a change in the head cannot reach the tail: one epoch back is enough
    order = _permutation(seed, start, num)
    for later in range(start + 1, epoch + 1):
        num_tail, num_head = later * num % per_step, -later * num % per_step  # the two parts of the shared step
        tail, order = set(order[num - num_tail :]), _permutation(seed, later, num)
        head = dict.fromkeys(islice((i for i in order if i not in tail), num_head))
        order = [*head, *(i for i in order if i not in head)]
    return order


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, num: int) -> list[int]:
    """Return 0 ... num-1 sorted by hash, which is the same on all machines and Python versions, unlike `random`."""
    return sorted(range(num), key=lambda i: _hash(seed, epoch, i))


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """Return the seed of one sample's noise, in [0, 2**63): BLAKE2b over the four numbers.

    Each number, in [-2**63, 2**63), is encoded as 8 bytes, little-endian, signed; the digest is 8 bytes, little-endian,
    top bit cleared. The seed depends on nothing else, so neither the number of ranks nor the batch size changes a
    sample.
    """
    return _hash(run_seed, step, prompt_index, sample_index)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & (2**63 - 1)
