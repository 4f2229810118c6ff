"""The notebook runs from its first cell to its last one, and its reward rises."""

import re

import nbformat
import pytest
from helpers import REPO, in_turn
from nbclient import NotebookClient
from notebook_image import images

PATH = REPO / "notebooks" / "flowgrpo_by_hand.ipynb"


def printed(notebook) -> str:
    """What all cells have printed."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@in_turn(1, 8)
@pytest.mark.parametrize("steps", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_the_notebook_learns(steps):
    notebook = nbformat.read(PATH, as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.count("STEPS = 20") == 1
    first.source = first.source.replace("STEPS = 20", f"STEPS = {steps}")
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    rewards = [float(reward) for reward in re.findall(r"step \d+: reward (\S+)", printed(notebook))]
    assert len(rewards) == steps
    assert len(images(notebook)) == 2  # which docs/images/notebook.png shows
    before, after = map(float, re.search(r"(\S+) -> (\S+)", printed(notebook)).groups())
    assert after > before + (0.1 if steps > 2 else 0)


def test_the_notebook_is_kept_without_what_it_printed():
    for cell in nbformat.read(PATH, as_version=4).cells:
        assert cell.cell_type != "code" or (cell.outputs == [] and cell.execution_count is None)
