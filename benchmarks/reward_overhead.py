"""What it costs to have a scorer behind HTTP: our time per image beside the scorer's own, and beside pickles over HTTP.

    python benchmarks/reward_overhead.py

A request of 16 images of 512 x 512 goes to a server in another process, whose scorer returns at once, and comes back:
encode, send, decode, check, queue, reply. The baseline is what the field does, on the same HTTP libraries and with no
checks: `pickle.dumps` to the server, `pickle.loads` there and back again. Both take turns, so that whatever else the
machine does befalls both.
"""

import os
import pickle  # the baseline's; omni_reward has none
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import requests

NUM_IMAGES = 16
SIZE = 512
NUM_ROUNDS = 60
NUM_WARM = 5
IN_FLIGHT = 8


def main() -> None:
    import engines  # here, as the servers need none of it

    print(engines.stamp())
    images = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, SIZE, SIZE, 3), dtype=np.uint8)
    prompts = ['a sign that says "OK"'] * NUM_IMAGES
    print(f"{NUM_IMAGES} images of {SIZE} x {SIZE}, {images.nbytes / 1e6:.1f} MB, {os.cpu_count()} cores; ms per image")
    with serving("ours") as ours, serving("pickle") as pickles:
        ask_ours, ask_pickles = client(*ours, images, prompts), pickle_client(*pickles, images, prompts)
        times = take_turns(ask_ours, ask_pickles)
        many = [in_flight(*ours, images, prompts), pickles_in_flight(*pickles, images, prompts)]
    scorer_ms = ocr_ms(images, prompts)
    for name, round_trips, together in zip(("ours", "pickle"), times, many, strict=True):
        quartiles = statistics.quantiles(round_trips, n=4)
        print(
            f"{name:7} one at a time: median {quartiles[1]:.2f}, quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f}; "
            f"{IN_FLIGHT} in flight: {together:.2f}"
        )
    own, pickled = map(statistics.median, times)
    print(f"ours over pickle: {own / pickled:.2f}, {IN_FLIGHT} in flight {many[0] / many[1]:.2f}")
    print(f"the OCR scorer itself: {scorer_ms:.1f}; our share on top: {100 * own / scorer_ms:.1f} %")
    print(f"targets: <= 2 ms an image: {own <= 2}; <= 1.1 times pickle: {own <= 1.1 * pickled}")


def take_turns(*asks: Callable[[], object]) -> list[list[float]]:
    """Milliseconds per image of each round trip of each of them."""
    times: list[list[float]] = [[] for _ in asks]
    for i in range(NUM_WARM + NUM_ROUNDS):
        for ask, series in zip(asks, times, strict=True):
            start = time.perf_counter()
            ask()
            if i >= NUM_WARM:
                series.append(1000 * (time.perf_counter() - start) / NUM_IMAGES)
    return times


def client(url: str, token: str, images: np.ndarray, prompts: list[str]) -> Callable[[], object]:
    from omni_reward import RewardClient

    ours = RewardClient(url, token=token)
    ours.check()
    return lambda: ours.submit({"image": images}, prompts).result()


def in_flight(url: str, token: str, images: np.ndarray, prompts: list[str]) -> float:
    """Milliseconds per image when several requests are under way all the time."""
    from omni_reward import RewardClient

    with RewardClient(url, token=token, max_in_flight=IN_FLIGHT) as ours:
        start = time.perf_counter()
        for future in [ours.submit({"image": images}, prompts) for _ in range(NUM_ROUNDS)]:
            future.result()
    return 1000 * (time.perf_counter() - start) / NUM_ROUNDS / NUM_IMAGES


def pickle_client(url: str, token: str, images: np.ndarray, prompts: list[str]) -> Callable[[], object]:
    session = requests.Session()
    session.trust_env = False

    def ask() -> object:
        body = pickle.dumps({"images": images, "prompts": prompts})
        reply = session.post(url + "/score", data=body, headers={"Authorization": token}, timeout=60)
        reply.raise_for_status()
        return pickle.loads(reply.content)

    return ask


def pickles_in_flight(url: str, token: str, images: np.ndarray, prompts: list[str]) -> float:
    """Milliseconds per image when several requests are under way all the time."""
    from concurrent.futures import ThreadPoolExecutor
    from threading import local

    mine = local()

    def ask(_: int) -> object:
        if not hasattr(mine, "ask"):
            mine.ask = pickle_client(url, token, images, prompts)
        return mine.ask()

    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        start = time.perf_counter()
        list(pool.map(ask, range(NUM_ROUNDS)))
    return 1000 * (time.perf_counter() - start) / NUM_ROUNDS / NUM_IMAGES


def ocr_ms(images: np.ndarray, prompts: list[str]) -> float:
    """Milliseconds per image of the OCR scorer, which searches it, in this process, with nothing around it."""
    from omni_reward.scorers.ocr import load_ocr

    score, times = load_ocr(), []
    for _ in range(4):
        start = time.perf_counter()
        score({"image": images}, prompts, [{}] * len(prompts))
        times.append(1000 * (time.perf_counter() - start) / NUM_IMAGES)
    return min(times)


@contextmanager
def serving(kind: str) -> Iterator[tuple[str, str]]:
    """URL and token of a server in a process of its own."""
    token = secrets.token_urlsafe(16)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, kind, str(port)], env=os.environ | {"BENCH_TOKEN": token})
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_up(url):
            assert process.poll() is None, f"the {kind} server ended before it was ready"
            time.sleep(0.05)
        yield url, token
    finally:
        process.terminate()
        process.wait()


def is_up(url: str) -> bool:
    try:
        return requests.get(url + "/healthz", timeout=5).status_code in (200, 404)
    except requests.ConnectionError:
        return False


def serve(kind: str, port: int) -> None:
    import uvicorn

    app = our_app() if kind == "ours" else pickle_app()
    uvicorn.run(app, port=port, http="h11", log_level="error", access_log=False)


def our_app() -> Any:
    from omni_reward.server import create_app

    return create_app(lambda media, prompts, meta: [0.5] * len(prompts), name="half", token=os.environ["BENCH_TOKEN"])


def pickle_app() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def score(request: Request) -> Response:
        if request.headers["authorization"] != os.environ["BENCH_TOKEN"]:  # whoever sends a pickle can run anything
            return Response(status_code=401)
        fields = pickle.loads(await request.body())
        return Response(pickle.dumps({"scores": [0.5] * len(fields["images"])}))

    return Starlette(routes=[Route("/score", score, methods=["POST"])])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve(sys.argv[1], int(sys.argv[2]))
    else:
        main()
