"""Convert LoRA files of other trainers to a folder for --init-weights, and a run's weights to other trainers' formats.

omni-rl lora their.safetensors adapters --model Qwen/Qwen-Image        then: --init-weights adapters
omni-rl lora runs/first/weights out --model Qwen/Qwen-Image --layout peft
"""

import argparse
import re
from pathlib import Path

from omni_rl.settings.cli import silence_libraries
from omni_rl.settings.fields import require
from omni_rl.settings.printing import Parser

FULL = "full weights, which --init-weights takes as they are"


def check_source(source: Path) -> None:
    """Raise ValueError, with the contents found, unless the source is a file or a folder with one."""
    rule = "source must be a .safetensors file or an adapter's folder"
    is_file = source.suffix == ".safetensors" and source.is_file()
    require((is_file or source.is_dir(), f"{rule}, got {source}"))
    if source.is_dir() and not next(source.glob("*.safetensors"), None):
        inner = sorted(source.glob("*/*.safetensors"))
        adapters = [str(file.parent) for file in inner if re.search("lora|adapter", file.name)]
        contents = f"adapters in {' and '.join(adapters)}: name one" if adapters else FULL if inner else "none"
        raise ValueError(f"{rule}, {source} holds {contents}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line. Errors end it with one line and exit code 2."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="omni-rl lora", description=__doc__, formatter_class=formatter)
    parser.add_argument("source", type=Path, help="file or folder of another trainer, or a run's weights folder")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--model", required=True, help="folder or hub id of the adapter's model")
    layouts = "layout of the folder: diffusers', for --init-weights and load_lora_weights, or peft's"
    parser.add_argument("--layout", choices=("diffusers", "peft"), default="diffusers", help=layouts)
    args = parser.parse_args(argv)
    try:
        check_source(args.source)
        require(
            (not args.target.exists(), f"target must be new, got {args.target}"),
            (args.target.suffix != ".safetensors", f"target must be a folder, got {args.target}"),
        )  # fmt: skip
        from omni_rl.tools.lora_files import read_factors, write_peft, write_start

        factors = read_factors(args.source, args.model)
        export = write_peft if args.layout == "peft" else write_start
        print(export(factors, args.target, args.model))
    except (ImportError, OSError, ValueError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    silence_libraries()
    main()
