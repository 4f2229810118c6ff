"""Score files of images, videos and sounds.

omni-rl score --scorer ocr sign.png --prompt 'a sign that says "OK"'

Prints one line of JSON per file: its score, or the reason why it has none, its parts, and other details from the
scorer. A scorer that compares the samples of a prompt compares these files.
"""

import argparse
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omni_reward import RewardClient, RewardError, Score, Scorer
from omni_reward.cli import read_options
from omni_reward.files import read_token
from omni_reward.media import MEDIA_KINDS, Arrays, Meta, ScoreRequest
from omni_reward.scorers import load_scorer
from omni_reward.scorers.user import user_frame
from omni_train.files import parse_json

from omni_rl.media.images import read_pixels
from omni_rl.media.prompts import read_sound, read_video
from omni_rl.settings.args import split_options
from omni_rl.settings.fields import prefix_errors, require
from omni_rl.settings.printing import Parser


def open_scorer(args: argparse.Namespace) -> Scorer:
    """Return the scorer of the flags: one in this process, or a client of a server.

    Raises:
        ValueError, ImportError, RewardError: the scorer or server does not exist, or cannot grade such files.
    """
    if args.scorer:
        name, options = split_options(args.scorer)
        scorer = load_scorer(name, options=read_options([*options, *args.option]))
    else:
        with prefix_errors("--scorer.token-file: "):
            token = read_token(args.token_file)
        with prefix_errors("--scorer.url: "):
            client = RewardClient(args.url, token=token, timeout_s=600.0)
        kinds, takes_references, takes_groups = client.kinds, client.takes_references, client.takes_groups

        def request(media: Arrays, prompts: list[str], meta: Meta, references: Any = None) -> list[Score]:
            return client.submit(
                media, prompts, meta, references, [0] * len(prompts) if takes_groups else None
            ).result()

        scorer = Scorer(request, media=kinds, references=takes_references, groups=takes_groups)
    rule, subject = ("given", "it") if scorer.references else ("left out", "none")
    is_readable = READERS.keys() >= set(scorer.media)
    require(
        (is_readable, f"the scorer must grade images, videos or sounds, takes {' and '.join(scorer.media)}"),
        (
            bool(args.reference) == scorer.references,
            f"--reference must be {rule}, as the scorer compares with {subject}",
        ),
    )
    return scorer


READERS: dict[str, Callable[[Path], tuple[Any, float]]] = {  # file -> medium of this kind, and its rate
    "image": lambda path: (read_pixels(path), 0.0),
    "video": read_video,
    "audio": read_sound,
}


def read_media(path: Path, kinds: Sequence[str], meta: Mapping[str, object]) -> tuple[Arrays, dict[str, object]]:
    """Return the media of a file by kind, and the meta with their rates added unless present.

    Raises:
        ValueError: the file is missing, damaged or of another kind.
    """
    with prefix_errors("FILE: "):
        media = {kind: READERS[kind](path) for kind in kinds}
    rates = {str(MEDIA_KINDS[kind].rate): rate for kind, (_, rate) in media.items() if rate}
    return {kind: np.asarray(medium) for kind, (medium, _) in media.items()}, {**rates, **meta}


def score_files(
    scorer: Scorer, media: Sequence[Arrays], prompt: str, meta: Meta, references: Sequence[np.ndarray]
) -> list[Score]:
    """Return the scores of samples of equal shape, scored in one call.

    Raises:
        ValueError: an argument is invalid, or the scorer raised an exception, whose line the message names.
    """
    shapes = {str([array.shape for array in sample.values()]) for sample in media}
    require((len(shapes) == 1, "files must have one size, where a scorer compares them"))
    count, batch = len(media), {kind: np.stack([sample[kind] for sample in media]) for kind in scorer.media}
    request = ScoreRequest(batch, [prompt] * count, meta, "", references=[tuple(references)] * count * bool(references))
    try:
        return scorer(request.media, request.prompts, request.meta, request.references)
    except RewardError:
        raise
    except (Exception, SystemExit) as exc:  # a scorer may raise anything
        location = user_frame(exc) or traceback.extract_tb(exc.__traceback__)[-1]
        message = f"{type(exc).__name__}: {exc} ({location.filename}, line {location.lineno})"
        raise ValueError(f"the scorer raised {message}") from exc


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors end it with one line and exit code 2."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="omni-rl score", description=__doc__, formatter_class=formatter)
    add, group = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("files", nargs="+", type=Path, metavar="FILE", help="image, video or sound, of the kind that the scorer takes")
    group.add_argument("--scorer", help="scorer, reward or function, as in a trainer's --scorer")
    group.add_argument("--scorer.url", dest="url", metavar="URL", help="URL of a running reward server")
    add("--option", action="append", default=[], metavar="NAME=VALUE", help="option of --scorer; may be repeated")
    add("--scorer.token-file", "--token-file", dest="token_file", type=Path, help="file with the server's token")
    add("--prompt", default="", help="prompt of the files")
    add("--meta", default="{}", metavar="JSON", help="further keys of the prompt, as in a .jsonl file of prompts")
    add("--reference", action="append", default=[], type=Path, metavar="FILE", help="image that was edited")
    args = parser.parse_args(argv)
    try:
        with prefix_errors("--meta: "):
            meta = parse_json(args.meta)
            require((isinstance(meta, dict), f"must be an object, got {args.meta}"))
        with prefix_errors("--reference: "):
            references = [read_pixels(path) for path in args.reference]
        scorer = open_scorer(args)
        media, metas = zip(*(read_media(path, scorer.media, meta) for path in args.files), strict=True)
        size = len(media) if scorer.groups else 1
        for part in (slice(start, start + size) for start in range(0, len(media), size)):
            scores = score_files(scorer, media[part], args.prompt, [*metas[part]], references)
            for path, score in zip(args.files[part], scores, strict=True):
                row = {"file": str(path), "score": score.value, "parts": score.parts, "abstained": score.abstained}
                print(json.dumps(row | {"details": score.details}, ensure_ascii=False), flush=True)
    except (ImportError, OSError, ValueError, RewardError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
