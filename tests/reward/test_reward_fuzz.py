"""5,000 mutated bodies: each is scored, or refused with a reason. None crashes the server, and none leaks memory."""

import asyncio
import gc
import json
import random
import struct
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from omni_reward.media import MAX_REFERENCES, References, ScoreRequest
from omni_reward.server import Limits, create_app
from omni_reward.wire import Scorer, encode_request

NUM_BODIES = 5000
NUM_WARM = 3000  # by then whatever has a bound has reached it, such as the replies that are remembered
VIDEO = np.arange(2 * 2 * 3 * 4 * 3, dtype=np.uint8).reshape(2, 2, 3, 4, 3)
PICTURE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
AUDIO = np.linspace(-1, 1, 2 * 5 * 1, dtype=np.float32).reshape(2, 5, 1)
ODD: list[Any] = [None, True, -1, 0, 1, 2.5, 2**63, 10**30, "", "0", "\ud800", "F64", [], [[]], {}, {"a": []}, [0, 0]]


def strict(
    media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]], references: References
) -> list[float]:
    """A scorer that fails on anything that docs/reward-protocol.md rules out."""
    count = len(prompts)
    assert 1 <= len(meta) == len(references) == count <= 4
    assert all(type(own) is tuple and len(own) <= MAX_REFERENCES for own in references)
    assert all(p.dtype == np.uint8 and p.ndim == 3 and p.shape[2] == 3 and p.size for own in references for p in own)
    assert media.keys() == {"video", "audio"}
    assert media["video"].dtype == np.uint8
    assert media["audio"].dtype == np.float32
    assert media["video"].ndim == 5
    assert media["audio"].ndim == 3
    assert media["video"].shape[-1] == 3
    assert all(len(array) == count and array.size for array in media.values())
    assert np.isfinite(media["audio"]).all()
    assert all(isinstance(prompt, str) and prompt.encode() is not None for prompt in prompts)
    assert all(sample["fps"] > 0 and sample["sample_rate"] > 0 for sample in meta)
    return [float(array.mean()) for array in media["audio"]]


def whole(request_id: str) -> bytes:
    meta: list[dict[str, object]] = [{"fps": 8.0, "sample_rate": 16_000, "seed": i} for i in range(2)]
    pictures = [(PICTURE,), (PICTURE[:1], PICTURE)]
    request = ScoreRequest({"video": VIDEO, "audio": AUDIO}, ["a", "b"], meta, request_id, references=pictures)
    return b"".join(encode_request(request))


def change_somewhere(rng: random.Random, value: Any) -> Any:
    """The JSON value with something odd in one place."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return value | {key: change_somewhere(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.85:
        i = rng.randrange(len(value))
        match rng.randrange(6):
            case 0:
                return value[:i] + value[i + 1 :]
            case 1:
                return [*value, value[i]]
            case _:
                return [*value[:i], change_somewhere(rng, value[i]), *value[i + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 7])
    return rng.choice(ODD)


def change_header(rng: random.Random, body: bytes) -> bytes:
    (size,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + size])
    if rng.random() < 0.5:
        request = change_somewhere(rng, json.loads(header["__metadata__"]["request"]))
        header["__metadata__"]["request"] = json.dumps(request)
    else:
        header = change_somewhere(rng, header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body[8 + size :]


def change_bytes(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed))
        match rng.randrange(3):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 8)]
            case _:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
    return bytes(changed)


def change_media(rng: random.Random, body: bytes) -> bytes:
    at = rng.randrange(len(body) - VIDEO.nbytes - AUDIO.nbytes - PICTURE.nbytes - PICTURE[:1].nbytes, len(body))
    return body[:at] + rng.randbytes(1) + body[at + 1 :]


def cut(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))]


def splice(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))] + body[rng.randrange(len(body)) :]


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    *[change_header] * 7,
    *[change_bytes] * 3,
    *[change_media] * 6,
    cut,
    splice,
]


async def post(app: Any, body: bytes) -> tuple[int, bytes]:
    """Status and body of the app's reply, without a socket in between."""
    sent: list[dict[str, Any]] = []
    headers = [(b"content-type", b"application/octet-stream")]
    scope = {"type": "http", "method": "POST", "path": "/score", "query_string": b"", "headers": headers}

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def fuzz() -> tuple[Counter[int], int]:
    """How often each status came back, and how many blocks of memory came to stay after the warm-up."""
    scorer = Scorer(strict, media=("video", "audio"), batch_size=4, references=True)
    app = create_app(scorer, name="strict", limits=Limits(max_batch=4))
    rng = random.Random(0)
    statuses: Counter[int] = Counter()
    num_warm = 0
    for i in range(NUM_BODIES):
        if i == NUM_WARM:
            gc.collect()
            num_warm = sys.getallocatedblocks()
        status, reply = await post(app, rng.choice(MUTATIONS)(rng, whole(f"request-{i:05}")))
        statuses[status] += 1
        message = json.loads(reply)
        assert status == 200 or message["error"].keys() == {"code", "message"}
        assert len(reply) < 2000
    gc.collect()
    return statuses, sys.getallocatedblocks() - num_warm


def test_mutated_bodies_are_scored_or_refused_and_leave_nothing_behind() -> None:
    statuses, growth = asyncio.run(fuzz())
    assert statuses.keys() <= {200, 400, 409}
    assert sum(statuses.values()) == NUM_BODIES
    assert min(statuses[200], statuses[400]) > NUM_BODIES // 10
    assert growth < (NUM_BODIES - NUM_WARM) // 10  # not one object for every request
