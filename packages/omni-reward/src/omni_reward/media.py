"""Samples to score: the kinds of media, and the rules for arrays, prompts and meta.

| kind   | dtype            | shape               | rate in the sample's meta | content                               |
|--------|------------------|---------------------|---------------------------|---------------------------------------|
| image  | uint8            | [N, H, W, 3]        |                           | RGB, rows from the top                |
| video  | uint8            | [N, T, H, W, 3]     | fps, frames per second     | RGB frames                            |
| audio  | float32          | [N, S, C]           | sample_rate, Hz           | amplitude, full scale is -1 to 1      |
| latent | float32, float16 | [N, ...], 2-8 axes  |                           | the input of a latent reward model    |
| text   | object           | [N]                 |                           | str, such as answers to the prompts   |

An edited sample also has references, its input images: uint8 [H, W, 3] each, of any sizes.

Notation: N samples, T frames, H height, W width, S points in time, C channels.
"""

import reprlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np

MAX_AXES = 8
MAX_REFERENCES = 16  # of a sample
MAX_TEXT_CHARS = 2**20  # of a sample
TEXT = "text"  # the only kind that is not sent as a tensor
Arrays = dict[str, np.ndarray]
Meta = list[dict[str, object]]
References = Sequence[tuple[np.ndarray, ...]]  # of each sample; () if the scorer takes none


_SHORT = reprlib.Repr()
_SHORT.maxlist, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 30, 100, 100, 100


def short_repr(value: object) -> str:
    """Return the start of a value's repr without building the rest, since a client may have sent megabytes."""
    return _SHORT.repr(value)[:80]


@dataclass(frozen=True)
class MediaKind:
    """Dtypes and axes of one kind of media, and the rate that a sample's meta must have for it.

    A number is the size of an axis, a letter is any size above 0, and "..." is one axis or more.
    """

    dtypes: tuple[str, ...]
    axes: tuple[str | int, ...]
    rate: str | None = None


MEDIA_KINDS = {
    "image": MediaKind(("uint8",), ("N", "H", "W", 3)),
    "video": MediaKind(("uint8",), ("N", "T", "H", "W", 3), rate="fps"),
    "audio": MediaKind(("float32",), ("N", "S", "C"), rate="sample_rate"),
    "latent": MediaKind(("float32", "float16"), ("N", "...")),
    TEXT: MediaKind(("object",), ("N",)),
}


@dataclass(frozen=True)
class ScoreRequest:
    """N validated samples to score.

    Args:
        media: array [N, ...] by kind.
        prompts: N prompts.
        meta: N objects of JSON values for the scorer.
        request_id: name of this request, which the reply repeats.
        ids: N distinct names of the samples, returned with their scores; "0", "1", ... by default.
        references: reference images of each sample, for a scorer that takes them; else ().
        groups: group number of each sample, for a scorer that takes groups; else (). Groups are complete and
            contiguous.

    Raises:
        ValueError: media, prompts, meta, references or groups are invalid.
    """

    media: Arrays
    prompts: list[str]
    meta: Meta
    request_id: str
    ids: list[str] = field(default_factory=list)
    references: References = ()
    groups: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, values, item in (("prompts", self.prompts, str), ("meta", self.meta, dict)):
            if not isinstance(values, list) or not all(isinstance(value, item) for value in values):
                raise ValueError(f"{name} must be a list of {item.__name__}, got {short_repr(values)}")
        if not self.prompts:
            raise ValueError("prompts must hold at least 1 prompt, got 0")
        if len(self.meta) != len(self.prompts):
            raise ValueError(f"meta must hold one object per prompt ({len(self.prompts)}), got {len(self.meta)}")
        for prompt in self.prompts:
            check_text("prompts", prompt)
        if not self.media:
            raise ValueError(f"media must hold at least one of {sorted(MEDIA_KINDS)}, got none")
        for kind, array in self.media.items():
            check_media(kind, array, self.meta)
        if self.references:
            check_references(self.references, len(self.prompts))
        if self.groups != ():
            check_groups(self.groups, len(self.prompts))
        if self.ids == []:
            object.__setattr__(self, "ids", [str(i) for i in range(len(self.prompts))])


