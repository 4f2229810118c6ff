"""What the server lets in: kinds of media, bytes that wait, time to arrive, connections that say nothing."""

import contextlib
import json
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import closing
from http.client import HTTPConnection
from itertools import islice

import h11
import numpy as np
import pytest
import requests
from helpers import sampled
from omni_reward import RewardClient, Score, Scorer, connections
from omni_reward.media import MAX_REFERENCES, ScoreRequest
from omni_reward.wire import MAX_DIGITS, MAX_HEADER_BYTES, MAX_VALUES, decode_request, encode_request
from reward.reward_helpers import HEAD, halves

BINARY = {"Content-Type": "application/octet-stream"}


def pack(media: dict[str, np.ndarray], num: int = 1) -> bytes:
    meta: list[dict[str, object]] = [{"fps": 8, "sample_rate": 16_000}] * num
    request = ScoreRequest(media, ["a"] * num, meta, uuid.uuid4().hex)
    return b"".join(encode_request(request))


def connect(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)


IMAGE = {"image": np.zeros((1, 2, 2, 3), np.uint8)}
VIDEO = {"video": np.zeros((1, 3, 2, 2, 3), np.uint8)}
AUDIO = {"audio": np.zeros((1, 160, 2), np.float32)}
LATENT = {"latent": np.zeros((1, 16, 4, 4), np.float16)}


