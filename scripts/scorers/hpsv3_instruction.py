"""Writes the instruction that HPSv3's weights were trained with into a file, from HPSv3's source code.

    python scripts/scorers/hpsv3_instruction.py HPSv3/hpsv3/dataset/data_collator_qwen.py instruction.txt

The source, of github.com/MizzenAI/HPSv3 or of the package hpsv3, is read and not run.
"""

import ast
import sys
from pathlib import Path

NAMES = ("INSTRUCTION", "prompt_with_special_token")  # one after the other they are what the model is told


def main(argv: list[str]) -> None:
    """Reads the source that the first argument names and writes the file that the second one names."""
    source, target = map(Path, argv)
    texts: dict[str, str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)}
    if not set(NAMES) <= texts.keys():
        raise SystemExit(f"{source.name} must set {' and '.join(NAMES)} to texts")
    target.write_text("".join(texts[name] for name in NAMES), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
