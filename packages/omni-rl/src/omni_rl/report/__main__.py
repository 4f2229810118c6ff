"""Write the report of a run or a comparison of several, or serve a folder of runs.

omni-rl report runs/a            writes runs/a/report.html
omni-rl report runs/a runs/b     writes runs/comparison.html
omni-rl report --serve runs/     shows all runs of the folder in a browser, live, until Ctrl-C

`python -m omni_rl.report` is the same.
"""

import argparse
from contextlib import suppress
from pathlib import Path

from omni_rl.settings.printing import Parser


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors end it with one message and exit code 2."""
    parser = Parser(prog="omni-rl report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folder; with --serve, a folder of runs")
    parser.add_argument("--out", type=Path, help="page to write for several runs")
    parser.add_argument("--serve", action="store_true", help="serve the folder (default: runs/)")
    parser.add_argument("--host", default="127.0.0.1", help="with --serve: address; unless loopback, with a token")
    parser.add_argument("--port", type=int, default=0, help="with --serve: port; 0: any free port")
    args = parser.parse_args(argv)
    if args.serve and (len(args.runs) > 1 or args.out):
        parser.error("--serve takes one folder, and no --out")
    if not args.runs and not args.serve:
        parser.error("RUN must be at least one run folder")
    if args.out and len(args.runs) == 1:
        parser.error("--out needs several runs; the report of one is its report.html")
    try:
        if args.serve:
            serve(*args.runs, host=args.host, port=args.port)
        else:
            write(args.runs, args.out)
    except (OSError, ValueError) as exc:
        parser.error(str(exc))


def write(runs: list[Path], out: Path | None) -> None:
    """Write the report of a run, or a comparison of several, and print its path."""
    from omni_rl.report import write_comparison, write_report

    is_single = len(runs) == 1
    print(write_report(runs[0]) if is_single else write_comparison(runs, out or runs[0].parent / "comparison.html"))


def serve(folder: Path = Path("runs"), *, host: str, port: int) -> None:
    """Serve a folder of runs, or a run, until Ctrl-C."""
    from omni_rl.report.serve import LiveServer

    server = LiveServer(folder, host=host, port=port)
    print(f"{(count := len(server.runs.find()))} run{'s' * (count != 1)} at {server.url}  (Ctrl-C ends it)", flush=True)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[server.socket])


if __name__ == "__main__":
    main()
