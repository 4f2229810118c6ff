"""The protocol between a trainer and a scorer: its bytes, and its rules on both ends.

A request is one safetensors blob: a tensor per kind of media and per reference, and the prompts and texts as JSON in
the blob's metadata. A reply is JSON. Neither can run code. Both ends build the same `ScoreRequest` and `Score`, and
therefore apply the same rules; a violation is a `ValueError` that names the field, the rule and the value.

Notation: N samples. docs/reward-protocol.md specifies the protocol for other clients and scorers.
"""

import inspect
import json
import math
import re
import struct
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NoReturn

import numpy as np

from omni_reward.media import (
    MAX_AXES,
    MAX_REFERENCES,
    MEDIA_KINDS,
    TEXT,
    Arrays,
    Meta,
    References,
    ScoreRequest,
    as_texts,
    check_text,
    media_kind,
    short_repr,
)

PROTOCOL = 1
# JSON is parsed in one call, which holds the GIL: these limits bound it to 0.2 s.
MAX_HEADER_BYTES = 8 * 2**20  # in bytes, before the tensors
MAX_VALUES = 2**16  # of the header, and of the request in it
MAX_DIGITS = 300  # of an integer, so that a float can represent it
MAX_DEPTH = 64  # of nested lists and objects
MAX_ID_CHARS = 128
REFERENCE = "reference."  # prefix of the names of references; a number follows
MAX_VALUE = 1e30  # of a score: the sum over a step remains finite in float32, in which trainers log it
MAX_REASON_CHARS = 1000
MAX_DETAILS_BYTES = 2**16  # of a sample, as JSON
MAX_DETAILS_DEPTH = 16
Parts = Mapping[str, float]
Details = Mapping[str, object]
DTYPES = {"uint8": "U8", "float16": "F16", "float32": "F32"}  # numpy's names -> safetensors'
NUMPY = {code: "<" + np.dtype(name).str[1:] for name, code in DTYPES.items()}


class WrongScoresError(ValueError):
    """A score function returned something other than a score for each sample."""


class MismatchError(ValueError):
    """A valid message of another protocol, or a reply to other samples or with samples in another order."""


@dataclass(frozen=True)
class Score:
    """A sample's score, or the reason why it has none.

    Args:
        value: score in the scorer's unit, at most MAX_VALUE in size; None if the scorer abstains.
        abstained: reason for a missing score; set if and only if value is None; truncated to MAX_REASON_CHARS.
        parts: named terms of the value, with the same limit.
        details: JSON values to log, such as the text that the scorer read: at most MAX_DETAILS_DEPTH deep and
            MAX_DETAILS_BYTES long. They are copied by way of JSON.
        mask_group: True to make the trainer drop the sample's entire group; set by clients, never by scorers.

    Raises:
        ValueError: both or neither of value and abstained are set, or a field is invalid.
    """

    value: float | None
    abstained: str | None = None
    parts: Parts = field(default_factory=dict)
    details: Details = field(default_factory=dict)
    mask_group: bool = False

    def __post_init__(self) -> None:
        if self.value is None and not (isinstance(self.abstained, str) and self.abstained):
            raise ValueError(f"abstained must be a reason if value is None, got {short_repr(self.abstained)}")
        if self.value is not None and self.abstained is not None:
            raise ValueError(f"abstained must be None if there is a value, got {short_repr(self.abstained)}")
        if not isinstance(self.parts, Mapping) or not isinstance(self.details, Mapping):
            raise ValueError(
                f"parts and details must be mappings, got {short_repr(self.parts)} and {short_repr(self.details)}"
            )
        if self.value is not None:
            object.__setattr__(self, "value", _finite("value", self.value))
        else:
            object.__setattr__(self, "abstained", clean(str(self.abstained), MAX_REASON_CHARS))
        parts = {name: _finite(f"parts[{short_repr(name)}]", x) for name, x in self.parts.items()}
        object.__setattr__(self, "parts", _copy_json("parts", parts))
        object.__setattr__(self, "details", _copy_json("details", dict(self.details)))

    @classmethod
    def of(cls, value: float, *, parts: Parts | None = None, details: Details | None = None) -> "Score":
        """Return the score of a model's output, or an abstention if it is not finite or exceeds MAX_VALUE in size."""
        number = float(value)  # half precision has no MAX_VALUE
        if abs(number) <= MAX_VALUE:
            return cls(number, parts=parts or {}, details=details or {})
        rule = f", and scores must be at most {MAX_VALUE:g} in size" if math.isfinite(number) else ""
        return cls(None, abstained=f"the scorer returned {value}{rule}", details=details or {})


