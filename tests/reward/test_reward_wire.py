"""The wire: what goes in comes out, and whatever else comes in is a ValueError."""

import json
import math
import pickle
import random
import struct

import numpy as np
import pytest
from omni_reward import Score
from omni_reward.wire import (
    MAX_HEADER_BYTES,
    ScoreRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

IMAGES = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
FIELDS = {"protocol": 1, "request_id": "r", "prompts": ["a", "b"], "meta": [{}, {}]}


def blob(fields: object = FIELDS, *, header: dict | None = None, data: bytes = IMAGES.tobytes()) -> bytes:
    """A request's body written by hand, with the fields or the header that a test wants."""
    if header is None:
        header = {
            "__metadata__": {"request": json.dumps(fields)},
            "image": {"dtype": "U8", "shape": [2, 4, 5, 3], "data_offsets": [0, len(data)]},
        }
    packed = json.dumps(header).encode()
    return struct.pack("<Q", len(packed)) + packed + data


def tensors(**entries: dict) -> dict:
    return {"__metadata__": {"request": json.dumps(FIELDS)}, **entries}


def u8(*shape: int, size: int = 120, dtype: str = "U8") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}


HOSTILE = {
    "empty": b"",
    "seven bytes": b"1234567",
    "truncated": blob()[:-1],
    "too long": blob() + b"x",
    "header beyond the body": struct.pack("<Q", 2**63) + b"{}",
    "header of all ones": b"\xff" * 64,
    "header beyond its cap": struct.pack("<Q", MAX_HEADER_BYTES + 1) + bytes(MAX_HEADER_BYTES + 1),
    "header not JSON": struct.pack("<Q", 4) + b"spam",
    "header not UTF-8": struct.pack("<Q", 4) + b"\xff\xfe\xfd\xfc",
    "header a list": struct.pack("<Q", 2) + b"[]",
    "header nested": struct.pack("<Q", 200_000) + b'{"a":' * 40_000,
    "header nested lists": struct.pack("<Q", 200_000) + b"[" * 200_000,
    "no metadata": blob(header={"image": u8(2, 4, 5, 3)}),
    "metadata null": blob(header={"__metadata__": None, "image": u8(2, 4, 5, 3)}),
    "request not text": blob(header={"__metadata__": {"request": FIELDS}, "image": u8(2, 4, 5, 3)}),
    "request not JSON": blob(header={"__metadata__": {"request": "spam"}, "image": u8(2, 4, 5, 3)}),
    "request nested": blob(header={"__metadata__": {"request": "[" * 100_000}, "image": u8(2, 4, 5, 3)}),
    "request a list": blob([]),
    "request with NaN": blob({**FIELDS, "meta": [{"x": math.nan}, {}]}),
    "protocol 2": blob({**FIELDS, "protocol": 2}),
    "protocol true": blob({**FIELDS, "protocol": True}),
    "protocol missing": blob({k: v for k, v in FIELDS.items() if k != "protocol"}),
    "request_id missing": blob({k: v for k, v in FIELDS.items() if k != "request_id"}),
    "request_id a number": blob({**FIELDS, "request_id": 7}),
    "request_id empty": blob({**FIELDS, "request_id": ""}),
    "request_id endless": blob({**FIELDS, "request_id": "r" * 129}),
    "request_id half a pair": blob({**FIELDS, "request_id": "\ud800"}),
    "prompt half a pair": blob({**FIELDS, "prompts": ["a", "\udfff"]}),
    "prompts a string": blob({**FIELDS, "prompts": "ab"}),
    "prompts of numbers": blob({**FIELDS, "prompts": [1, 2]}),
    "prompts empty": blob({**FIELDS, "prompts": [], "meta": []}),
    "one prompt too few": blob({**FIELDS, "prompts": ["a"], "meta": [{}]}),
    "one meta too few": blob({**FIELDS, "meta": [{}]}),
    "meta of lists": blob({**FIELDS, "meta": [[], []]}),
    "too many samples": blob({**FIELDS, "prompts": ["a"] * 9, "meta": [{}] * 9}),
    "no media": blob(header=tensors(), data=b""),
    "unknown kind": blob(header=tensors(images=u8(2, 4, 5, 3))),
    "no samples": blob(header=tensors(image=u8(0, 4, 5, 3, size=0)), data=b""),
    "no pixels": blob(header=tensors(image=u8(2, 0, 5, 3, size=0)), data=b""),
    "channels first": blob(header=tensors(image=u8(2, 3, 4, 5))),
    "four channels": blob(header=tensors(image=u8(2, 3, 5, 4))),
    "no channels": blob(header=tensors(image=u8(2, 4, 15))),
    "signed": blob(header=tensors(image=u8(2, 4, 5, 3, dtype="I8"))),
    "float": blob(header=tensors(image=u8(2, 1, 5, 3, dtype="F32"))),
    "bfloat16": blob(header=tensors(image=u8(2, 2, 5, 3, dtype="BF16"))),
    "made-up dtype": blob(header=tensors(image=u8(2, 4, 5, 3, dtype="O"))),
    "axis beyond memory": blob(header=tensors(image=u8(0, 2**63, size=0)), data=b""),
    "hundred axes": blob(header=tensors(image=u8(*[1] * 100, size=1)), data=b"a"),
    "shape beyond the data": blob(header=tensors(image=u8(2, 400, 500, 3))),
    "offsets beyond the data": blob(header=tensors(image=u8(2, 4, 5, 3, size=2**40))),
    "offsets reversed": blob(
        header=tensors(image={"dtype": "U8", "shape": [2, 4, 5, 3], "data_offsets": [120, 0]}),
    ),
    "pickle": pickle.dumps({"image": IMAGES, "prompts": ["a", "b"]}),
}


