"""The gallery shows studies that are done, and changes nothing but their parts."""

import json
import shutil
from pathlib import Path

import gallery
import pytest

from fl_lightning.experiments.studies.study_frame import Chosen, Verdict
from tests.support.written_runs import write_study


@pytest.fixture(autouse=True)
def _in_this_folder(monkeypatch):
    monkeypatch.setattr(gallery, "PAGES", Path())
    monkeypatch.setattr(gallery, "FIGURES", Path("figures"))


@pytest.mark.parametrize(("scale", "name"), [("reduced", "table9"), ("full", "table9-full")])
def test_the_gallery_has_a_study_between_its_comments_once_all_of_its_runs_are_done(tmp_path, scale, name):
    folder = f"table9-{scale}"
    study = write_study(tmp_path / "runs")
    shutil.copytree(study, folder)
    found = json.loads(Path(folder, "study.json").read_text()) | {"scale": scale}
    page = f"# A paper\n\nWords.\n\n<!-- {name} -->\nold\n<!-- end of {name} -->\n\nMore words.\n"
    Path("gallery-paper.md").write_text(page)
    Path("gallery.md").write_text("# Gallery\n\n<!-- table8 -->\nold\n<!-- end of table8 -->\n")
    Path("results.md").write_text(page)
    Path(folder, "curves.png").write_bytes(b"curves")
    with pytest.raises(SystemExit, match=rf"{folder}: cells/2/none-s1 is not done"):
        gallery.main([folder])
    assert Path("gallery-paper.md").read_text() == page
    found["cells"].pop()
    Path(folder, "study.json").write_text(json.dumps(found))
    gallery.main([folder])
    written = Path("gallery-paper.md").read_text()
    assert written.startswith(f"# A paper\n\nWords.\n\n<!-- {name} -->\n![")
    assert written.endswith(f"</details>\n<!-- end of {name} -->\n\nMore words.\n")
    assert "\nold\n" not in written
    assert all("\nold\n" in Path(page).read_text() for page in ("gallery.md", "results.md"))
    parts = (
        f"(figures/gallery/{name}.png)",
        "Code: fl_lightning 0.3.0 78871f7d. PyTorch 2.11.0.",
        "| GN       | 0.406 ± 0.044 |",
        "| claim     | verdict       |",
        f"python -m fl_lightning study configs/studies/table9.yaml --scale {scale}\n",
        "\n<details>\n",
        "| 0.25, given     |",
        "| method   | 0.25      | 0.5   |",
    )
    places = [written.index(part) for part in parts]
    assert places == sorted(places)
    assert Path(f"figures/{name}.png").read_bytes() == b"curves"


def test_a_study_needs_one_page():
    with pytest.raises(SystemExit, match="table9: 0 pages"):
        gallery.page_of("table9")
    for name in ("gallery.md", "gallery-paper.md"):
        Path(name).write_text("<!-- table9 -->\n<!-- end of table9 -->\n")
    with pytest.raises(SystemExit, match="table9: 2 pages"):
        gallery.page_of("table9")


def test_the_version_of_older_rows_stands_above_the_table(tmp_path):
    study = write_study(tmp_path / "runs")
    found = json.loads((study / "study.json").read_text())
    found["cells"].pop()
    found["cells"][0]["why"] = "fl_lightning 0.2.0, now 0.3.0"
    (study / "study.json").write_text(json.dumps(found))
    (study / "curves.png").write_bytes(b"curves")
    _, text = gallery.section(study)
    line = next(line for line in text.splitlines() if "Code: " in line)
    assert "Computed by other code: BN, E = 1, seed 0 (fl_lightning 0.2.0, now 0.3.0)." in line
    assert text.index(line) < text.index("| method")


def test_a_verdict_has_its_difference_its_interval_and_its_p_value():
    words = "mean difference +0.026, interval -0.012 to +0.065, 5 pairs; these seeds can decide a difference of 0.038 or more"
    several = "3 comparisons: holds in 1, undecided in 2; these seeds can decide a margin of 0.045 or more"
    claims = [
        Verdict("GN > BN", "undecided", f"{words}; p 0.054, 0.109 corrected for 3 headline claims"),
        Verdict("A ~ B within 0.05", "undecided", several),
        Verdict("C > D", "one pair agrees", "difference +0.295 in one pair"),
    ]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in gallery.verdicts(claims).splitlines()]
    assert rows[0] == ["claim", "verdict", "difference (interval)", "can decide", "p, corrected"]
    p = "0.054, 0.109 (3 headline claims)"
    assert rows[2:] == [
        ["`GN > BN`", "**undecided**", "+0.026 (-0.012 to +0.065), 5 pairs", "0.038", p],
        ["`A ~ B within 0.05`", "**undecided**", "3 comparisons: holds in 1, undecided in 2", "0.045", ""],
        ["`C > D`", "**one pair agrees**", "+0.295 in one pair", "", ""],
    ]
    assert gallery.verdicts([]) == ""


def test_the_tried_values_of_each_choice_are_in_one_table():
    def choice(method, chosen, values, at=None):
        return Chosen("lr", {"method": method}, at or {}, "val/accuracy", chosen, values, 1000, [], [])

    first = choice("BN", "0.1", {"0.4": float("inf"), "0.1": 0.508}, {"E": "20"})
    (text,) = gallery.learning_rates([first, choice("GN", "1.6", {"0.1": 0.4, "1.6": 0.5, "0.4": None})])
    words, table = text.split("\n\n")
    assert words == "Values of `lr`, by val/accuracy of seed 1000 at E=20. The chosen value is bold."
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
    assert rows[0] == ["method", "0.1", "0.4", "1.6"]
    assert rows[2:] == [["BN", "**0.508**", "diverged", ""], ["GN", "0.400", "", "**0.500**"]]
