"""How long a step waits for its scores after its last image: many ranks, a server for each machine.

    python benchmarks/reward_scale.py

Simulated: the ranks are threads that sleep in place of sampling, and a scorer that sleeps for each image. Real: the
clients, the servers and what travels between them, all in this process. The work of a server is the same in each row;
what differs is how much of it is done before the last image is there.
"""

import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import engines
import numpy as np
from omni_reward import RewardClient
from omni_reward.serving import serving_here
from omni_rl.settings.cli import parse_cli
from omni_rl.settings.fields import at_least


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print a table."""
    args = parse_cli(Args, check, sys.argv[1:] if argv is None else argv, app="reward_scale", description=__doc__)
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


if __name__ == "__main__":
    main()
