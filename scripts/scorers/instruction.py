"""Write the instruction that the weights of a reward model were trained with into a file, from its source code.

    python scripts/scorers/instruction.py HPSv3/hpsv3/dataset/data_collator_qwen.py instruction.txt \\
        INSTRUCTION prompt_with_special_token
    python scripts/scorers/instruction.py VideoAlign/prompt_template.py instruction.txt \\
        DETAILED_PROMPT_WITH_SPECIAL_TOKEN

The names are those of texts in the source, which are joined to the model's instruction. The source, of
github.com/MizzenAI/HPSv3 or github.com/KwaiVGI/VideoAlign, is read and not run.
"""

import ast
import sys
from pathlib import Path


def main(argv: list[str]) -> None:
    """Read the source that the first argument names and write the file that the second one names."""
    source, target, names = Path(argv[0]), Path(argv[1]), argv[2:]
    texts: dict[str, str] = {}
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)}
    if not set(names) <= texts.keys():
        raise SystemExit(f"{source.name} must set {' and '.join(names)} to texts")
    target.write_text("".join(texts[name] for name in names), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
