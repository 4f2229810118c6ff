"""Measure speed, memory and exactness on an accelerator, in one command.

python scripts/gpu_check.py --predict      beforehand, on any CPU: plans and counts, which take minutes
python scripts/gpu_check.py                on one card of 80 GB or more, at most 25 minutes, without a network
python scripts/gpu_check.py --time 10m     the first rows of TIMETABLE that fit in 10 minutes
python scripts/gpu_check.py --peer DIR     also against flow_grpo's or DiffusionNFT's trainer, in the checkout DIR
python scripts/gpu_check.py --dry-run      only list the rows
python scripts/gpu_check.py --small        all rows in a small size, on any device

TIMETABLE below lists the rows in order of information per minute, with functions from scripts/gpu_rows.py. They run
in a separate process, so that a row that breaks or hangs ends only that process. Each row is written to rows.jsonl in
the folder immediately: a call skips the rows that are already there for this commit and device, and retries those that
broke last. All rows together form page.md; in full size they also become their device's section of
docs/evidence/performance.md, or later with `--publish`, which runs nothing. The exit code is 1 if a row broke or is
wrong.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from functools import partial
from itertools import groupby, product
from pathlib import Path

import gpu_rows as ask
import runner  # from benchmarks/, on the path through gpu_rows
import torch
from gpu_rows import FAILS, SMALL, LeftOutError, Prediction, Row, Size, Visit
from omni_train.dist import init_distributed, local_device
from omni_train.files import write_atomically


@dataclass(frozen=True)
class Entry:
    """A line of TIMETABLE. minutes: expected in full size. environment: variables required by its process."""

    ask: Callable[[Visit], Iterator[Row]]
    minutes: float
    environment: Mapping[str, str] = field(default_factory=dict)


BLOCKS = ("as it is", "recomputed", "products kept", "nf4", "all weights")
MASKS = {"one text": False, "masks": True}
NO_FMA = {"TRITON_DEFAULT_FP_FUSION": "0"}
GAPS = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}


def gates(attention: str, texts: Sequence[str] = tuple(MASKS)) -> dict[str, Entry]:
    """Return a row of the gate for each way to run blocks, with or without masks."""
    return {
        f"gate: {attention}, {variant}, {text}": Entry(
            partial(ask.gate, attention=attention, variant=variant, masked=MASKS[text]),
            0.5 if variant == "nf4" else 0.1,
        )
        for text, variant in product(texts, BLOCKS)
    }


def compiled(*names: str, environment: Mapping[str, str] = {}) -> dict[str, Entry]:
    """Return rows of the gate for compiled blocks, one for each of these ways in `gpu_rows.COMPILERS`."""
    own = " ".join(environment)
    asked = {name: partial(ask.gate, attention="auto", variant="compiled", how=name) for name in names}
    return {f"gate: compiled, {name} {own}".strip(): Entry(rows, 1.2, environment) for name, rows in asked.items()}


TIMETABLE: dict[str, Entry] = {
    # 1. Not measured on an accelerator yet
    "machine": Entry(ask.machine, 0.1),
    **compiled("as it is"),
    "gate: compiled, all weights": Entry(partial(ask.gate, attention="auto", variant="compiled, all weights"), 1.2),
    "beside a peer": Entry(ask.beside_peer, 10.0),
    "a second life": Entry(ask.second_life, 2.0),
    "from scratch": Entry(ask.from_scratch, 34.0),
    "step: nf4": Entry(partial(ask.step, variant="nf4"), 1.0),
    "step: blocks offloaded": Entry(partial(ask.step, variant="blocks offloaded"), 1.6),
    "vLLM-Omni": Entry(ask.vllm_omni, 3.0),
    "step: fsdp2, NCCL": Entry(partial(ask.step, variant="gathered"), 1.0),
    # 2. Does it run, and is the ratio 1?
    "tiny-signs learns": Entry(ask.learn, 0.7),
    "ceilings": Entry(ask.ceilings, 0.2),
    **gates("auto"),
    "backward repeated": Entry(ask.repeated, 0.6),
    # 3. Seconds and bytes of a whole step
    "step: recomputed": Entry(partial(ask.step, variant="recomputed"), 0.9),
    "profile": Entry(ask.profile, 0.6),
    **{f"attention: {name}": Entry(partial(ask.attention, name=name), 0.1) for name in ("flash", "efficient", "cudnn", "math")},  # noqa: E501
    "dequantization: nf4": Entry(partial(ask.dequantization, bits="nf4"), 0.1),
    "decoding": Entry(ask.decoding, 0.4),
    "a Qwen3": Entry(ask.tokens, 1.5),
    "step: compiled": Entry(partial(ask.step, variant="compiled"), 2.0),
    "beside plain loops": Entry(ask.versus, 4.0),
    # 4. Other possible changes of bits
    **compiled("not deterministic"),
    **{
        f"bits: {name}": Entry(partial(ask.same_bits, variant=name), 0.3)
        for name in ("offloaded", "blocks offloaded", "products kept")
    },
    "bits: the engine asleep": Entry(ask.sleep, 0.3),
    **gates("efficient"),
    **gates("math"),
    **gates("cudnn"),
    **gates("flash", ["one text"]),
    # 5. Other ways to run a step, and the work around it
    "step: offloaded": Entry(partial(ask.step, variant="offloaded"), 1.4),
    "attention: a step with cudnn": Entry(partial(ask.step, variant="recomputed", attention="cudnn"), 0.9),
    "step: products kept": Entry(partial(ask.step, variant="products kept"), 1.2),
    "checkpoint": Entry(ask.saving, 0.7),
    "around the model": Entry(ask.tax, 1.5),
    "step: as it is": Entry(partial(ask.step, variant="as it is"), 1.0),
    "dequantization: int8": Entry(partial(ask.dequantization, bits="int8"), 0.1),
    **compiled("no padding", "fused products and sums"),
    **compiled("as it is", environment=NO_FMA),
    "step: recomputed, segments that do not grow": Entry(partial(ask.step, variant="recomputed"), 0.9, GAPS),
}  # fmt: skip

REPO = Path(__file__).resolve().parents[1]
DOCS = REPO / "docs" / "evidence" / "performance.md"
FIRST, LAST = "<!-- found on accelerators -->\n", "<!-- end of found on accelerators -->\n"  # its first and last lines
START_S = 240  # limit until a process has imported everything, on a machine with cold caches
LEAST_S = 60  # minimum limit of a row, in addition to three times its expected time
RUNNING = "broke off"


# 1. Rows, and the files that keep them


@dataclass(frozen=True)
class Record:
    """A line of rows.jsonl for an entry that ran. since: start time, in seconds. error: why it broke."""

    name: str
    since: float
    commit: str
    device: str
    size: str
    seconds: float
    rows: list[Row]
    error: str = ""

    @property
    def place(self) -> tuple[str, str, str]:
        """The commit, device and size of the row."""
        return self.commit, self.device, self.size

    @property
    def is_good(self) -> bool:
        """True if it ended and nothing in it is wrong."""
        return not self.error and all(row.verdict != FAILS for row in self.rows)


def where(size: Size) -> tuple[str, str, str]:
    """Return commit, device and size."""
    device = f"{runner.device_name(local_device())}, torch {torch.__version__}"
    return runner.commit(), device, name_of(size)


def name_of(size: Size) -> str:
    """Return the name of a size."""
    return "small" if size == SMALL else "full"


def write(record: Record, folder: Path) -> None:
    """Append a record to the file."""
    with (folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(folder: Path) -> dict[str, Record]:
    """Return the last record of each entry, in the order of TIMETABLE, without entries that were removed from it."""
    file, found = folder / "rows.jsonl", dict[str, Record]()
    for line in file.read_text().splitlines() if file.is_file() else []:
        entry = json.loads(line)
        found[entry["name"]] = Record(**entry | {"rows": [Row(**row) for row in entry["rows"]]})
    return {name: found[name] for name in TIMETABLE if name in found}


def predictions_in(file: Path) -> dict[str, dict[str, Prediction]]:
    """Return predictions by size and variant; empty without the file."""
    sizes = json.loads(file.read_text())["sizes"] if file.is_file() else {}

    def counted(phases: Mapping[str, list[tuple[str, int, int, int]]]) -> dict[str, Counter[tuple[str, int, int]]]:
        return {
            phase: Counter({(kind, size, flops): n for kind, size, flops, n in rows}) for phase, rows in phases.items()
        }

    return {
        size: {
            name: Prediction(counted(one["kernels"]), counted(one["least"]), one["peaks"]) for name, one in each.items()
        }
        for size, each in sizes.items()
    }


def predict(size: Size, file: Path) -> None:
    """Write the predictions for a size to the file, keeping those for the other."""

    def listed(phases: Mapping[str, Counter[tuple[str, int, int]]]) -> dict[str, list[tuple[str, int, int, int]]]:
        return {phase: [(*kernel, n) for kernel, n in kernels.items()] for phase, kernels in phases.items()}

    found = {}
    for variant in ask.PREDICTED:
        one = ask.predict(size, variant)
        found[variant] = {"kernels": listed(one.kernels), "least": listed(one.least), "peaks": one.peaks}
        print(f"{variant}: planned peak {max(one.peaks.values()) / ask.GB:.3g} GB", flush=True)
    before = json.loads(file.read_text())["sizes"] if file.is_file() else {}
    write_atomically(file, json.dumps({"commit": runner.commit(), "sizes": before | {name_of(size): found}}))


# 2. Running them


def run(names: Sequence[str], visit: Visit, folder: Path, until: float = float("inf")) -> None:
    """Run here the entries that are missing and fit into the time; record and raise the error of one that breaks."""
    place, stand = where(visit.size), read(folder)
    for name in names:
        if name in stand and stand[name].place == place and not stand[name].error:
            print(f"{name}: done", flush=True)
        elif visit.size != SMALL and TIMETABLE[name].minutes * 60 > until - time.time():
            print(f"{name}: left for another call: it takes {TIMETABLE[name].minutes:g} minutes", flush=True)
        else:
            run_one(name, visit, folder, place)


def run_one(name: str, visit: Visit, folder: Path, place: tuple[str, str, str]) -> None:
    """Run an entry and keep its record up to date with the rows so far."""
    since, rows = time.time(), list[Row]()

    def tell(error: str) -> None:
        write(Record(name, since, *place, time.time() - since, rows, error), folder)

    tell(RUNNING)
    try:
        for row in TIMETABLE[name].ask(visit):
            print(
                f"{name}: {row.what}: {' | '.join(filter(None, (row.found, row.predicted, row.verdict)))}", flush=True
            )
            rows.append(row)
            tell(RUNNING)
    except LeftOutError as reason:
        print(f"{name}: left out: {reason}", flush=True)
        rows.append(Row("left out", str(reason)))
    except Exception as problem:
        tell(f"{type(problem).__name__}: {problem}"[:300])
        raise
    tell("")


def run_apart(names: Sequence[str], folder: Path, until: float, flags: Sequence[str]) -> None:
    """Run entries in separate processes, one per environment, and a new one after an entry that broke."""
    for variables, group in groupby(names, lambda name: dict(TIMETABLE[name].environment)):
        left = list(group)
        while left and time.time() < until:
            command = [sys.executable, __file__, *flags, "--until", str(until), "--rows", *left]
            began = time.time()
            with subprocess.Popen(command, env=os.environ | variables) as process:
                broken = watch(process, folder, began, until)
            left = left[left.index(broken) + 1 :] if broken in left else []


def watch(process: "subprocess.Popen[bytes]", folder: Path, began: float, until: float) -> str:
    """Wait for a process that runs entries; kill it if one takes too long. Return the entry that broke, or ""."""
    error = ""
    while process.poll() is None:
        time.sleep(0.2)
        now, last = time.time(), last_record(folder, began)
        limit = LEAST_S + 180 * TIMETABLE[last.name].minutes if last else START_S
        error = f"took more than {limit:.0f} s" if now > (last.since if last else began) + limit else ""
        error = error or ("ran out of time" if now > until else "")
        if error and not (last and not last.error):
            process.kill()
            process.wait()
            break
    last, error = last_record(folder, began), error or f"its process ended with {process.returncode}"
    if not process.returncode or (last is None and time.time() > until):
        return ""
    if last is None or not last.error:
        raise SystemExit(f"gpu-check: {error} {f'behind {last.name}' if last else 'before its first row'}")
    if last.error == RUNNING:
        last = replace(last, error=error)
        write(last, folder)
    print(f"{last.name}: {last.error}", flush=True)
    return last.name


def last_record(folder: Path, began: float) -> Record | None:
    """Return the last written record, if its entry started after `began`."""
    found = max(read(folder).values(), key=lambda record: record.since, default=None)
    return found if found and found.since >= began else None


def listed(names: Sequence[str], minutes: float) -> str:
    """Return the timetable: entries, their minutes, and whether they fit."""
    spent, rows = 0.0, []
    for name in names:
        fits = spent + TIMETABLE[name].minutes <= minutes
        spent += fits * TIMETABLE[name].minutes
        variables = " ".join(f"{key}={value}" for key, value in TIMETABLE[name].environment.items())
        rows.append((name, f"{TIMETABLE[name].minutes:g}", f"{spent:.1f}" if fits else "another call", variables))
    return runner.table(("row", "minutes", "until", "environment"), rows)


# 3. The page


def page(found: Mapping[str, Record]) -> str:
    """Return Markdown: a table for each day, commit and device, with one row per row of each entry."""
    tables: dict[str, list[tuple[str, ...]]] = {}
    for name, record in found.items():
        where = f"{date.fromtimestamp(record.since)}, commit {record.commit}, {record.device}, {record.size} size"
        lines = [*record.rows, *([Row(record.error, "", "", FAILS)] if record.error else [])]
        rows = [(f"{name}, {record.seconds:.0f} s", *asdict(row).values()) for row in lines]
        tables.setdefault(where, []).extend(rows)
    head = ("row", "what", "found", "predicted", "verdict")
    cells = {
        where: [[" ".join(c.replace("|", "/").split()) for c in row] for row in rows] for where, rows in tables.items()
    }
    return "\n".join(f"{where}:\n\n{runner.table(head, rows)}\n" for where, rows in cells.items())


def published(text: str, found: Mapping[str, Record]) -> str:
    """Return the page with these rows as the new section of their device.

    Raises:
        ValueError: the page does not have each of the lines FIRST and LAST exactly once.
    """
    if [text.count(line) for line in (FIRST, LAST)] != [1, 1]:
        raise ValueError(f"the page must have these two lines once: {FIRST}{LAST}")
    before, rest = text.split(FIRST)
    known, after = rest.split(LAST)
    parts = (part.partition("\n\n") for part in known.split("\n### ")[1:])
    sections = {name: f"{rows.rstrip()}\n" for name, _, rows in parts}
    cards = dict.fromkeys(card(record) for record in found.values())
    sections |= {name: page({key: one for key, one in found.items() if card(one) == name}) for name in cards}
    body = "".join(f"\n### {name}\n\n{rows}" for name, rows in sections.items())
    return before + FIRST + body + "\n" * bool(body) + LAST + after


def card(record: Record) -> str:
    """Return the name of the device on which an entry ran, without torch's version."""
    return record.device.split(", torch ")[0]


