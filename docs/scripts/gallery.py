"""Write results of studies to the pages docs/gallery*.md.

Command: ``python docs/scripts/gallery.py runs/studies/NAME-SCALE ...``.

A study has a section on one of the pages, between the comments ``<!-- NAME -->`` and
``<!-- end of NAME -->``. If the scale of the study is not ``reduced``, the comments contain
``NAME-SCALE`` instead of ``NAME``. The script finds the page and writes the section: the figure,
the version of the code, the table, the verdicts and the command. Learning rates and costs are in a
part that a reader opens. The script copies the figure to ``figures/gallery``.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from pathlib import Path

import pandas as pd
from folders import FIGURES_FOLDER
from generated import replaced

from fl_lightning import load_study
from fl_lightning.experiments.studies.study_frame import Chosen, StudyFrame, Verdict
from fl_lightning.experiments.studies.table_columns import FURTHER
from fl_lightning.experiments.studies.tables import (
    as_text,
    caption,
    remark_lines,
    spread_table,
    whole_table,
)

PAGES = Path(__file__).parents[1]
FIGURES = FIGURES_FOLDER / "gallery"
SHOWN = ("by_E", "by_T_", "by_gamma", "by_alpha", "difference", "curves")
"""Names of figures. If a study has several of these figures, the page shows the first of them."""


def page_of(name: str) -> Path:
    """Return the page with a study's section.

    Args:
        name: Name of the section.
    """
    pages = [page for page in sorted(PAGES.glob("gallery*.md")) if f"<!-- {name} -->\n" in page.read_text()]
    if len(pages) != 1:
        sys.exit(f"{name}: {len(pages)} pages docs/gallery*.md have the line <!-- {name} -->, not one page")
    return pages[0]


def section(study: Path) -> tuple[str, str]:
    """Copy a study's figure and return the section's name and text.

    Args:
        study: Folder of the study.
    """
    found = json.loads((study / "study.json").read_text())
    name = found["name"] if found["scale"] == "reduced" else f"{found['name']}-{found['scale']}"
    runs = found["cells"]
    if unfinished := [run["directory"] for run in runs if run["phase"] != "done"]:
        sys.exit(f"{study}: {unfinished[0]} is not done")
    picture = next(study / f"{figure}.png" for figure in SHOWN if (study / f"{figure}.png").is_file())
    FIGURES.mkdir(exist_ok=True)
    shutil.copy(picture, FIGURES / f"{name}.png")
    shown = "accuracy over communication rounds" if picture.stem == "curves" else "the values of the table"
    versions = [
        ", ".join(sorted({one[package] for run in runs for one in run["provenance"]}))
        for package in ("fl_lightning", "torch")
    ]
    results = load_study(study)
    main, costs = tables(results)
    parts = [
        f"![{found['title']}: {shown}](figures/gallery/{name}.png)",
        origin(results, *versions),
        as_text(main, "github"),
        verdicts(results.claims),
        f"```text\npython -m fl_lightning study configs/studies/{found['name']}.yaml --scale {found['scale']}\n```",
        folded([as_text(costs, "github"), *learning_rates(results.choices)]),
    ]
    return name, "\n\n".join(filter(None, parts))


def origin(results: StudyFrame, code: str, torch: str) -> str:
    """Return a line with the scale, the seeds and the versions of the code.

    Args:
        results: Results of the study.
        code: Versions of fl_lightning.
        torch: Versions of PyTorch.
    """
    paper = f" ({results.paper})" if results.paper else ""
    spread = f", mean ± standard deviation over {results.repeats}"
    head = caption(results).removeprefix(f"{results.title}{paper}. ").replace(spread, "")
    head = head.partition(" Smaller than in the paper")[0]
    others = [line for line in remark_lines(results) if line.startswith("computed by other code")]
    return " ".join(
        [
            head,
            f"Code: fl_lightning {code}. PyTorch {torch}.",
            *(f"{line[0].upper()}{line[1:]}." for line in others),
        ]
    )


def tables(results: StudyFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the table with the values, and the table with learning rates and costs."""
    metrics, published = [*results.metrics], [name for name in FURTHER if "published" in name]
    main = spread_table(results)
    more = metrics[1:] if main is not None else []
    if main is None:
        main = whole_table(results, [*metrics, *published])
    return main, whole_table(results, [*more, *(name for name in FURTHER if name not in published)])


def verdicts(claims: Sequence[Verdict]) -> str:
    """Return a Markdown table of claims and verdicts; empty without claims."""
    rows = []
    for claim in claims:
        difference, *more = claim.words.split("; ")
        decided = [match[1] for part in more if (match := re.match(r"these .* of ([\d.]+) or more", part))]
        p = [re.sub(r" corrected for (.*)", r" (\1)", part[2:]) for part in more if part.startswith("p ")]
        difference = re.sub(r"^(mean )?difference ", "", difference)
        difference = re.sub(r", interval (\S+ to \S+),", r" (\1),", difference)
        rows.append(
            {
                "claim": f"`{claim.claim}`",
                "verdict": f"**{claim.verdict}**",
                "difference (interval)": difference,
                "can decide": "".join(decided),
                "p, corrected": "".join(p),
            }
        )
    table = pd.DataFrame(rows, dtype=object)
    return as_text(table.loc[:, (table != "").any()], "github") if rows else ""


def learning_rates(choices: Sequence[Chosen]) -> list[str]:
    """Return Markdown tables of the values that were tried on validation data, one for each setting."""
    parts = []
    for axis in dict.fromkeys(choice.axis for choice in choices):
        chosen = [choice for choice in choices if choice.axis == axis]
        tried = sorted(dict.fromkeys(label for choice in chosen for label in choice.values), key=_size)
        metrics = {choice.metric for choice in chosen}
        seeds = ", ".join(map(str, sorted({choice.seed for choice in chosen})))
        at = {f"{name}={label}" for choice in chosen for name, label in choice.at.items()}
        which = next(iter(metrics)) if len(metrics) == 1 else "the metric of each row"
        where = f" at {', '.join(sorted(at))}" if at else ""
        rows = [
            {
                **choice.by,
                **({"metric": choice.metric} if len(metrics) > 1 else {}),
                **{label: _tried(choice, label) for label in tried},
            }
            for choice in chosen
        ]
        table = as_text(pd.DataFrame(rows, dtype=object), "github")
        parts.append(
            f"Values of `{axis}`, by {which} of seed {seeds}{where}. The chosen value is bold.\n\n{table}"
        )
    return parts


def _size(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return inf, label


def _tried(choice: Chosen, label: str) -> str:
    value = choice.values.get(label)
    text = "" if value is None else f"{value:.3f}" if isfinite(value) else "diverged"
    return f"**{text}**" if text and label == choice.chosen else text


def folded(parts: Iterable[str]) -> str:
    """Return a part that a reader opens, as HTML that GitHub and Sphinx show."""
    return "\n\n".join(["<details>\n<summary>Learning rates and costs</summary>", *parts, "</details>"])


def main(studies: list[str]) -> None:
    """Write the section of each study. ``studies`` are the folders of the studies."""
    for study in map(Path, studies):
        name, text = section(study)
        page = page_of(name)
        page.write_text(replaced(name, page.read_text(), text))


if __name__ == "__main__":
    main(sys.argv[1:])
