"""The wire: what goes in comes out, and whatever else comes in is a ValueError."""

import json
import math
import pickle
import struct
from collections.abc import Sequence

import numpy as np
import pytest
import safetensors.numpy
from omni_reward import Score
from omni_reward.media import MAX_TEXT_CHARS, ScoreRequest
from omni_reward.wire import (
    MAX_DEPTH,
    MAX_DETAILS_BYTES,
    MAX_DETAILS_DEPTH,
    MAX_HEADER_BYTES,
    MismatchError,
    Scorer,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
    parse_json,
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


def video(meta: list[dict[str, object]], *shape: int) -> bytes:
    shape = shape or (2, 2, 2, 5, 3)
    size = math.prod(shape)
    header = {"__metadata__": {"request": json.dumps({**FIELDS, "meta": meta})}, "video": u8(*shape, size=size)}
    return blob(header=header, data=bytes(size))


def audio(dtype: str, *shape: int, data: bytes | None = None) -> bytes:
    data = bytes(math.prod(shape) * (4 if dtype == "F32" else 2)) if data is None else data
    request = json.dumps({**FIELDS, "meta": [{"sample_rate": 16_000}] * 2})
    return blob(
        header={"__metadata__": {"request": request}, "audio": u8(*shape, size=len(data), dtype=dtype)}, data=data
    )


def pictures(references: object, *entries: dict) -> bytes:
    """A body with the pictures of these sizes, one of 1 x 5 pixels by default, after the images."""
    fields = FIELDS if references is None else {**FIELDS, "references": references}
    header: dict = {"__metadata__": {"request": json.dumps(fields)}, "image": u8(2, 4, 5, 3)}
    end = 120
    for i, entry in enumerate(entries or [u8(1, 5, 3, size=15)]):
        begin, end = end, end + entry["data_offsets"][1]
        header[f"reference.{i}"] = {**entry, "data_offsets": [begin, end]}
    return blob(header=header, data=bytes(end))


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
    "texts null": blob({**FIELDS, "text": None}),
    "texts of numbers": blob({**FIELDS, "text": [1, 2]}),
    "texts a string": blob({**FIELDS, "text": "ab"}),
    "text half a pair": blob({**FIELDS, "text": ["a", "\ud800"]}),
    "text endless": blob({**FIELDS, "text": ["a", "b" * (MAX_TEXT_CHARS + 1)]}),
    "one text too few": blob({**FIELDS, "text": ["a"]}),
    "text a tensor": blob(header=tensors(text=u8(2, size=2)), data=b"ab"),
    "groups null": blob({**FIELDS, "groups": None}),
    "protocol true": blob({**FIELDS, "protocol": True}),
    "protocol missing": blob({k: v for k, v in FIELDS.items() if k != "protocol"}),
    "request_id missing": blob({k: v for k, v in FIELDS.items() if k != "request_id"}),
    "request_id a number": blob({**FIELDS, "request_id": 7}),
    "request_id empty": blob({**FIELDS, "request_id": ""}),
    "request_id endless": blob({**FIELDS, "request_id": "r" * 129}),
    "ids a string": blob({**FIELDS, "ids": "ab"}),
    "ids null": blob({**FIELDS, "ids": None}),
    "one id too few": blob({**FIELDS, "ids": ["a"]}),
    "ids of numbers": blob({**FIELDS, "ids": [0, 1]}),
    "ids of lists": blob({**FIELDS, "ids": [[], []]}),
    "id empty": blob({**FIELDS, "ids": ["", "a"]}),
    "id endless": blob({**FIELDS, "ids": ["a", "b" * 129]}),
    "id half a pair": blob({**FIELDS, "ids": ["a", "\ud800"]}),
    "id twice": blob({**FIELDS, "ids": ["a", "a"]}),
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
    "video without a rate": video([{}, {}]),
    "video at no frames a second": video([{"fps": 8}, {"fps": 0}]),
    "video at a negative rate": video([{"fps": 8}, {"fps": -8}]),
    "video at a rate of text": video([{"fps": 8}, {"fps": "8"}]),
    "video at a rate of true": video([{"fps": 8}, {"fps": True}]),
    "video without frames": video([{"fps": 8}] * 2, 2, 0, 4, 5, 3),
    "video without an axis of frames": video([{"fps": 8}] * 2, 2, 4, 5, 3),
    "audio of integers": audio("I16", 2, 30, 2),
    "audio without channels": audio("F32", 2, 15),
    "audio with NaN": audio("F32", 2, 15, 1, data=np.full(30, np.nan, np.float32).tobytes()),
    "latent of doubles": blob(header=tensors(latent=u8(2, 15, size=240, dtype="F64")), data=bytes(240)),
    "latent of bytes": blob(header=tensors(latent=u8(2, 60))),
    "latent without axes": blob(header=tensors(latent=u8(2, size=8, dtype="F32")), data=bytes(8)),
    "latent of nine axes": blob(header=tensors(latent=u8(2, *[1] * 8, size=8, dtype="F32")), data=bytes(8)),
    "latent with an infinity": blob(
        header=tensors(latent=u8(2, 1, size=4, dtype="F16")), data=np.array([0, np.inf], np.float16).tobytes()
    ),
    "references without pictures": blob({**FIELDS, "references": [[0], [0]]}),
    "references a number": blob({**FIELDS, "references": 1}),
    "references of numbers": pictures([0, 0]),
    "references of one sample": pictures([[0]]),
    "reference that is text": pictures([[0], ["0"]]),
    "reference that is true": pictures([[0], [False]]),
    "reference below 0": pictures([[0], [-1]]),
    "reference beyond the pictures": pictures([[0], [1]]),
    "reference nobody has": pictures([[0], [0]], u8(1, 5, 3, size=15), u8(1, 5, 3, size=15)),
    "references left out": pictures(None),
    "references without end": pictures([[0] * 17, [0]]),
    "reference of one channel": pictures([[0], [0]], u8(5, 3, 1, size=15)),
    "reference with a batch": pictures([[0], [0]], u8(1, 1, 5, 3, size=15)),
    "reference without pixels": pictures([[0], [0]], u8(0, 5, 3, size=0)),
    "reference of floats": pictures([[0], [0]], u8(1, 1, 3, size=12, dtype="F32")),
    "pickle": pickle.dumps({"image": IMAGES, "prompts": ["a", "b"]}),
}


