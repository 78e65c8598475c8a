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


@pytest.mark.parametrize(("scale", "name"), [("reduced", "table9"), ("full", "table9-full")])
def test_the_gallery_has_a_study_between_its_comments_once_all_of_its_runs_are_done(
    start, tmp_path, scale, name
):
    folder = f"table9-{scale}"
    study = write_study(tmp_path / "runs")
    shutil.copytree(study, folder)
    found = json.loads(Path(folder, "study.json").read_text()) | {"scale": scale}
    page = f"# Gallery\n\nWords.\n\n<!-- {name} -->\nold\n<!-- end of {name} -->\n\nMore words.\n"
    Path("docs/gallery.md").write_text(page)
    Path(folder, "table.md").write_text("The table.\n")
    Path(folder, "curves.png").write_bytes(b"curves")
    with pytest.raises(SystemExit, match=rf"{folder}: cells/2/none-s1 is not done"):
        start(folder)
    assert Path("docs/gallery.md").read_text() == page
    found["cells"].pop()
    Path(folder, "study.json").write_text(json.dumps(found))
    start(folder)
    written = Path("docs/gallery.md").read_text()
    assert written.startswith(f"# Gallery\n\nWords.\n\n<!-- {name} -->\n```text\n")
    assert written.endswith(f"<!-- end of {name} -->\n\nMore words.\n")
    assert "old" not in written
    assert "\nThe table.\n" in written
    assert "(studies.md#verdicts).\n" in written
    assert f"(figures/gallery/{name}.png)" in written
    assert Path(f"docs/figures/gallery/{name}.png").read_bytes() == b"curves"
