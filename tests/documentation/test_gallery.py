"""The gallery shows studies that are done, and changes nothing but their parts."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from written_runs import write_study

SCRIPTS = Path(__file__).parents[2] / "docs" / "scripts"


@pytest.fixture
def start(monkeypatch):
    """Run a copy of the script as a command would, so that a figure is drawn beside it and not into the documentation."""
    Path("docs", "scripts").mkdir(parents=True)
    Path("docs", "figures").mkdir()
    for name in ("gallery.py", "folders.py", "generated.py", "methods_table.py"):
        shutil.copy(SCRIPTS / name, "docs/scripts")
    monkeypatch.syspath_prepend("docs/scripts")

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["docs/scripts/gallery.py", *args])
        monkeypatch.delitem(sys.modules, "folders", raising=False)
        runpy.run_path(sys.argv[0], run_name="__main__")

    return run


def test_the_gallery_has_a_study_between_its_comments_once_all_of_its_runs_are_done(start, tmp_path):
    study = write_study(tmp_path / "runs")
    shutil.copytree(study, "table9-reduced")
    found = json.loads(Path("table9-reduced/study.json").read_text())
    page = "# Gallery\n\nWords.\n\n<!-- table9 -->\nold\n<!-- end of table9 -->\n\nMore words.\n"
    Path("docs/gallery.md").write_text(page)
    Path("table9-reduced/table.md").write_text("The table.\n")
    Path("table9-reduced/curves.png").write_bytes(b"curves")
    with pytest.raises(SystemExit, match=r"table9-reduced: cells/2/none-s1 is not done"):
        start("table9-reduced")
    assert Path("docs/gallery.md").read_text() == page
    found["groups"][-1]["runs"].pop()
    Path("table9-reduced/study.json").write_text(json.dumps(found))
    start("table9-reduced")
    written = Path("docs/gallery.md").read_text()
    assert written.startswith("# Gallery\n\nWords.\n\n<!-- table9 -->\n```text\n")
    assert written.endswith("<!-- end of table9 -->\n\nMore words.\n")
    assert "old" not in written
    assert "\nThe table.\n" in written
    assert f"({Path('figures/gallery/table9.png')})" in written
    assert Path("docs/figures/gallery/table9.png").read_bytes() == b"curves"