def publish(found: Mapping[str, Record], docs: Path) -> None:
    """Put full-size results into the page, except for devices without a name: a CPU or an emulated device."""
    # The name of a card has capital letters; without one, `runner.device_name` returns the kind, which has none.
    full = {name: one for name, one in found.items() if one.size == "full" and not card(one).islower()}
    if full:
        write_atomically(docs, published(docs.read_text(), full))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    home = REPO / "runs" / "gpu-check"
    parser.add_argument("--time", type=minutes, default=25.0, metavar="25m", help="minutes of this call")
    parser.add_argument("--dry-run", action="store_true", help="only list the rows, their minutes, and which fit")
    parser.add_argument("--predict", action="store_true", help="only write the predictions, on any CPU")
    parser.add_argument("--small", action="store_true", help="all rows in a small size, on any device")
    parser.add_argument("--only", nargs="+", default=[""], metavar="ROW", help="only rows with these name prefixes")
    parser.add_argument("--folder", type=Path, default=home, help="folder of the row files")
    parser.add_argument("--predictions", type=Path, default=home / "predictions.json", help="file of the predictions")
    parser.add_argument("--peer", default="", help="checkout of flow_grpo or DiffusionNFT, for the comparison with it")
    parser.add_argument("--publish", action="store_true", help="only put the folder's rows into the page")
    parser.add_argument("--docs", type=Path, default=DOCS, help="page for full-size results")
    parser.add_argument("--rows", nargs="+", choices=TIMETABLE, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if off := [word for word in args.only if not any(name.startswith(word) for name in TIMETABLE)]:
        parser.error(f"--only must have beginnings of rows, which --dry-run lists, got {off}")
    return args


def minutes(text: str) -> float:
    """Parse "25m" or "25" into minutes."""
    return float(text.removesuffix("m"))


def main(argv: Sequence[str] | None = None, *, here: bool = False) -> int:
    """Run the missing rows; return the exit code. here: in this process, not in others."""
    args = parse(argv)
    size, folder = SMALL if args.small else Size(), args.folder.resolve()
    names = [name for name in TIMETABLE if name.startswith(tuple(args.only)) and (args.peer or name != "beside a peer")]
    if args.dry_run:
        print(listed(names, args.time))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    if args.publish:
        publish(read(folder), args.docs)
        return 0
    if args.predict:
        args.predictions.parent.mkdir(parents=True, exist_ok=True)
        predict(size, args.predictions)
        return 0
    visit = Visit(size, predictions_in(args.predictions).get(name_of(size), {}), args.peer, folder)
    if args.rows:
        init_distributed()  # before anything is allocated, as in a run
        run(args.rows, visit, folder, args.until)
        return 0
    if not args.small and not torch.accelerator.is_available():
        print("gpu-check: there is no accelerator; run it where there is one, or try scripts/gpu_check.py --small here")
        return 1
    until, before = time.time() + 60 * args.time, read(folder)
    names.sort(key=lambda name: name in before and bool(before[name].error))
    if here:
        run(names, visit, folder, until)
    else:
        flags = ["--folder", str(folder), "--predictions", str(args.predictions), f"--peer={args.peer}"]
        flags += ["--small"] * args.small
        run_apart(names, folder, until, flags)
    found = read(folder)
    write_atomically(folder / "page.md", page(found))
    publish(found, args.docs)
    print(f"\n{page(found)}\nThe same is in {folder / 'page.md'}", flush=True)
    return int(not all(found[name].is_good for name in names if name in found))


if __name__ == "__main__":
    sys.exit(main())
