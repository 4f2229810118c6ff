"""Write the report of a run, or one page that compares several.

python -m omni_rl.report runs/a            writes runs/a/report.html
python -m omni_rl.report runs/a runs/b     writes runs/comparison.html
"""

import argparse
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    """Run the command line. A folder that cannot be read ends it with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m omni_rl.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="page to write for several runs")
    args = parser.parse_args(argv)
    if args.out and len(args.runs) == 1:
        parser.error("--out needs several runs; the report of one is its report.html")

    from omni_rl.report import write_comparison, write_report

    try:
        if len(args.runs) == 1:
            path = write_report(args.runs[0])
        else:
            path = write_comparison(args.runs, args.out or args.runs[0].parent / "comparison.html")
    except (OSError, ValueError) as exc:
        parser.error(str(exc))
    print(path)


if __name__ == "__main__":
    main()