def check_text(name: str, text: str) -> None:
    """Raise ValueError unless the text can be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as exc:  # JSON can hold a lone surrogate, which no tokenizer can read
        raise ValueError(f"{name} must be Unicode text, got {short_repr(text)}") from exc


def check_media(kind: str, array: object, meta: Meta) -> None:
    """Raise ValueError unless the array fits MEDIA_KINDS and has one sample per meta, and each meta has the rate."""
    rule = media_kind(kind)
    if not isinstance(array, np.ndarray) or str(array.dtype) not in rule.dtypes:
        dtype = getattr(array, "dtype", type(array).__name__)
        raise ValueError(f"{kind} must be a {' or '.join(rule.dtypes)} array, got {dtype}")
    expected = (len(meta), *rule.axes[1:])
    if not _fits(array.shape, expected):
        raise ValueError(f"{kind} must have the shape {expected}, got {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{kind} must be finite, got NaN or an infinity")
    for i, value in enumerate(sample.get(rule.rate) for sample in meta if rule.rate):
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= sys.float_info.max:
            raise ValueError(
                f"meta[{i}][{rule.rate!r}] must be a finite number > 0 for {kind}, got {short_repr(value)}"
            )


def as_texts(texts: object) -> np.ndarray:
    """Return an array [N] of the strings in a list.

    Raises:
        ValueError: it is not a list, or an item is not a string, too long or not Unicode.
    """
    if not isinstance(texts, list | tuple | np.ndarray):
        raise ValueError(f"{TEXT} must be a list of strings, got {short_repr(texts)}")
    for text in texts:
        if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
            raise ValueError(f"{TEXT} must hold strings of at most {MAX_TEXT_CHARS} characters, got {short_repr(text)}")
        check_text(TEXT, text)
    return np.fromiter(texts, object, len(texts))


def check_references(references: References, count: int) -> None:
    """Raise ValueError unless each of `count` samples has a tuple of images, uint8 [H, W, 3]."""
    if len(references) != count:
        raise ValueError(f"references must hold the images of each prompt ({count}), got {len(references)}")
    for images in references:
        if len(images) > MAX_REFERENCES:
            raise ValueError(f"references must hold at most {MAX_REFERENCES} of a sample, got {len(images)}")
        for image in images:
            if not isinstance(image, np.ndarray) or image.dtype != np.uint8:
                raise ValueError(f"references must be uint8 arrays, got {short_repr(getattr(image, 'dtype', image))}")
            if not _fits(image.shape, ("H", "W", 3)):
                raise ValueError(f"references must have the shape [H, W, 3], got {image.shape}")


def check_groups(groups: object, count: int) -> None:
    """Raise ValueError unless groups is a list of `count` integers in which equal ones are contiguous."""
    if not isinstance(groups, list) or len(groups) != count or not all(type(group) is int for group in groups):
        raise ValueError(f"groups must be a list of one integer per prompt ({count}), got {short_repr(groups)}")
    if len(group_slices(groups)) != len(set(groups)):
        raise ValueError(f"groups must have the samples of a group one after another, got {short_repr(groups)}")


def group_slices(groups: Sequence[int]) -> list[slice]:
    """Return the slice of each group's samples, which are contiguous."""
    runs = [[place for place, _ in run] for _, run in groupby(enumerate(groups), key=lambda pair: pair[1])]
    return [slice(run[0], run[-1] + 1) for run in runs]


def canary(kinds: Sequence[str], count: int) -> tuple[Arrays, dict[str, object]]:
    """Return grey, silent or empty samples of these kinds, and the rates for their meta.

    Raises:
        ValueError: a kind has no sample that is valid for every scorer.
    """
    grey, silence = np.full((count, 8, 64, 64, 3), 128, np.uint8), np.zeros((count, 16_000, 1), np.float32)
    samples: Arrays = {"image": grey[:, 0], "video": grey, "audio": silence, TEXT: np.full(count, "", object)}
    if missing := set(kinds) - set(samples):
        raise ValueError(f"media must be given for a scorer of {sorted(missing)}: no sample is valid for all of them")
    return {kind: samples[kind] for kind in kinds}, {"fps": 8.0, "sample_rate": 16_000}


def media_kind(kind: object) -> MediaKind:
    """Return the kind of this name.

    Raises:
        ValueError: it does not exist.
    """
    if not isinstance(kind, str) or kind not in MEDIA_KINDS:
        raise ValueError(f"media must be of the kinds {sorted(MEDIA_KINDS)}, got {short_repr(kind)}")
    return MEDIA_KINDS[kind]


def _fits(shape: tuple[int, ...], expected: tuple[str | int, ...]) -> bool:
    if expected[-1] == "...":
        expected = (*expected[:-1], *"x" * max(1, min(len(shape), MAX_AXES) - len(expected) + 1))
    return len(shape) == len(expected) and all(
        size == axis if isinstance(axis, int) else size > 0 for size, axis in zip(shape, expected, strict=True)
    )
