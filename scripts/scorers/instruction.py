"""Write the instruction that the weights of a reward model were trained with into a file, from its source code.

    python scripts/scorers/instruction.py HPSv3/hpsv3/dataset/data_collator_qwen.py instruction.txt \\
        INSTRUCTION prompt_with_special_token
    python scripts/scorers/instruction.py VideoAlign/prompt_template.py instruction.txt \\
        DETAILED_PROMPT_WITH_SPECIAL_TOKEN

The names are those of texts in one source or several, which are joined to the model's instruction. The sources, of
github.com/MizzenAI/HPSv3, github.com/KwaiVGI/VideoAlign or github.com/TIGER-AI-Lab/EditReward, are read and not run.
"""

import ast
import sys
from itertools import takewhile
from pathlib import Path


def main(argv: list[str]) -> None:
    """Read the sources that the first arguments name, each a .py, and write the file that the next one names."""
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