ScoreFn = Callable[..., Sequence[Score | float]]
"""Function of media by kind (each [N, ...]), N prompts and N meta objects that returns N scores in the same order.

If it takes references, they are the fourth argument: a tuple of images per sample, uint8 [H, W, 3] each.
"""


@dataclass(frozen=True)
class Scorer:
    """A score function with its media, batch size and version.

    Args:
        score_fn: the function that calling the Scorer runs.
        media: kinds of media in each request; keys of `omni_reward.media.MEDIA_KINDS`.
        batch_size: maximum number of samples per call. Concurrent requests are batched up to this number if their
            arrays have the same shapes and dtypes, and longer requests are split. None means one call per request, with
            all of its samples: then other clients cannot change a score, not even in its last bit.
        version: version of the scorer, its weights or its prompt; scores of different versions may differ.
        references: True if the function also takes the samples' references; clients send them only then.
        groups: True if the function compares the samples of a group: each call has all samples of one group.
            batch_size must be None then.
        timed: True if the last argument is the time when the call's first request arrived, on the monotonic clock.
        move: moves the weights to the host when called with True, and back with False; None if they cannot be moved.

    Raises:
        ValueError: an argument is invalid.
    """

    score_fn: ScoreFn
    media: tuple[str, ...] = ("image",)
    batch_size: int | None = None
    version: str = ""
    references: bool = False
    timed: bool = False
    groups: bool = False
    move: Callable[[bool], None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.media, str) or not self.media or len(set(self.media)) != len(self.media):
            raise ValueError(f"media must be a tuple of one kind or more, each once, got {self.media!r}")
        for kind in self.media:
            media_kind(kind)
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be >= 1 or None, got {self.batch_size}")
        if self.groups and self.batch_size is not None:
            raise ValueError(f"batch_size must be None for a scorer of whole groups, got {self.batch_size}")
        try:
            inspect.signature(self.score_fn).bind({}, [], [], *self._extra_args([], 0.0))
        except TypeError as exc:
            arguments = "media, prompts, meta" + ", references" * self.references + ", since" * self.timed
            raise ValueError(f"a scorer must be a function of ({arguments}): {exc}") from exc
        except ValueError:  # a C function may have no signature
            pass

    @classmethod
    def of(cls, score_fn: ScoreFn) -> "Scorer":
        """Return a Scorer unchanged, or wrap a plain function as a Scorer of images."""
        return score_fn if isinstance(score_fn, Scorer) else cls(score_fn)

    def _extra_args(self, references: References, since: float) -> list[object]:
        """Return the arguments after meta."""
        return [references] * self.references + [since] * self.timed

    def __call__(
        self, media: Arrays, prompts: list[str], meta: Meta, references: References = (), *, since: float | None = None
    ) -> list[Score]:
        """Return N scores, in the order of the samples. since: time for a timed function; by default, now.

        Raises:
            WrongScoresError: the function returned something other than N scores or numbers.
        """
        extra = self._extra_args(references, time.monotonic() if since is None else since)
        results = self.score_fn(media, prompts, meta, *extra)
        rule = f"{getattr(self.score_fn, '__name__', 'the scorer')} must return {len(prompts)} numbers"
        if isinstance(results, str | Mapping | Awaitable) or not (hasattr(results, "__len__") and np.iterable(results)):
            if isinstance(results, Coroutine):
                results.close()  # otherwise it warns that it was never awaited
            raise WrongScoresError(f"{rule} in a list, got {type(results).__name__}: {short_repr(results)}")
        if len(results) != len(prompts):
            raise WrongScoresError(f"{rule}, got {len(results)}: {short_repr(results)}")
        for number, result in enumerate(results, start=1):
            if not (isinstance(result, Score) or is_number(result)):
                hint = "return Score(None, abstained=REASON) to abstain"
                raise WrongScoresError(f"{rule}, got {short_repr(result)} for sample {number}; {hint}")
        return [result if isinstance(result, Score) else Score.of(result) for result in results]


def is_number(value: object) -> bool:
    """Return True for a number, including scalars of numpy and torch."""
    return isinstance(value, Real) or getattr(value, "ndim", 1) == 0