RNG = np.random.default_rng(0)
MEDIA = {
    "image": RNG.integers(0, 256, (3, 7, 11, 3), dtype=np.uint8),
    "video": RNG.integers(0, 256, (3, 2, 7, 11, 3), dtype=np.uint8),
    "audio": RNG.standard_normal((3, 101, 2), dtype=np.float32),
    "latent": RNG.standard_normal((3, 5, 1, 7), dtype=np.float32).astype(np.float16),
}
RATES = {"fps": 7.5, "sample_rate": 24_000}


def encode(request: ScoreRequest) -> bytes:
    return b"".join(encode_request(request))


@pytest.mark.parametrize("kinds", [*([kind] for kind in MEDIA), list(MEDIA)], ids=lambda kinds: "+".join(kinds))
def test_request_round_trip_is_exact(kinds: list[str]) -> None:
    media = {kind: MEDIA[kind] for kind in kinds}
    prompts = ['a sign that says "K7QX"', "", "Grüße \u4f60\u597d \U0001f600 \x00\n"]
    meta = [{**RATES, "seed": 1, "tags": ["a", None, True]}, RATES, {**RATES, "x": {"y": 0.1}}]
    body = encode(ScoreRequest(media, prompts, meta, "step-1", ["a", "b", "c"]))
    got = decode_request(body, max_batch=3)
    assert (got.prompts, got.meta, got.request_id, got.ids) == (prompts, meta, "step-1", ["a", "b", "c"])
    for arrays in (got.media, safetensors.numpy.load(body)):  # the format's own library reads the same
        assert arrays.keys() == media.keys()
        for kind in kinds:
            assert arrays[kind].dtype == media[kind].dtype
            np.testing.assert_array_equal(arrays[kind], media[kind])
            assert arrays[kind].flags.aligned


@pytest.mark.parametrize("text", [None, ["x", ""]], ids=["", "text"])
@pytest.mark.parametrize("groups", [(), [4, 4]], ids=["", "groups"])
def test_a_request_has_texts_and_groups_only_where_they_are_given(
    groups: Sequence[int], text: list[str] | None
) -> None:
    media = {"image": IMAGES} | ({} if text is None else {"text": np.array(text, object)})
    body = encode(ScoreRequest(media, ["a", "b"], [{}, {}], "r", groups=groups))
    (size,) = struct.unpack_from("<Q", body)
    written = json.loads(json.loads(body[8 : 8 + size])["__metadata__"]["request"])
    wanted = {**FIELDS, "ids": ["0", "1"]} | ({"groups": groups} if groups else {}) | ({"text": text} if text else {})
    assert written == wanted
    got = decode_request(body, max_batch=2)
    assert got.groups == groups
    assert got.media.keys() == media.keys()
    assert text is None or got.media["text"].tolist() == text


def test_what_the_format_s_own_library_writes_is_understood() -> None:
    body = safetensors.numpy.save({"image": IMAGES}, metadata={"request": json.dumps(FIELDS)})
    got = decode_request(body, max_batch=2)
    np.testing.assert_array_equal(got.media["image"], IMAGES)
    assert got.ids == ["0", "1"]