@pytest.mark.parametrize("media", [IMAGE, VIDEO, AUDIO, LATENT, VIDEO | AUDIO], ids=lambda media: "+".join(media))
def test_a_scorer_gets_the_kinds_that_it_names(serve: Callable[..., str], media: dict[str, np.ndarray]) -> None:
    seen = {}

    def score(got: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        seen.update(got)
        return [Score(1.0, details=meta[0])]

    rates = {"fps": 7.5, "sample_rate": 44_100}
    with RewardClient(serve(Scorer(score, media=tuple(media)))) as client:
        assert client.submit(media, ["a"], [rates]).result(10) == [Score(1.0, details=rates)]
    assert {kind: (array.dtype, array.shape) for kind, array in seen.items()} == {
        kind: (array.dtype, array.shape) for kind, array in media.items()
    }


@pytest.mark.parametrize("media", [IMAGE, AUDIO, VIDEO | AUDIO | IMAGE, LATENT], ids=lambda media: "+".join(media))
def test_other_kinds_of_media_are_400(serve: Callable[..., str], media: dict[str, np.ndarray]) -> None:
    url = serve(Scorer(halves, media=("video", "audio")))
    response = requests.post(url + "/score", data=pack(media), headers=BINARY, timeout=10)
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"media must be ['audio', 'video'], got {sorted(media)}"


def test_packed_bodies_are_415(serve: Callable[..., str]) -> None:
    response = requests.post(serve(halves) + "/score", headers={**BINARY, "Content-Encoding": "gzip"}, timeout=10)
    assert response.status_code == 415


@pytest.mark.parametrize("framing", [b"Content-Length: 999", b"Transfer-Encoding: chunked"], ids=["length", "chunked"])
def test_a_body_that_trickles_is_408(serve: Callable[..., str], framing: bytes) -> None:
    url = serve(halves, receive_timeout_s=0.3, max_waiting=0)
    start = time.monotonic()
    with connect(url) as conn:
        conn.sendall(HEAD + framing + b"\r\n\r\n")
        conn.settimeout(0.02)
        reply = b""
        while not reply and time.monotonic() < start + 5:
            try:
                reply = conn.recv(1000)
            except TimeoutError:
                conn.sendall(b"1\r\nx\r\n" if b"chunked" in framing else b"x")
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert time.monotonic() - start < 3
    assert requests.post(url + "/score", data=pack(IMAGE), headers=BINARY, timeout=10).status_code == 200


def test_bytes_that_wait_are_bounded_and_given_back(serve: Callable[..., str]) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        started.set()
        assert go_on.wait(10)
        return [1.0]

    url = serve(slow, max_body_bytes=1 * 2**20, max_waiting_bytes=1 * 2**20)
    large = {"image": np.zeros((1, 450, 450, 3), np.uint8)}  # 0.6 MB, so there is no room for two
    replies = []
    first = threading.Thread(
        target=lambda: replies.append(requests.post(url + "/score", data=pack(large), headers=BINARY, timeout=10))
    )
    first.start()
    assert started.wait(10)
    busy = requests.post(url + "/score", data=pack(large), headers=BINARY, timeout=10)
    assert (busy.status_code, busy.headers["retry-after"]) == (503, "1")
    go_on.set()
    first.join(10)
    for _ in range(3):
        replies.append(requests.post(url + "/score", data=pack(large), headers=BINARY, timeout=10))
    assert [reply.status_code for reply in replies] == [200] * 4


def test_connections_that_bring_no_request_in_time_are_closed(
    serve: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.3)
    url = serve(halves)
    with connect(url) as silent, connect(url) as half, closing(HTTPConnection(url.removeprefix("http://"))) as good:
        half.sendall(HEAD[:20])
        for _ in range(2):
            good.request("GET", "/healthz")
            good.auto_open = 0  # the second request needs the connection of the first
            assert good.getresponse().read() == b'{"status": "ok"}'
            assert silent.recv(1) == half.recv(1) == b""


def ask(url: str, path: str = "/healthz") -> socket.socket:
    """A connection on which a request was sent."""
    conn = connect(url)
    conn.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    return conn


def beginning(conn: socket.socket) -> bytes:
    """The first bytes that come; none of a connection that was closed."""
    with contextlib.suppress(ConnectionResetError):
        return conn.recv(12)
    return b""


WAITING: dict[str, Callable[[str], socket.socket]] = {  # connections that a stranger opens, without the token
    "silent": connect,
    "half a head": lambda url: send(connect(url), HEAD[:20]),
    "answered": lambda url: send(connect(url), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"),
    "half a body": lambda url: send(connect(url), HEAD + b"Content-Length: 999\r\n\r\nx"),
}


def send(conn: socket.socket, data: bytes) -> socket.socket:
    conn.sendall(data)
    return conn


@pytest.mark.parametrize("kind", WAITING)
def test_connections_that_wait_for_their_clients_take_no_place(serve: Callable[..., str], kind: str) -> None:
    url = serve(halves, token="s3cret", max_connections=3)
    with contextlib.ExitStack() as stack:
        open_ones = [stack.enter_context(WAITING[kind](url)) for _ in range(7)]
        with RewardClient(url, token="s3cret", timeout_s=5) as client:
            client.check()
            assert client.submit(IMAGE, ["a"]).result(10) == [Score(0.5)]
        for conn in open_ones[:4]:  # the oldest made room, for the others and for the client
            while beginning(conn):
                pass


def test_a_connection_whose_reply_is_being_made_keeps_its_place(serve: Callable[..., str]) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        started.set()
        assert go_on.wait(10)
        return [Score(1.0)]

    url = serve(slow, max_connections=1)
    with RewardClient(url, timeout_s=10) as client:
        future = client.submit(IMAGE, ["a"])
        assert started.wait(10)
        with ask(url) as conn:
            assert beginning(conn) == b"HTTP/1.1 503"
        go_on.set()
        assert future.result(10) == [Score(1.0)]


def test_a_full_server_refuses_the_new_connection_and_none_that_it_holds(serve: Callable[..., str]) -> None:
    started, go_on = threading.Semaphore(0), threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        started.release()
        assert go_on.wait(10)
        return [Score(1.0)] * len(prompts)

    url, body = serve(slow, max_connections=2), pack(IMAGE)
    head = HEAD + b"Content-Length: %d\r\n\r\n" % len(body)
    with connect(url) as upload, connect(url) as kept, contextlib.ExitStack() as stack:
        upload.sendall(head + body[:9])
        kept.sendall(head + body)
        assert started.acquire(timeout=10)
        flood = [stack.enter_context(connect(url)) for _ in range(5)]  # the last one takes the place of the others
        assert beginning(send(flood[-1], head)) == b"HTTP/1.1 503"
        go_on.set()
        for conn, rest in ((upload, body[9:]), (kept, b"")):
            assert beginning(send(conn, rest)) == b"HTTP/1.1 200"


def test_a_kept_connection_is_not_refused_in_place_of_a_new_one(serve: Callable[..., str]) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[Score]:
        started.set()
        assert go_on.wait(10)
        return [Score(1.0)]

    url = serve(slow, max_connections=1)
    with requests.Session() as session, contextlib.ExitStack() as stack:
        threading.Timer(0, lambda: [started.wait(10), stack.enter_context(connect(url)), go_on.set()]).start()
        for _ in range(2):  # the second request finds the new connection open
            assert session.post(f"{url}/score", pack(IMAGE), headers=BINARY).status_code == 200


def test_a_body_in_tiny_chunks_is_refused_before_they_are_parsed() -> None:
    connection = connections.Connection(h11.SERVER)
    connection.receive_data(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 40_000)
    events = iter(connection.next_event, h11.NEED_DATA)
    assert len(list(islice(events, connections.FREE_CHUNKS + 2))) == connections.FREE_CHUNKS + 2  # the head is one
    with pytest.raises(h11.RemoteProtocolError, match="the chunks of a body must have 1024 bytes on average"):
        next(events)


@pytest.mark.parametrize("size", [1, 4096])
def test_bodies_in_few_or_in_large_chunks_are_whole(size: int) -> None:
    connection = connections.Connection(h11.SERVER)
    data = bytes(min(size * 4 * connections.FREE_CHUNKS, 2**22) if size > 1 else connections.FREE_CHUNKS)
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    got = 0
    for _ in range(2):  # a second request of the same connection begins anew
        connection.receive_data(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            got += len(event.data) if isinstance(event, h11.Data) else 0
        connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()
    assert got == 2 * len(data)


def whole(header: str, data: bytes = bytes(12)) -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


def body(request: str, entries: str = "", data: bytes = bytes(12)) -> bytes:
    """A body of such a request, with more entries of the header."""
    image = '"image":{"dtype":"U8","shape":[1,2,2,3],"data_offsets":[0,12]}'
    return whole(f'{{"__metadata__":{{"request":{json.dumps(request)}}},{image}{entries}}}', data)


def fields(entries: str = "", num: int = 1) -> str:
    """A request's JSON, with more entries in it."""
    given = {"protocol": 1, "request_id": "r", "prompts": ["a"] * num, "meta": [{}] * num}
    return json.dumps(given)[:-1] + entries + "}"


def many(unit: str, num: int) -> str:
    return ",".join([unit] * num)


ROOM = MAX_HEADER_BYTES - 10_000
JUST = MAX_VALUES // 2 - 100  # empty lists, of which each counts as two values
TENSOR = '"{}":{{"dtype":"U8","shape":[1,1,3],"data_offsets":[{},{}]}}'
COSTLY: dict[str, Callable[[], bytes]] = {
    "a tensor of 200,000 sides": lambda: body(
        fields(), f',"latent":{{"dtype":"U8","shape":[{many("255", 200_000)}],"data_offsets":[12,99]}}'
    ),
    "100,000 empty tensors": lambda: body(fields(), "".join("," + TENSOR.format(i, 0, 0) for i in range(100_000))),
    "as many tensors as values allow": lambda: body(
        fields(num=1024),
        "".join("," + TENSOR.format(f"reference.{i}", 12 + 3 * i, 15 + 3 * i) for i in range(7000)),
        bytes(12 + 3 * 7000),
    ),
    "lists": lambda: whole(f"[{many('[]', ROOM // 3)}]"),
    "as many lists as values allow": lambda: whole(f"[{many('[]', JUST)}]"),
    "lists on both levels": lambda: body(fields(f',"x":[{many("[]", JUST)}]'), f',"y":[{many("[]", JUST)}]'),
    "objects on both levels": lambda: body(
        fields(f',"x":[{many(chr(123) + chr(125), JUST)}]'), f',"y":[{many(chr(123) + chr(125), JUST)}]'
    ),
    "references": lambda: body(fields(f',"references":[{many("[]", ROOM // 3)}]')),
    "numbers": lambda: body(fields(f',"ids":[{many("0", ROOM // 2)}]')),
    "long numbers": lambda: whole(f"[{many('9' * 4300, ROOM // 4301)}]"),
    "numbers as long as may be": lambda: whole(f"[{many('9' * MAX_DIGITS, ROOM // (MAX_DIGITS + 1))}]"),
    "one number": lambda: whole("[" + "9" * ROOM + "]"),
    "keys": lambda: whole("{" + ",".join(f'"{i:x}":0' for i in range(ROOM // 10)) + "}"),
    "the same key": lambda: whole("{" + many('"a":[]', ROOM // 7) + "}"),
    "strings": lambda: whole(f"[{many(chr(34) * 2, ROOM // 3)}]"),
    "escapes": lambda: body(fields(f',"x":"{"a" * 10}' + "\\\\" * (ROOM // 4) + '"')),
    "escaped quotes beside lists": lambda: body(
        fields(f',"y":[{many("[]", JUST)}],"x":"' + '\\"' * ((ROOM - 3 * JUST) // 5) + '"'),
        f',"z":[{many("[]", JUST)}]',
    ),
    "escapes of letters": lambda: body(fields(f',"x":"{chr(0x1F600) * (ROOM // 14)}"')),
    "half a pair, often": lambda: body(fields().replace('"a"', '"' + "\\ud83d" * (ROOM // 8) + '"')),
    "a long prompt": lambda: body(fields().replace('"a"', '"' + "a" * ROOM + '"')),
    "spaces": lambda: whole(" " * ROOM + "{}"),
    "no JSON at the end": lambda: whole("\n" * ROOM + "x"),
    "deep": lambda: whole("[" * ROOM),
    "a field that is shown": lambda: body(fields().replace('"r"', '["' + "\u0378" * (ROOM // 8) + '"]')),
}


def cpu_s(call: Callable[[], object]) -> float:
    """The least seconds of CPU that a call takes, of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        with contextlib.suppress(ValueError):
            call()
        times.append(time.process_time() - start)
    return min(times)


@pytest.fixture(scope="module")
def three_million_numbers() -> float:
    """Seconds of CPU that JSON of so many numbers takes, 0.2 to 0.3 on a core of 2026."""
    text = f"[{many('12', 3_000_000)}]"
    return cpu_s(lambda: json.loads(text))


@pytest.mark.parametrize("name", sampled(COSTLY, 6))
def test_no_request_takes_longer_to_read_than_three_million_numbers(name: str, three_million_numbers: float) -> None:
    data = bytearray(COSTLY[name]())
    assert cpu_s(lambda: decode_request(data, max_batch=1024)) < three_million_numbers


def test_a_request_holds_so_many_values_and_tensors_and_such_numbers() -> None:
    for count, more, message in (
        (1, f',"x":[{many("0", MAX_VALUES)}]', f"__metadata__.request must hold at most {MAX_VALUES} JSON values, got"),
        (
            1,
            f',"x":{"9" * (MAX_DIGITS + 1)}',
            f"must be JSON: an integer must have at most {MAX_DIGITS} digits, got 301",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            decode_request(body(fields(more, count)), max_batch=8)
    tensors = "".join("," + TENSOR.format(f"reference.{i}", 0, 0) for i in range(2 * MAX_REFERENCES))
    with pytest.raises(ValueError, match=r"the tensors of 1 samples must be at most 21, got 33"):
        decode_request(body(fields(), tensors), max_batch=8)
    commas = ", [{" * MAX_VALUES + '"\\'
    assert decode_request(body(fields(f',"x":{json.dumps(commas)}')), max_batch=8).prompts == ["a"]
    with pytest.raises(ValueError, match=f"prompts, texts and meta must hold at most {MAX_VALUES} JSON values, got"):
        encode_request(ScoreRequest(IMAGE, ["a"], [{"x": [0] * MAX_VALUES}], "r"))


@pytest.mark.parametrize("rate", [10**400, "9" * 400])
def test_a_rate_beyond_floats_is_refused(rate: object) -> None:
    with pytest.raises(ValueError, match=r"meta\[0\]\['fps'\] must be a finite number > 0 for video, got"):
        ScoreRequest(VIDEO, ["a"], [{"fps": rate}], "r")
