"""Push a run's weights, model card and settings to the hub. Nothing else in this project uploads a run.

omni-rl push runs/first OWNER/NAME --private       creates the repository if it is missing
omni-rl push runs/first OWNER/NAME --dry-run       lists the files and uploads none
"""

import argparse
from pathlib import Path

from omni_train.weights.card import CARD_FILE

from omni_rl.settings.printing import Parser

EXPORTED = (".safetensors", ".json", ".txt", ".jinja", ".model")  # kinds of files in an export, besides its card


def files_to_push(run: Path) -> dict[str, Path]:
    """Return the files to upload, by their names on the hub: weights, card, and settings as recipe.toml.

    Other files in the weights folder, and hidden files, are left out.

    Raises:
        ValueError: the run has no weights, or a file is a symbolic link, which may lead elsewhere.
    """
    weights, settings = run / "weights", run / "config.toml"
    paths = {path.relative_to(weights): path for path in sorted(weights.rglob("*"))}
    shown = {name: path for name, path in paths.items() if not any(part.startswith(".") for part in name.parts)}
    if links := [path for path in (weights, *shown.values(), settings) if path.is_symlink()]:
        raise ValueError(f"run must have files of its own to push, but {links[0]} is a link")
    exported = {name: path for name, path in shown.items() if name.suffix in EXPORTED or name.name == CARD_FILE}
    files = {name.as_posix(): path for name, path in exported.items() if path.is_file()}
    if not any(name.endswith(".safetensors") for name in files):
        raise ValueError(f"run must be a folder with weights, which an evaluation writes, found none in {weights}")
    return files | ({"recipe.toml": settings} if settings.is_file() else {})


def push(files: dict[str, Path], repo_id: str, *, private: bool, message: str) -> str:
    """Upload files in one commit to a model repository, created if it is missing; return the commit's URL.

    Raises:
        ValueError: the upload fails.
    """
    try:
        from huggingface_hub import CommitOperationAdd, HfApi

        api, adds = HfApi(), [CommitOperationAdd(name, file) for name, file in files.items()]
        api.create_repo(repo_id, private=private, exist_ok=True)
        return str(api.create_commit(repo_id, adds, commit_message=message).commit_url)
    except Exception as exc:  # from any HTTP client of the library
        rule = "repo_id must be OWNER/NAME on the hub, where you may write after `hf auth login`"
        raise ValueError(f"{rule}, got {repo_id}: {type(exc).__name__}: {exc}") from exc


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors end it with one line and exit code 2."""
    parser = Parser(prog="omni-rl push", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="model on the hub")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry-run", action="store_true", help="list the files and stop")
    args = parser.parse_args(argv)
    try:
        files = files_to_push(args.run)
        for name, file in files.items():
            print(f"{name}  {file.stat().st_size / 1e6:.1f} MB", flush=True)
        if not args.dry_run:
            print(push(files, args.repo_id, private=args.private, message=f"Add {args.run.name}"))
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
