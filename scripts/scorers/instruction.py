"""Write the instruction used to train a reward model's weights to a file, from its source code.

    python scripts/scorers/instruction.py HPSv3/hpsv3/dataset/data_collator_qwen.py instruction.txt \\
        INSTRUCTION prompt_with_special_token
    python scripts/scorers/instruction.py VideoAlign/prompt_template.py instruction.txt \\
        DETAILED_PROMPT_WITH_SPECIAL_TOKEN

The names are those of texts in one or more sources, which are joined to the model's instruction. The sources, from
github.com/MizzenAI/HPSv3, github.com/KwaiVGI/VideoAlign or github.com/TIGER-AI-Lab/EditReward, are parsed, not run.
"""

import ast
import sys
from itertools import takewhile
from pathlib import Path


def main(argv: list[str]) -> None:
    """Parse the sources named by the first arguments (each a .py file), and write the file named by the next one."""
    sources = [Path(word) for word in takewhile(lambda word: word.endswith(".py"), argv)]
    target, *names = argv[len(sources) :]
    texts: dict[str, str] = {}
    for node in (node for source in sources for node in ast.parse(source.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts |= {name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)}
    if not set(names) <= texts.keys():
        raise SystemExit(f"{' and '.join(s.name for s in sources)} must set {' and '.join(names)} to texts")
    Path(target).write_text("".join(texts[name] for name in names), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    main(sys.argv[1:])
