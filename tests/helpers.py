"""What several tests share."""

from pathlib import Path

REPO = Path(__file__).parent.parent
CHECKPOINT = REPO / "checkpoints" / "tiny-signs-qwen-image"
