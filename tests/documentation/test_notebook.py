"""The notebook of a first run."""

from pathlib import Path

import pytest
from pages import ROOT

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


@pytest.mark.slow
def test_the_notebook_runs_as_it_stands():
    nbformat = pytest.importorskip("nbformat", reason="needs the extra dev")
    client = pytest.importorskip("nbclient", reason="needs the extra dev").NotebookClient
    notebook = nbformat.read(NOTEBOOK, 4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("rounds=200", "rounds=20").replace("rounds=60", "rounds=10")
    client(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(Path.cwd())}}
    ).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert printed.count("test accuracy") == 5
    assert len([*Path("runs").glob("notebook_*/*/result.json")]) == 5
