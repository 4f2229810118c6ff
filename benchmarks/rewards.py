"""Measure what scoring over HTTP costs, and how long a step waits for its scores.

    python benchmarks/rewards.py overhead
    python benchmarks/rewards.py waits --ranks 64

overhead: a request of 16 images of 512 x 512 goes to a server in another process, whose scorer returns at once, and
comes back: encode, send, decode, check, queue, reply. The baseline is what the field does, on the same HTTP libraries
and with no checks: `pickle.dumps` to the server, `pickle.loads` there and back again. Both take turns, so that whatever
else the machine does befalls both.

waits: many ranks, a server for each machine; seconds of a step after its last image. Simulated: the ranks are threads
that sleep instead of sampling, and the scorer sleeps for each image. Real: the clients, the servers and their messages,
all in this process. The work of a server is the same in each row; the rows differ in how much of it is done before the
last image arrives.
"""

import os
import pickle  # the baseline's; omni_reward has none
import secrets
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import engines
import numpy as np
import requests
from omni_reward import RewardClient
from omni_reward.serving import serving_here
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import at_least

NUM_IMAGES = 16
SIZE = 512
NUM_ROUNDS = 60
NUM_WARM = 5
IN_FLIGHT = 8


def measure_overhead() -> None:
    """Measure round trips in turns, and print them per image."""
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
    ours = RewardClient(url, token=token)
    ours.check()
    return lambda: ours.submit({"image": images}, prompts).result()


def in_flight(url: str, token: str, images: np.ndarray, prompts: list[str]) -> float:
    """Milliseconds per image when several requests are under way all the time."""
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
    mine = threading.local()

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


@dataclass(frozen=True)
class Args:
    """The ranks, the servers, and the time that each takes."""

    ranks: Annotated[int, at_least(1)] = 64  # Ranks that sample
    servers: Annotated[int, at_least(1)] = 8  # Servers, each for equally many ranks in a row
    images: Annotated[int, at_least(1)] = 512  # Images of a step, equally many a rank
    side: Annotated[int, at_least(16)] = 256  # Pixels of an image's side
    image_ms: Annotated[float, at_least(0)] = 50.0  # Milliseconds that the scorer takes for an image
    rollout_s: Annotated[float, at_least(0)] = 7.0  # Seconds in which a rank samples its images of a step
    batches: str = "1,2,4,8"  # Into how many batches a rank divides them, with commas, row by row


def check(args: Args) -> None:
    """Raise ValueError when settings do not fit together."""
    if args.ranks % args.servers or args.images % args.ranks:
        raise ValueError(
            f"--servers must divide --ranks, and --ranks --images, got {args.servers}, {args.ranks}, {args.images}"
        )
    of_rank = args.images // args.ranks
    if wrong := [
        text for text in args.batches.split(",") if not text.isdecimal() or not int(text) or of_rank % int(text)
    ]:
        raise ValueError(f"--batches must divide the {of_rank} images of a rank, got {wrong[0]}")


def waits(args: Args, urls: Sequence[str], num_batches: int, *, ahead: bool) -> list[float]:
    """Return the seconds that each rank waits for the scores of its own images once it needs them.

    ahead: True if it first samples the next step, as with steps drawn ahead.
    """
    size = args.images // args.ranks // num_batches
    start = threading.Barrier(args.ranks)

    def rank(number: int) -> float:
        client = RewardClient(urls[number * args.servers // args.ranks], max_in_flight=max(8, num_batches))
        image = np.full((size, args.side, args.side, 3), number % 256, np.uint8)
        start.wait()
        futures = []
        for _ in range(num_batches):
            time.sleep(args.rollout_s / num_batches)
            futures.append(client.submit({"image": image}, ["a sign"] * size))
        if ahead:
            time.sleep(args.rollout_s)
        begin = time.perf_counter()
        scores = [score.value for future in futures for score in future.result()]
        waited = time.perf_counter() - begin
        client.close()
        if scores != [float(number % 256)] * (size * num_batches):
            raise RuntimeError(f"rank {number} must have the scores of its own images, got {scores}")
        return waited

    with ThreadPoolExecutor(args.ranks) as ranks:
        return list(ranks.map(rank, range(args.ranks)))


def slow(args: Args) -> Any:
    """Return a score function that takes its time, and whose score is an image's first byte."""

    def score(media: Mapping[str, np.ndarray], prompts: Sequence[str], meta: object = None) -> list[float]:
        time.sleep(args.image_ms / 1000 * len(prompts))
        return [float(image[0, 0, 0]) for image in media["image"]]

    return score


def measure_waits(argv: Sequence[str]) -> None:
    """Run all ranks and servers, and print a table."""
    args = parse_cli(Args, check, argv, app="rewards waits", description=__doc__)
    print(engines.stamp())
    work = args.images * args.image_ms / 1000 / args.servers
    print(
        f"{args.images} images of {args.ranks} ranks, {args.servers} servers of {args.image_ms:g} ms an image: "
        f"{work:.2f} s of work for each server, {args.rollout_s:g} s of sampling\n"
    )
    print("| batches a rank | seconds after the last image, slowest rank | mean | after another step's sampling |")
    print("| --- | --- | --- | --- |")
    with ExitStack() as stack:
        urls = [stack.enter_context(serving_here(slow(args), name="slow")) for _ in range(args.servers)]
        for number in map(int, args.batches.split(",")):
            found, later = (waits(args, urls, number, ahead=ahead) for ahead in (False, True))
            print(f"| {number} | {max(found):.2f} | {sum(found) / len(found):.2f} | {max(later):.2f} |")


def main(argv: Sequence[str] | None = None) -> None:
    """Take the measurement that the first word names, or be its server."""
    match sys.argv[1:] if argv is None else argv:
        case ["overhead"]:
            measure_overhead()
        case ["waits", *words]:
            measure_waits(words)
        case ["ours" | "pickle" as kind, port]:
            serve(kind, int(port))
        case words:
            sys.exit(f"rewards: must be overhead or waits, got {' '.join(words)}")


if __name__ == "__main__":
    main()
