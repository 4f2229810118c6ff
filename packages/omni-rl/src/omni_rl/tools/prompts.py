"""Download prompts of recipes: `omni-rl prompts ocr` writes data/ocr/, and `omni-rl prompts` lists the sets.

Each file is pinned by its commit and its hash. Existing files are not downloaded again, and files with other content
are not replaced. A proxy is taken from the environment, such as HTTPS_PROXY.
`omni-rl prompts edit --images FOLDER` writes data/edit/ from your images, for editing models.
"""

import hashlib
import tomllib
from functools import partial
from pathlib import Path
from typing import NotRequired, TypedDict, cast

import requests
import urllib3
from omni_reward.transport import open_url, run_with_timeout
from omni_train.files import read_regular, write_atomically
from omni_train.prompts.files import load_prompts

from omni_rl.settings.printing import Parser, ignore_closed_pipe
from omni_rl.tools import edits
from omni_rl.tools.command import check_known

TABLE = Path(__file__).with_name("prompts.toml")
WAIT_S, LIMIT_S = 30.0, 600.0  # for a server's next packet, and for a whole file
EDIT = "edit"  # the set made from a user's images
MAX_BYTES = 64 * 2**20  # of a file


class PromptFile(TypedDict):
    """A file of a set: its URL at a commit, its hash, and its number of prompts if known."""

    url: str
    hash: str
    prompts: NotRequired[int]


class PromptSet(TypedDict):
    """A published set of prompts, with its files by their local names."""

    about: str
    license: str
    files: dict[str, PromptFile]


def prompt_sets() -> dict[str, PromptSet]:
    """Return the sets by name."""
    return cast(dict[str, PromptSet], tomllib.loads(TABLE.read_text("utf-8")))


def fetch_set(prompt_set: PromptSet, folder: Path) -> None:
    """Download the files of a set that are missing in the folder.

    Raises:
        ValueError: an existing file has another hash, or a file cannot be downloaded or differs from the hash in the
            table.
        OSError: a file cannot be written.
    """
    missing = {name: file for name, file in prompt_set["files"].items() if not (folder / name).exists()}
    for name in prompt_set["files"].keys() - missing.keys():
        existing = read_regular(folder / name, MAX_BYTES)
        check_hash(folder / name, existing, prompt_set["files"][name]["hash"], "move it away, or give another --to")
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in missing.items():
        path, url = folder / name, file["url"]
        try:
            data = run_with_timeout(LIMIT_S, partial(download, url))
        except (TimeoutError, requests.RequestException, urllib3.exceptions.HTTPError) as exc:
            timeout_message = isinstance(exc, TimeoutError) and f"it takes more than {LIMIT_S} s"
            reason = timeout_message or str(exc) or type(exc).__name__
            remedy = "The same command tries again; without a network, bring the file yourself"
            raise ValueError(f"{path} must be a file that can be fetched, got {url}: {reason}. {remedy}") from exc
        check_hash(url, data, file["hash"], "the same command tries again")
        write_atomically(path, data)


def download(url: str) -> bytes:
    """Return the content of a URL.

    Raises:
        requests.RequestException, urllib3.exceptions.HTTPError: it is incomplete, or larger than MAX_BYTES.
    """
    data = bytearray()
    with open_url(url, {"Accept-Encoding": "identity"}, WAIT_S) as response:
        response.raise_for_status()
        while piece := response.raw.read1(2**16):
            data += piece
            if len(data) > MAX_BYTES:
                raise requests.RequestException(f"it has more than {MAX_BYTES} bytes")
    return bytes(data)


def check_hash(place: Path | str, data: bytes, expected: str, remedy: str) -> None:
    """Raise ValueError unless the data have the SHA-256 `expected`, or git's blob id if it has 40 digits."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
    digest = (blob if len(expected) == 40 else hashlib.sha256(data)).hexdigest()
    if digest != expected:
        raise ValueError(f"{place} must have the hash {expected}, got {digest}: {remedy}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors end it with one line and exit code 2."""
    parser = Parser(prog="omni-rl prompts", description=__doc__)
    parser.add_argument("name", nargs="?", metavar="NAME", help="name of a set, or edit")
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="folder to write; default: data/NAME")
    edits.add_flags(parser)
    args = parser.parse_args(argv)
    if args.name is None:
        with ignore_closed_pipe():
            for name, row in prompt_sets().items():
                files = ", ".join(f"{key} {file.get('prompts', '')}".rstrip() for key, file in row["files"].items())
                print(f"{name:<15}{row['about']}\n{'':<15}{files}; license: {row['license']}")
            print(f"{EDIT:<15}your own images and instructions: omni-rl prompts edit --images FOLDER")
        return
    try:
        folder = args.to or Path("data", args.name)
        if args.name == EDIT:
            for path in edits.write_edits(args, folder):
                print(f"{path}  {len(load_prompts(path)):,} prompts with images of {args.images}")
            return
        prompt_set = prompt_sets()[check_known(args.name, [*prompt_sets(), EDIT], "NAME")]
        fetch_set(prompt_set, folder)
        for name, file in prompt_set["files"].items():
            print(f"{folder / name}  {len(load_prompts(folder / name)):,} prompts of {file['url']}")
        print(f"license: {prompt_set['license']}")
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
