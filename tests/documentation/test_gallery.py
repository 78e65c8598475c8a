"""The gallery shows studies that are done, and changes nothing but their parts."""

import json
import shutil
from pathlib import Path

import gallery
import pytest

from tests.support.written_runs import write_study


@pytest.mark.parametrize(("scale", "name"), [("reduced", "table9"), ("full", "table9-full")])
def test_the_gallery_has_a_study_between_its_comments_once_all_of_its_runs_are_done(
    monkeypatch, tmp_path, scale, name
):
    monkeypatch.setattr(gallery, "PAGE", Path("gallery.md"))
    monkeypatch.setattr(gallery, "FIGURES", Path("figures"))
    folder = f"table9-{scale}"
    study = write_study(tmp_path / "runs")
    shutil.copytree(study, folder)
    found = json.loads(Path(folder, "study.json").read_text()) | {"scale": scale}
    page = f"# Gallery\n\nWords.\n\n<!-- {name} -->\nold\n<!-- end of {name} -->\n\nMore words.\n"
    Path("gallery.md").write_text(page)
    Path(folder, "table.md").write_text("The table.\n")
    Path(folder, "curves.png").write_bytes(b"curves")
    with pytest.raises(SystemExit, match=rf"{folder}: cells/2/none-s1 is not done"):
        gallery.main([folder])
    assert Path("gallery.md").read_text() == page
    found["cells"].pop()
    Path(folder, "study.json").write_text(json.dumps(found))
    gallery.main([folder])
    written = Path("gallery.md").read_text()
    assert written.startswith(f"# Gallery\n\nWords.\n\n<!-- {name} -->\n```text\n")
    assert written.endswith(f"<!-- end of {name} -->\n\nMore words.\n")
    assert "old" not in written
    assert "\nThe table.\n" in written
    assert "(verdicts.md).\n" in written
    assert f"(figures/gallery/{name}.png)" in written
    assert Path(f"figures/{name}.png").read_bytes() == b"curves"
