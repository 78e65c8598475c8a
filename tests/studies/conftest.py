"""A study in an empty directory."""

from pathlib import Path

import pytest
import yaml

from fl_lightning.experiments.studies.engines import local
from tests.support.study_in_process import TINY, InThisProcess, write


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The names of the cells that were trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "LocalEngine", InThisProcess)
    monkeypatch.setattr("fl_lightning.experiments.studies.running._PAUSE", 0)
    monkeypatch.setattr(InThisProcess, "ran", [], raising=False)
    Path("tiny.yaml").write_text(yaml.safe_dump(TINY))
    write()
    return InThisProcess.ran