def encode_request(request: ScoreRequest) -> list[bytes | memoryview]:
    """Return the body of a request in parts, in order: a safetensors header, then the memory of each array.

    A reference that samples share as one array in memory is sent once.

    Raises:
        ValueError: meta is not JSON-serializable, or prompts, texts and meta exceed the limits of a header.
    """
    media = request.media
    fields: dict[str, object] = {"protocol": PROTOCOL, "request_id": request.request_id, "ids": request.ids}
    fields |= {"prompts": request.prompts, "meta": request.meta}
    if request.groups:
        fields["groups"] = request.groups
    fields |= {kind: texts.tolist() for kind, texts in media.items() if kind == TEXT}
    places: dict[tuple[int, ...], int] = {}  # memory location of an image -> its number
    images: Arrays = {}
    if request.references:
        for image in (image for sample in request.references for image in sample):
            images.setdefault(f"{REFERENCE}{places.setdefault(_memory_key(image), len(places))}", image)
        fields["references"] = [[places[_memory_key(image)] for image in sample] for sample in request.references]
    try:
        header = to_json(fields)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ValueError(f"meta must hold JSON values only: {exc}") from exc
    entries: dict[str, object] = {"__metadata__": {"request": header}}
    parts: list[bytes | memoryview] = []
    end = 0
    arrays = {kind: array for kind, array in media.items() if kind != TEXT} | images
    for name in sorted(arrays, key=lambda name: -arrays[name].itemsize):  # widest dtype first, so that each is aligned
        dense = np.ascontiguousarray(arrays[name])
        begin, end = end, end + dense.nbytes
        entries[name] = {"dtype": DTYPES[str(dense.dtype)], "shape": dense.shape, "data_offsets": [begin, end]}
        parts.append(dense.data.cast("B"))
    text = to_json(entries).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(f"prompts, texts and meta must be at most {MAX_HEADER_BYTES} bytes as JSON, got {len(text)}")
    for what, written in (("prompts, texts and meta", header.encode()), ("the tensors", text)):
        _check_values(what, written)
    return [struct.pack("<Q", len(text)) + text, *parts]


def decode_request(body: bytes | bytearray, *, max_batch: int) -> ScoreRequest:
    """Check a body and return its request, whose arrays share the body's memory.

    Raises:
        ValueError: the body is not a request, or holds more than max_batch samples.
    """
    header, start = _read_header(body)
    request = header.pop("__metadata__")["request"]
    _check_values("__metadata__.request", request.encode(errors="replace"))
    fields = parse_message(request, "__metadata__.request")
    prompts: Any = fields.get("prompts")
    count = len(prompts) if isinstance(prompts, list) else 0
    if count > max_batch:
        raise ValueError(f"prompts must hold at most {max_batch} samples, got {count}")
    if len(header) > (limit := len(MEDIA_KINDS) + count * MAX_REFERENCES):
        raise ValueError(f"the tensors of {count} samples must be at most {limit}, got {len(header)}")
    media = _arrays_in(body, header, start)
    if TEXT in media:
        raise ValueError(f"{TEXT} must be a list of strings in __metadata__.request, got a tensor")
    if TEXT in fields:
        media[TEXT] = as_texts(fields[TEXT])
    groups: Any = fields.get("groups", ())
    meta: Any = fields.get("meta")
    request_id: Any = fields.get("request_id")
    references = _pop_references(media, fields.get("references", []))
    decoded = ScoreRequest(media, prompts, meta, request_id, fields.get("ids", []), references, groups)
    _check_ids(request_id, decoded.ids, count)
    return decoded


def encode_reply(
    request_id: str, ids: Sequence[str], scorer: str, scores: Sequence[Score], *, version: str | None = None
) -> bytes:
    """Return the body of a reply, in the order of the request. version: version of the scorer, if known."""
    results = []
    for name, score in zip(ids, scores, strict=True):
        result = {"id": name, "score": score.value, "parts": score.parts, "details": score.details}
        if score.abstained is not None:
            result["abstained"] = score.abstained
        results.append(result)
    names = {"scorer": scorer} | ({} if version is None else {"scorer_version": version})
    return to_json({"protocol": PROTOCOL, "request_id": request_id, **names, "results": results}).encode()


