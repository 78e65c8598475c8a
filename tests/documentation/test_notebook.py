"""The notebook of a first run."""

import json
import re
from pathlib import Path

import pytest

from tests.support.pages import ROOT

NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


@pytest.mark.slow
def test_its_code_runs_in_this_process():
    pytest.importorskip("IPython", reason="needs the extra dev")
    names = {"__name__": __name__}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            code = "".join(cell["source"]).replace("%%capture", "")
            exec(re.sub(r"rounds=\d+", "rounds=10", code), names)  # noqa: S102  # a page's code
    assert len([*Path("runs").glob("notebook_*/*/result.json")]) == 5


@pytest.mark.nightly
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
