"""Signs to read, and a server that misuses a connection as a test wants."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
from omni_reward.wire import decode_request
from PIL import Image, ImageDraw, ImageFont

HEAD = b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"  # of a request, so far


def draw_sign(text: str, size: int = 26, *, height: int = 32, width: int = 96) -> np.ndarray:
    """Return dark text on a light background, [H, W, 3], uint8."""
    image = Image.new("RGB", (width, height), (235, 232, 220))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size)
    left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
    corner = ((width - right - left) / 2, (height - bottom - top) / 2)
    draw.text(corner, text, fill=(30, 20, 60), font=font)
    return np.asarray(image)


def halves(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
    """Score every sample 0.5."""
    return [0.5] * len(prompts)


class Misbehaving:
    """Server that reads whole requests and passes (socket, request) to a function."""

    def __init__(self, behave: Callable[[socket.socket, bytes], None], *, port: int = 0) -> None:
        self._behave = behave
        self._listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                conn, _ = self._listener.accept()
                threading.Thread(target=self._handle, args=(conn,), daemon=True).start()

    def _handle(self, conn: socket.socket) -> None:
        with conn, contextlib.suppress(OSError):  # the client hung up, as it should
            body = read_request(conn)
            if body is not None:
                self._behave(conn, body)


def read_request(conn: socket.socket) -> bytes | None:
    """Return the body of the next request on the connection, or None if the client closes it early."""
    received, wanted = b"", None
    while wanted is None or len(received) < wanted:
        chunk = conn.recv(65536)
        if not chunk:
            return None
        received += chunk
        head, end, _ = received.partition(b"\r\n\r\n")
        if end and wanted is None:
            lengths = [int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line]
            wanted = len(head) + len(end) + sum(lengths)
    return received.partition(b"\r\n\r\n")[2]


def http(status: str, body: bytes, *headers: str, close: bool = True) -> bytes:
    """Return the bytes of an HTTP reply."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *(["Connection: close"] if close else []), *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def reply_to(body: bytes, **changes: object) -> bytes:
    """Return the valid reply to a request's body, with some fields changed."""
    request = decode_request(body, max_batch=1024)
    results = [{"id": name, "score": 0.5} for name in request.ids]
    reply = {"protocol": 1, "request_id": request.request_id, "scorer": "test", "results": results}
    return json.dumps({**reply, **changes}).encode()


def trickle(conn: socket.socket, data: bytes, *, pause_s: float = 0.02) -> None:
    """Send one byte at a time."""
    for i in range(len(data)):
        conn.sendall(data[i : i + 1])
        time.sleep(pause_s)


def texture(seed: int = 0) -> np.ndarray:
    """Return a soft random texture [256, 256], 0 to 255, that is periodic."""
    noise = np.random.default_rng(seed).normal(size=(256, 256))
    frequency = np.hypot(*np.meshgrid(np.fft.fftfreq(256), np.fft.fftfreq(256)))
    soft = np.fft.ifft2(np.fft.fft2(noise) * np.exp(-((frequency / 0.08) ** 2))).real
    return (soft - soft.min()) / np.ptp(soft) * 255