def test_request_round_trip_is_exact() -> None:
    media = {"image": np.random.default_rng(0).integers(0, 256, (3, 7, 11, 3), dtype=np.uint8)}
    prompts = ['a sign that says "K7QX"', "", "Grüße \u4f60\u597d \U0001f600 \x00\n"]
    meta = [{"seed": 1, "tags": ["a", None, True]}, {}, {"x": {"y": 0.1}}]
    request = ScoreRequest(media, prompts, meta, "step-1")
    got = decode_request(encode_request(request.header(), media), max_batch=3)
    assert (got.prompts, got.meta, got.request_id) == (prompts, meta, "step-1")
    assert got.media.keys() == {"image"}
    np.testing.assert_array_equal(got.media["image"], media["image"])


def test_strided_images_arrive_as_numpy_sees_them() -> None:
    channels_first = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 6), dtype=np.uint8)
    images = channels_first.transpose(0, 2, 3, 1)[:, ::2, ::-1]
    request = ScoreRequest({"image": images}, ["a", "b"], [{}, {}], "r")
    got = decode_request(encode_request(request.header(), {"image": images}), max_batch=2)
    np.testing.assert_array_equal(got.media["image"], images)


def test_a_hand_written_body_is_understood() -> None:
    got = decode_request(blob({**FIELDS, "from_a_later_version": 1}), max_batch=8)
    np.testing.assert_array_equal(got.media["image"], IMAGES)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_body_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode_request(body, max_batch=8)


def test_mutated_bodies_are_requests_or_value_errors() -> None:
    rng = random.Random(0)
    whole = blob()
    num_refused = 0
    for _ in range(3000):
        body = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(body))
            match rng.randrange(3):
                case 0:
                    body[at] = rng.randrange(256)
                case 1:
                    del body[at : at + rng.randint(1, 8)]
                case _:
                    body[at:at] = rng.randbytes(rng.randint(1, 8))
        try:
            request = decode_request(bytes(body), max_batch=8)
        except ValueError:
            num_refused += 1
        else:
            assert len(request.prompts) == len(request.meta) == len(request.media["image"])
    assert num_refused > 1000