def decode_reply(
    body: bytes, *, request_id: str, ids: Sequence[str], scorer: Mapping[str, str] | None = None
) -> list[Score]:
    """Check a reply and return its scores, one per sample.

    Args:
        body: body of the reply.
        request_id, ids: ids of the request and its samples.
        scorer: the known `scorer` and `scorer_version`; a reply may omit them but must not have others.

    Raises:
        MismatchError: the reply is to another request or from another scorer, or its results are for other samples or
            in another order.
        ValueError: it is not a reply, or a result is invalid, such as a NaN score.
    """
    reply = parse_message(body, "the reply")
    if reply.get("request_id") != request_id:
        raise MismatchError(f"request_id must be {request_id!r}, got {short_repr(reply.get('request_id'))}")
    for name, value in (scorer or {}).items():
        if (actual := reply.get(name, value)) != value:
            hint = "start it as it was, or begin a new run"
            rule = f"{name} must be {short_repr(value)}, as the server said before"
            raise MismatchError(f"{rule}, got {short_repr(actual)}: {hint}")
    results = reply.get("results")
    if not isinstance(results, list):
        raise ValueError(f"results must be a list, got {short_repr(results)}")
    if len(results) != len(ids):
        raise MismatchError(f"results must hold one result per sample ({len(ids)}), got {len(results)}")
    for i, (name, result) in enumerate(zip(ids, results, strict=True)):
        if not isinstance(result, dict) or "score" not in result:
            raise ValueError(f"results[{i}] must be an object with a score, got {short_repr(result)}")
        if result.get("id") != name:
            raise MismatchError(
                f"results[{i}].id must be {name!r}, as in the request, got {short_repr(result.get('id'))}"
            )
    return [_decode_result(i, result) for i, result in enumerate(results)]


def check_token(token: str | None) -> None:
    """Raise ValueError unless the token is None or valid in a header; the message does not show it."""
    if token is not None and not re.fullmatch(r"[!-~]+", token):
        raise ValueError("token must be printable ASCII without spaces, at least one character; its value is not shown")


def to_json(value: object) -> str:
    """Return ASCII JSON; raise ValueError for NaN and infinities."""
    return json.dumps(value, allow_nan=False)


def clean(text: str, limit: int) -> str:
    """Return the start of a text, without lone surrogates, so that it can be printed and stored."""
    return text[:limit].encode(errors="replace").decode() + ("..." if len(text) > limit else "")


def parse_message(text: bytes | str, what: str) -> dict[str, Any]:
    """Parse a JSON object of this protocol; its other fields are not checked.

    Raises:
        MismatchError: it has another protocol.
        ValueError: it is not a JSON object.
    """
    fields = parse_json(text, what)
    if not isinstance(fields, dict):
        raise ValueError(f"{what} must be a JSON object, got {short_repr(fields)}")
    protocol = fields.get("protocol")
    if type(protocol) is not int or protocol != PROTOCOL:
        raise MismatchError(f"protocol must be {PROTOCOL}, got {short_repr(protocol)}")
    return fields


def _decode_result(i: int, result: dict[str, Any]) -> Score:
    parts, details = result.get("parts", {}), result.get("details", {})
    try:
        return Score(result["score"], result.get("abstained"), parts=parts, details=details)
    except ValueError as exc:
        raise ValueError(f"results[{i}]: {exc}") from exc


