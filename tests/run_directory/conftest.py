"""Fixtures of runs whose models are used outside of them."""

import sys
from pathlib import Path

import pytest

from tests.support.trained_models import write_table


@pytest.fixture
def patients():
    write_table("patients.csv", 160, seed=0)


@pytest.fixture
def methods(tmp_path, monkeypatch):
    """Write a module ``methods`` to where runs start."""
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda code: Path("methods.py").write_text(code)
    sys.modules.pop("methods", None)