def test_media_are_sent_from_where_they_lie() -> None:
    request = ScoreRequest({"image": IMAGES}, ["a", "b"], [{}, {}], "r")
    head, view = encode_request(request)
    assert np.shares_memory(np.frombuffer(view, np.uint8), IMAGES)
    assert len(head) % 8 == 0


def test_strided_images_arrive_as_numpy_sees_them() -> None:
    channels_first = np.random.default_rng(0).integers(0, 256, (2, 3, 8, 6), dtype=np.uint8)
    images = channels_first.transpose(0, 2, 3, 1)[:, ::2, ::-1]
    got = decode_request(encode(ScoreRequest({"image": images}, ["a", "b"], [{}, {}], "r")), max_batch=2)
    np.testing.assert_array_equal(got.media["image"], images)


def test_a_hand_written_body_is_understood() -> None:
    got = decode_request(blob({**FIELDS, "from_a_later_version": 1}), max_batch=8)
    np.testing.assert_array_equal(got.media["image"], IMAGES)


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_body_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        decode_request(body, max_batch=8)


def test_errors_name_the_field_the_rule_and_the_value() -> None:
    with pytest.raises(ValueError, match=r"^protocol must be 1, got 2$"):
        decode_request(HOSTILE["protocol 2"], max_batch=8)
    with pytest.raises(ValueError, match=r"^groups must be a list of one integer per prompt \(2\), got None$"):
        decode_request(HOSTILE["groups null"], max_batch=8)
    with pytest.raises(ValueError, match=r"^text must be a list of strings, got None$"):
        decode_request(HOSTILE["texts null"], max_batch=8)
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
    ids = ["a", "b", "c", "d"]
    assert decode_reply(encode_reply("r", ids, "ocr", scores), request_id="r", ids=ids) == scores


ONE = {"id": "0", "score": 1}


def reply(**changes: object) -> bytes:
    return json.dumps({"protocol": 1, "request_id": "r", "scorer": "s", "results": [ONE], **changes}).encode()


def nested(depth: int) -> dict[str, object]:
    details: dict[str, object] = {}
    for _ in range(depth - 1):
        details = {"a": details}
    return details


BAD_REPLIES = {
    "not JSON": b"<html>",
    "not UTF-8": b"\xff\xfe",
    "a list": b"[]",
    "protocol 2": reply(protocol=2),
    "another request's": reply(request_id="q"),
    "no results": reply(results=None),
    "too short": reply(results=[]),
    "too long": reply(results=[ONE, {"id": "1", "score": 1}]),
    "of another sample": reply(results=[{"id": "1", "score": 1}]),
    "without an id": reply(results=[{"score": 1}]),
    "bare number": reply(results=[1.0]),
    "no score": reply(results=[{"id": "0"}]),
    "NaN": reply(results=[{"id": "0", "score": math.nan}]),
    "infinite": reply(results=[{"id": "0", "score": math.inf}]),
    "overflowing": reply().replace(b'"score": 1', b'"score": 1e999'),
    "huge": reply(results=[{"id": "0", "score": 10**400}]),
    "text": reply(results=[{"id": "0", "score": "1"}]),
    "true": reply(results=[{"id": "0", "score": True}]),
    "null without a reason": reply(results=[{"id": "0", "score": None}]),
    "null with an empty reason": reply(results=[{"id": "0", "score": None, "abstained": ""}]),
    "score and reason": reply(results=[{"id": "0", "score": 1, "abstained": "no"}]),
    "parts a list": reply(results=[{"id": "0", "score": 1, "parts": []}]),
    "part not finite": reply(results=[{"id": "0", "score": 1, "parts": {"a": None}}]),
    "beyond float32": reply(results=[{"id": "0", "score": 1e39}]),
    "part beyond float32": reply(results=[{"id": "0", "score": 1, "parts": {"a": -1e39}}]),
    "details too deep": reply(results=[{"id": "0", "score": 1, "details": nested(500)}]),
    "details too long": reply(results=[{"id": "0", "score": 1, "details": {"a": "b" * 2**20}}]),
    "details no text": reply(results=[{"id": "0", "score": 1, "details": {"read": "\ud800"}}]),
    "parts no text": reply(results=[{"id": "0", "score": 1, "parts": {"\ud800": 1}}]),
    "details text": reply(results=[{"id": "0", "score": 1, "details": "x"}]),
    "nested": b"[" * 200_000,
}


OTHERS = {"protocol 2", "another request's", "too short", "too long", "of another sample", "without an id"}


