"""Write the report of a run, or one page that compares several; or serve a folder of runs.

omni-rl report runs/a            writes runs/a/report.html
omni-rl report runs/a runs/b     writes runs/comparison.html
omni-rl report --serve runs/     shows all runs of the folder in a browser, live

`python -m omni_rl.report` is the same. --serve --help lists its flags.
"""

import argparse
import sys
from pathlib import Path


def main(argv: list[str] | None = None) -> None:
    """Run the command line. An error ends it with one line and exit code 2."""
    words = sys.argv[1:] if argv is None else argv
    if "--serve" in words:
        from omni_rl.report.serve import main as serve

        serve([word for word in words if word != "--serve"])
        return
    parser = argparse.ArgumentParser(
        prog="omni-rl report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--out", type=Path, help="page to write for several runs")
    args = parser.parse_args(words)
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
