"""What several tests share."""

from pathlib import Path

REPO = Path(__file__).parent.parent
CHECKPOINT = REPO / "checkpoints" / "tiny-signs-qwen-image"


def load_newest(checkpoints, *parts):
    """What `Checkpoint.latest` finds, loaded into the parts."""
    checkpoints.load(saved := checkpoints.latest(), *parts)
    return saved