def test_errors_name_the_field_the_rule_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"^protocol must be 1, got 2$"):
        decode_request(HOSTILE["protocol 2"], max_batch=8)
    with pytest.raises(ValueError, match=r"^image must be a uint8 array, got float32$"):
        decode_request(HOSTILE["float"], max_batch=8)
    with pytest.raises(ValueError, match=r"^image must have the shape \(2, 'H', 'W', 3\), got \(2, 3, 4, 5\)$"):
        decode_request(HOSTILE["channels first"], max_batch=8)
    with pytest.raises(ValueError, match=r"^media must be of the kinds \['audio', 'image', .*\], got 'images'$"):
        decode_request(HOSTILE["unknown kind"], max_batch=8)
    with pytest.raises(ValueError, match=r"^prompts must hold at most 8 samples, got 9$"):
        decode_request(HOSTILE["too many samples"], max_batch=8)


def test_reply_round_trip_is_exact() -> None:
    scores = [
        Score(0.1),
        Score(-3.0, parts={"fit": 1e-300, "style": 2.5}, details={"read": "\u201cK7\u201d", "boxes": [[1, 2]]}),
        Score(None, abstained="no text"),
        Score(None, abstained="too dark", parts={"light": 0.01}, details={"mean": 3}),
    ]
    assert decode_reply(encode_reply("r", "ocr", scores), request_id="r", count=4) == scores


def reply(**changes: object) -> bytes:
    return json.dumps({"protocol": 1, "request_id": "r", "scorer": "s", "results": [{"score": 1}], **changes}).encode()


BAD_REPLIES = {
    "not JSON": b"<html>",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "protocol 2": reply(protocol=2),
    "another request's": reply(request_id="q"),
    "no results": reply(results=None),
    "too short": reply(results=[]),
    "too long": reply(results=[{"score": 1}] * 2),
    "bare number": reply(results=[1.0]),
    "no score": reply(results=[{}]),
    "NaN": reply(results=[{"score": math.nan}]),
    "infinite": reply(results=[{"score": math.inf}]),
    "overflowing": reply().replace(b'"score": 1', b'"score": 1e999'),
    "huge": reply(results=[{"score": 10**400}]),
    "text": reply(results=[{"score": "1"}]),
    "true": reply(results=[{"score": True}]),
    "null without a reason": reply(results=[{"score": None}]),
    "null with an empty reason": reply(results=[{"score": None, "abstained": ""}]),
    "score and reason": reply(results=[{"score": 1, "abstained": "no"}]),
    "parts a list": reply(results=[{"score": 1, "parts": []}]),
    "part not finite": reply(results=[{"score": 1, "parts": {"a": None}}]),
    "details text": reply(results=[{"score": 1, "details": "x"}]),
    "nested": b"[" * 200_000,
}


@pytest.mark.parametrize("body", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
def test_bad_reply_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode_reply(body, request_id="r", count=1)


def test_score_holds_a_finite_value_or_a_reason() -> None:
    for value in (math.nan, math.inf, -math.inf, np.float32("nan"), True, "1"):
        with pytest.raises(ValueError, match="value must be a finite number"):
            Score(value)
    with pytest.raises(ValueError, match="abstained must be a reason"):
        Score(None)
    with pytest.raises(ValueError, match="abstained must be None"):
        Score(0.0, abstained="no")
    with pytest.raises(ValueError, match=r"parts\['a'\] must be a finite number, got nan"):
        Score(0.0, parts={"a": math.nan})
    score = Score(np.float32(0.5), parts={"a": np.float64(1.5)})
    assert type(score.value) is float
    assert type(score.parts["a"]) is float


def test_score_of_a_number_that_is_not_finite_abstains() -> None:
    assert Score.of(0.25, details={"a": 1}) == Score(0.25, details={"a": 1})
    assert Score.of(math.nan).abstained == "the scorer returned nan"
    assert Score.of(np.float32("-inf")).value is None


def test_meta_that_json_cannot_hold_is_refused() -> None:
    for value in (math.nan, object(), {1, 2}):
        with pytest.raises(ValueError, match="meta must hold JSON values only"):
            ScoreRequest({"image": IMAGES[:1]}, ["a"], [{"x": value}], "r").header()
