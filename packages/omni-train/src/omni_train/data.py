"""Prompts and random seeds as pure functions of the step, so that a resumed run needs no saved state.

Letters: P prompts a step takes, M prompts in the file. Step s takes the places s*P ... s*P + P - 1 of an endless list
that strings one ordering of the M prompts (an epoch) after another.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd
from pathlib import Path


@dataclass(frozen=True)
class PromptRecord:
    """One prompt of the file; `index` counts prompts from 0 in file order, `meta` is whatever else the line held."""

    index: int
    text: str
    negative: str = ""
    meta: Mapping[str, object] = field(default_factory=dict)


class PromptSampler:
    """Draws P prompts a step, without replacement within an epoch and without repeats within a step.

    Files: `.txt` holds one prompt a line; `.jsonl` one object a line with "prompt", maybe "negative_prompt", and
    further keys that become `meta`. Blank lines are skipped.

    Raises:
        ValueError: the file is empty or malformed (the line is named), or holds fewer than P prompts.
    """

    def __init__(self, path: str | Path, *, prompts_per_step: int, seed: int) -> None:
        self.records = load_prompts(path)
        if not 1 <= prompts_per_step <= len(self.records):
            raise ValueError(
                f"prompts_per_step must be between 1 and the number of prompts in {path} ({len(self.records)}), "
                f"got {prompts_per_step}"
            )
        self.prompts_per_step = prompts_per_step
        self.seed = seed

    def __len__(self) -> int:
        return len(self.records)

    def at(self, step: int) -> list[PromptRecord]:
        """The P prompts of a step; the same for the same file, P, seed and step, on every rank."""
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        num, first = len(self.records), step * self.prompts_per_step
        places = range(first, first + self.prompts_per_step)
        orders = {epoch: self._order(epoch) for epoch in {place // num for place in places}}
        return [self.records[orders[place // num][place % num]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        """The order of an epoch: a permutation whose head avoids what the shared step took from the epoch before."""
        num, per_step = len(self.records), self.prompts_per_step
        start = epoch - epoch % (per_step // gcd(num, per_step))  # here a step and an epoch begin together
        if num >= 2 * per_step:
            start = max(start, epoch - 1)  # what moves in the head cannot reach the tail: one epoch back is enough
        order = _permutation(self.seed, start, num)
        for later in range(start + 1, epoch + 1):
            num_tail, num_head = later * num % per_step, -later * num % per_step  # the shared step's two parts
            order = _avoid(_permutation(self.seed, later, num), set(order[num - num_tail :]), num_head)
        return order


def _avoid(order: list[int], avoid: set[int], num_head: int) -> list[int]:
    head = [i for i in order if i not in avoid][:num_head]
    return head + [i for i in order if i not in set(head)]


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, num: int) -> list[int]:
    """0 ... num-1 sorted by a hash: the same on every machine and Python version, which `random` does not promise."""
    return sorted(range(num), key=lambda i: _hash(seed, epoch, i))


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one sample's noise, in [0, 2**63): BLAKE2b over the four numbers.

    Each number, in [-2**63, 2**63), enters as 8 bytes, little-endian, signed; the digest is 8 bytes, little-endian, top
    bit cleared. Nothing else enters, so neither the number of ranks nor the batch size changes a sample.
    """
    return _hash(run_seed, step, prompt_index, sample_index)


def _hash(*numbers: int) -> int:
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") & (2**63 - 1)


def load_prompts(path: str | Path) -> list[PromptRecord]:
    """All prompts of a `.txt` or `.jsonl` file, in file order.

    Raises:
        ValueError: another suffix, a file that cannot be read or is empty, a malformed line (named with its number).
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"path must end in .txt or .jsonl, got {path}")
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as exc:
        raise ValueError(f"path must be a file that can be read, got {path}: {exc.strerror}") from exc
    except UnicodeDecodeError as exc:
        number = data.count(b"\n", 0, exc.start) + 1
        raise ValueError(f"{path}, line {number}: must be UTF-8, got the byte {data[exc.start]:#04x}") from exc
    lines = [
        (number, line.strip()) for number, line in enumerate(io.StringIO(text, newline=None), start=1) if line.strip()
    ]
    if not lines:
        raise ValueError(f"path must hold at least one prompt, {path} is empty")
    parse = _parse_json if path.suffix == ".jsonl" else _parse_text
    return [parse(index, line, f"{path}, line {number}") for index, (number, line) in enumerate(lines)]


def _parse_text(index: int, line: str, place: str) -> PromptRecord:
    return PromptRecord(index=index, text=line)


def _parse_json(index: int, line: str, place: str) -> PromptRecord:
    try:
        entry = json.loads(line, parse_constant=_no_number)
    except ValueError as exc:
        raise ValueError(f"{place}: not valid JSON: {getattr(exc, 'msg', exc)}") from exc
    if not isinstance(entry, dict):
        raise ValueError(f"{place}: must be a JSON object, got {type(entry).__name__}")
    if "prompt" not in entry:
        raise ValueError(f'{place}: must have the key "prompt", got the keys {sorted(entry)}')
    text, negative = entry.pop("prompt"), entry.pop("negative_prompt", "")
    for key, value in (("prompt", text), ("negative_prompt", negative)):
        if not isinstance(value, str):
            raise ValueError(f'{place}: "{key}" must be a string, got {type(value).__name__}')
    if not text.strip():
        raise ValueError(f'{place}: "prompt" must not be empty')
    return PromptRecord(index=index, text=text, negative=negative, meta=entry)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON number")
