"""Push a run's weights to the hub, with model card and settings; nothing else of this project uploads a run.

python -m omni_rl.tools.hub runs/first OWNER/NAME --private       makes the repository where it is missing
python -m omni_rl.tools.hub runs/first OWNER/NAME --dry-run       lists the files, and uploads none
"""

import argparse
from pathlib import Path

from omni_train.hub import files_to_push, push_to_hub


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Whatever fails ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_rl.tools.hub", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("repo_id", metavar="OWNER/NAME", help="model on the hub")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry-run", action="store_true", help="list the files and stop")
    args = parser.parse_args(argv)
    try:
        for name, file in files_to_push(args.run).items():
            print(f"{name}  {file.stat().st_size / 1e6:.1f} MB", flush=True)
        if not args.dry_run:
            print(push_to_hub(args.run, args.repo_id, private=args.private))
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
