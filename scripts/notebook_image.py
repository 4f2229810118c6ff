"""Run the notebook and make docs/images/notebook.png, its signs before and after training, in half a minute.

python scripts/notebook_image.py
"""

import base64
import io
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebooks" / "flowgrpo_by_hand.ipynb"
GAP = 8  # pixels between the two sheets


def main() -> None:
    """Write the two sheets that the notebook shows, one above the other."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    before, after = images(notebook)
    sheet = Image.new("RGB", (before.width, before.height + GAP + after.height), "white")
    sheet.paste(before, (0, 0))
    sheet.paste(after, (0, before.height + GAP))
    sheet.quantize(64).save(ROOT / "docs" / "images" / "notebook.png", optimize=True)


def images(notebook: nbformat.NotebookNode) -> list[Image.Image]:
    """Return the images shown by the cells of an executed notebook."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [output.data["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return [Image.open(io.BytesIO(base64.b64decode(data))) for data in shown]


if __name__ == "__main__":
    main()