@pytest.mark.parametrize("name", BAD_REPLIES)
def test_bad_reply_is_a_value_error(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode_reply(BAD_REPLIES[name], request_id="r", ids=["0"])
    assert (type(caught.value) is MismatchError) == (name in OTHERS)


def test_a_reward_that_float32_cannot_hold_is_named() -> None:
    message = r"results\[0\]: value must be a finite number of at most 1e\+30 in size, got 1e\+39"
    with pytest.raises(ValueError, match=message):
        decode_reply(BAD_REPLIES["beyond float32"], request_id="r", ids=["0"])
    with pytest.raises(ValueError, match=r"results\[0\]: value must be .* at most 1e\+30 in size, got -3e\+38"):
        decode_reply(reply(results=[{"id": "0", "score": -3e38}]), request_id="r", ids=["0"])
    assert Score(-1e30).value == -1e30
    assert np.float32(2**24) * np.float32(1e30) < np.finfo(np.float32).max  # the sum of a step's scores
    told = "the scorer returned 3e+38, and scores must be at most 1e+30 in size"
    assert Score.of(3e38) == Score(None, abstained=told)
    [score] = Scorer(lambda media, prompts, meta: [3e38])({}, ["a"], [{}])
    assert score.abstained == told


def test_details_are_bounded_and_kept_as_json_brings_them_back() -> None:
    Score(1.0, details=nested(MAX_DETAILS_DEPTH))
    with pytest.raises(ValueError, match="details must be nested at most 16 deep"):
        Score(1.0, details=nested(MAX_DETAILS_DEPTH + 1))
    with pytest.raises(ValueError, match="details must be at most 65536 bytes as JSON, got 65537"):
        Score(1.0, details={"a": "b" * (MAX_DETAILS_BYTES + 1 - len('{"a": ""}'))})
    with pytest.raises(ValueError, match="details must hold JSON values only"):
        Score(1.0, details={"a": object()})
    mine = {"box": (1, 2)}
    score = Score(1.0, details=mine)
    mine["box"] = (3, 4)
    assert score.details == {"box": [1, 2]}


def test_reasons_are_cut_and_can_be_printed() -> None:
    long = reply(results=[{"id": "0", "score": None, "abstained": "x" * 2**20}])
    [score] = decode_reply(long, request_id="r", ids=["0"])
    assert score.abstained == "x" * 1000 + "..."
    half = reply(results=[{"id": "0", "score": None, "abstained": "a\ud800"}])
    [score] = decode_reply(half, request_id="r", ids=["0"])
    assert score.abstained == "a?"


def test_results_in_another_order_are_not_the_reply() -> None:
    scores = [Score(0.0), Score(1.0), Score(2.0)]
    with pytest.raises(MismatchError, match=r"results\[1\].id must be 'b', as in the request, got 'c'"):
        decode_reply(encode_reply("r", ["a", "c", "b"], "s", scores), request_id="r", ids=["a", "b", "c"])


def test_a_scorer_says_which_media_it_takes() -> None:
    def ones(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        return [1.0] * len(prompts)

    assert Scorer(ones)({"image": IMAGES}, ["a", "b"], [{}, {}]) == [Score(1.0), Score(1.0)]
    for options, message in (
        ({"media": ()}, "media must be a tuple of one kind or more"),
        ({"media": "image"}, "media must be a tuple of one kind or more"),
        ({"media": ("image", "image")}, "media must be a tuple of one kind or more, each once"),
        ({"media": ("smell",)}, "media must be of the kinds"),
        ({"batch_size": 0}, "batch_size must be >= 1 or None, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Scorer(ones, **options)


def test_score_holds_a_finite_value_or_a_reason() -> None:
    for value in (math.nan, math.inf, -math.inf, np.float32("nan"), True, "1"):
        with pytest.raises(ValueError, match="value must be a finite number of at most"):
            Score(value)
    with pytest.raises(ValueError, match="abstained must be a reason"):
        Score(None)
    with pytest.raises(ValueError, match="abstained must be None"):
        Score(0.0, abstained="no")
    with pytest.raises(ValueError, match=r"parts\['a'\] must be a finite number of at most 1e\+30 in size, got nan"):
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
            encode_request(ScoreRequest({"image": IMAGES[:1]}, ["a"], [{"x": value}], "r"))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_is_nested_only_so_deep(opening: str) -> None:
    closing = {"[": "]", '{"a":': "}"}[opening]
    for depth in (1, MAX_DEPTH):
        parse_json(opening * depth + "1" + closing * depth, "it")
    for depth in (MAX_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match=r"^it must be JSON: "):
            parse_json(opening * depth + "1" + closing * depth, "it")
    parse_json("[" + ",".join(["[]"] * 10 * MAX_DEPTH) + "]", "it")
