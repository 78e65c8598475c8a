"""Write results of studies to docs/gallery.md.

Command: ``python docs/scripts/gallery.py runs/studies/NAME-SCALE ...``.

A study has a section on the page, between the comments ``<!-- NAME -->`` and
``<!-- end of NAME -->``. If the scale of the study is not ``reduced``, the comments contain
``NAME-SCALE`` instead of ``NAME``. The script writes the study's table, verdicts and figure into
this section. It copies the figure to ``figures/gallery``.
"""

import json
import shutil
import sys
from pathlib import Path

from folders import FIGURES_FOLDER
from generated import replaced

PAGE = Path(__file__).parents[1] / "gallery.md"
FIGURES = FIGURES_FOLDER / "gallery"
SHOWN = ("by_E", "by_T_", "by_gamma", "by_alpha", "difference", "curves")
"""Names of figures. If a study has several of these figures, the page shows the first of them."""


def part(study: Path, page: str) -> str:
    """Copy a study's figure and return the page with the study's new section.

    Args:
        study: Folder of the study.
        page: Text of the page.
    """
    found = json.loads((study / "study.json").read_text())
    name = found["name"] if found["scale"] == "reduced" else f"{found['name']}-{found['scale']}"
    runs = found["cells"]
    if unfinished := [run["directory"] for run in runs if run["phase"] != "done"]:
        sys.exit(f"{study}: {unfinished[0]} is not done")
    versions = sorted({one["torch"] for run in runs for one in run["provenance"]})
    sources = sorted({one["fl_lightning"] for run in runs for one in run["provenance"]})
    picture = next(study / f"{name}.png" for name in SHOWN if (study / f"{name}.png").is_file())
    FIGURES.mkdir(exist_ok=True)
    shutil.copy(picture, FIGURES / f"{name}.png")
    command = f"python -m fl_lightning study configs/studies/{found['name']}.yaml --scale {found['scale']}"
    table = (study / "table.md").read_text().strip()
    origin = (
        f"Code: fl_lightning {', '.join(sources)}. PyTorch version: {', '.join(versions)}. "
        "The verdicts follow the [current rules](verdicts.md)."
    )
    shown = (
        "accuracy over communication rounds" if picture.stem == "curves" else "the values of the table above"
    )
    figure = f"![{found['title']}: {shown}](figures/gallery/{name}.png)"
    return replaced(name, page, f"```text\n{command}\n```\n\n{table}\n\n{figure}\n\n{origin}")


def main(studies: list[str]) -> None:
    """Write the section of each study. ``studies`` are the folders of the studies."""
    for study in map(Path, studies):
        PAGE.write_text(part(study, PAGE.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
