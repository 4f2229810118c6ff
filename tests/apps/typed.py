"""A server of command lines: each runs in a fork of this process, which has imported the settings parser.

With the argument "opening" it has also imported torch, and loading weights ends a command line with exit code 99.

It reads a line of JSON per command line, and replies with one: the exit code, the output, and the heavy libraries that
the program has imported.
"""

import importlib
import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

HEAVY = ("torch", "diffusers", "transformers", "peft")
WARM = ("omni_rl.settings.cli", "omni_rl.settings.token_args", "omni_rl.tools.command", "omni_rl.media.images")
OPENING = ("omni_rl.run.media", "omni_rl.run.start", "omni_rl.run.failures", "omni_rl.run.loop", "huggingface_hub")


def prepare_opening() -> None:
    """Import what a trainer imports, and make a fork exit with code 99 when it loads weights."""
    for name in OPENING:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    sys.modules["omni_train.prepare"].load_sharded = lambda *args, **options: sys.exit(99)
    engines = sys.modules["omni_rl.run.engines"]
    engines.ENGINES["diffusers"] = engines.EngineRow(lambda *args: sys.exit(99))


def run_here(python: str, words: list[str]) -> NoReturn:
    """Run the command of `os.execv` in this process."""
    sys.argv = words[2:] if words[1] == "-m" else words[1:]
    if words[1] == "-m":
        runpy.run_module(words[2], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(words[1], run_name="__main__")
    sys.exit(0)


def live(folder: Path, case: dict) -> NoReturn:
    """Run the given command line, and leave its output and imports in files."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.chdir(case["folder"])
    os.environ.update(case["env"])
    sys.modules.update(dict.fromkeys(case["without"]))  # as if they were not installed
    os.execv, leave, code = run_here, os._exit, 1
    os._exit = sys.exit  # `launch` ends a rank so
    if hub := sys.modules.get("huggingface_hub"):
        hub.constants.ENDPOINT = os.environ["HF_ENDPOINT"]
    try:
        command = importlib.import_module("omni_rl.tools.command")
        sys.argv = ["omni-rl", *case["words"]]
        command.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        (folder / "heavy").write_text(json.dumps([name for name in HEAVY if sys.modules.get(name)]))
        sys.stdout.flush()
        sys.stderr.flush()
        leave(code)


def main() -> None:
    """Serve until the input ends."""
    for name in WARM:
        importlib.import_module(name)
    if sys.argv[1:] == ["opening"]:
        prepare_opening()
    for line in sys.stdin:
        with TemporaryDirectory() as folder:
            pid = os.fork()
            if pid == 0:
                live(Path(folder), json.loads(line))
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            out, err, heavy = (Path(folder, name).read_text() for name in ("out", "err", "heavy"))
        print(json.dumps({"code": code, "out": out, "err": err, "heavy": json.loads(heavy)}), flush=True)


if __name__ == "__main__":
    main()
