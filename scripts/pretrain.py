"""Pretrain a small model of the repository, and generate the data for its task.

    python scripts/pretrain.py signs                 # writes checkpoints/tiny-signs-qwen-image
    python scripts/pretrain.py signs --help          # the flags of a task

checkpoints/README.md describes the models. Each task is a file in scripts/pretraining/.
"""

import argparse

from pretraining import beeps, colors, edit, moving, reader, signs, tones

TASKS = {
    "signs": signs.main, "reader": reader.main, "edit": edit.main, "moving": moving.main, "tones": tones.main,
    "colors": colors.main, "beeps": beeps.main,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="flags of the task")
    args = parser.parse_args()
    TASKS[args.task](args.flags)


if __name__ == "__main__":
    main()