def _read_header(body: bytes | bytearray) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors blob, with a text `request` in its metadata, and where its tensors start."""
    size = struct.unpack_from("<Q", body)[0] if len(body) >= 8 else 0
    if not 2 <= size <= min(MAX_HEADER_BYTES, len(body) - 8):
        raise ValueError(f"body must start with a safetensors header of 2 to {MAX_HEADER_BYTES} bytes, got {size}")
    text = bytes(body[8 : 8 + size])
    _check_values("the safetensors header", text)
    header = parse_json(text, "the safetensors header")
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    if not isinstance(header, dict) or not isinstance(metadata, dict) or not isinstance(metadata.get("request"), str):
        raise ValueError("the safetensors header must hold the request as text in __metadata__.request")
    return header, 8 + size


def _arrays_in(body: bytes | bytearray, entries: Mapping[str, object], start: int) -> Arrays:
    """Return the tensors of a safetensors blob, which begin at `start`, as arrays that share its memory."""
    layouts: list[tuple[int, int, str, np.dtype[Any], list[int]]] = []
    for name, entry in entries.items():
        match entry:
            case {"dtype": str(code), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
                code in NUMPY
                and len(shape) <= MAX_AXES
                and all(type(side) is int and 0 <= side <= len(body) for side in shape)
            ):
                layouts.append((begin, end, name, np.dtype(NUMPY[code]), shape))
            case _:
                rule = f"must have a dtype of {sorted(NUMPY)}, shape and offsets"
                raise ValueError(f"{short_repr(name)} {rule}, got {short_repr(entry)}")
    arrays, place = {}, 0
    for begin, end, name, dtype, shape in sorted(layouts, key=lambda tensor: tensor[:3]):
        count = math.prod(shape)
        if begin != place or end - begin != count * dtype.itemsize or end > len(body) - start:
            raise ValueError(
                f"{short_repr(name)} must begin where the tensor before it ends, got bytes {begin} to {end}"
            )
        arrays[name] = np.frombuffer(body, dtype, count, start + begin).reshape(shape)
        place = end
    if start + place != len(body):
        raise ValueError(f"the tensors must fill the body, got {len(body) - start - place} more bytes")
    return arrays


def _check_values(what: str, text: bytes) -> None:
    """Raise ValueError if UTF-8 JSON has more than MAX_VALUES values; a value follows a comma or a bracket."""
    unescaped = text.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"', 4 * MAX_VALUES)[::2])  # of strings; a value and its key have four quotes
    if (count := sum(map(outside.count, (b",", b"[", b"{")))) > MAX_VALUES:
        raise ValueError(f"{what} must hold at most {MAX_VALUES} JSON values, got {count}")


def parse_json(text: bytes | str, what: str) -> Any:
    """Return the value of an untrusted JSON text. what: its name in error messages.

    Raises:
        ValueError: the text is not UTF-8 JSON, is nested too deeply, or has an integer that is too long.
    """
    try:
        text = text.decode() if isinstance(text, bytes) else text
        value = json.loads(text, parse_constant=_reject_constant, parse_int=_read_int)
        if text.count("[") + text.count("{") > MAX_DEPTH and not _is_shallow(value, MAX_DEPTH):
            raise ValueError(f"it must be nested at most {MAX_DEPTH} deep")
    except (ValueError, RecursionError) as exc:  # UnicodeDecodeError and JSONDecodeError are ValueErrors
        raise ValueError(f"{what} must be JSON: {exc}") from exc
    return value


def _read_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer must have at most {MAX_DIGITS} digits, got {len(digits)}")
    return int(digits)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _memory_key(array: np.ndarray) -> tuple[int, ...]:
    """Return an array's memory location, which identifies it among all live arrays."""
    return array.ctypes.data, *array.shape, *array.strides


def _pop_references(arrays: Arrays, numbers: object) -> References:
    """Remove the reference images from the arrays, and return each sample's references by their numbers."""
    images: list[np.ndarray] = []
    while (image := arrays.pop(f"{REFERENCE}{len(images)}", None)) is not None:
        images.append(image)
    if not isinstance(numbers, list) or not all(isinstance(row, list) for row in numbers):
        raise ValueError(f"references must be a list of lists, got {short_repr(numbers)}")
    if not all(type(i) is int and 0 <= i < len(images) for row in numbers for i in row):
        raise ValueError(f"references must hold numbers of the {len(images)} images, got {short_repr(numbers)}")
    if len({i for row in numbers for i in row}) < len(images):
        raise ValueError(f"references must use each of the {len(images)} images, got {short_repr(numbers)}")
    return [tuple(images[i] for i in row) for row in numbers]


def _check_ids(request_id: object, ids: object, count: int) -> None:
    if not isinstance(ids, list) or len(ids) != count:
        raise ValueError(f"ids must be a list of one id per prompt ({count}), got {short_repr(ids)}")
    for name, value in (("request_id", request_id), *(("ids", item) for item in ids)):
        if not isinstance(value, str) or not 1 <= len(value) <= MAX_ID_CHARS:
            raise ValueError(f"{name} must be 1 to {MAX_ID_CHARS} characters, got {short_repr(value)}")
        check_text(name, value)
    if len(set(ids)) != count:
        raise ValueError(f"ids must differ from one another, got {short_repr(ids)}")


def _copy_json(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """Copy an object by way of JSON after a check of its size and depth."""
    try:
        text = json.dumps(values, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as exc:  # UnicodeEncodeError, for lone surrogates, is a ValueError
        raise ValueError(f"{name} must hold JSON values only: {exc}") from exc
    if len(text) > MAX_DETAILS_BYTES:
        raise ValueError(f"{name} must be at most {MAX_DETAILS_BYTES} bytes as JSON, got {len(text)}")
    copy: dict[str, Any] = json.loads(text)
    if not _is_shallow(copy, MAX_DETAILS_DEPTH):
        raise ValueError(f"{name} must be nested at most {MAX_DETAILS_DEPTH} deep")
    return copy


def _is_shallow(value: object, depth: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return children is None or (depth > 0 and all(_is_shallow(child, depth - 1) for child in children))


def _finite(name: str, value: object) -> float:
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an int beyond float's range
            number = math.inf
        if abs(number) <= MAX_VALUE:
            return number
    raise ValueError(f"{name} must be a finite number of at most {MAX_VALUE:g} in size, got {short_repr(value)}")
