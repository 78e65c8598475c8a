"""HTML report on studies. The page needs no other file and no network."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fl_lightning import __version__
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.config_digest import deciding_settings
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.studies.axis_labels import labels_in_words, short
from fl_lightning.experiments.studies.client_tables import client_tables
from fl_lightning.experiments.studies.figures import pictures
from fl_lightning.experiments.studies.study_frame import StudyFrame, load_study
from fl_lightning.experiments.studies.table_columns import FURTHER, check_columns
from fl_lightning.experiments.studies.tables import (
    COMPUTED,
    caption,
    spread_table,
    whole_table,
    write_tables,
)
from fl_lightning.files import write_text
from fl_lightning.pictures.style import rendered

_SETTINGS = {
    "data": "data",
    "model": "model.model",
    "norm layers": "model.model.norm",
    "communication rounds": "trainer.max_epochs",
    "local steps E": "model.local_steps",
    "local epochs": "model.local_epochs",
    "clients in a round (1.0: all)": "model.participation",
    "batch size": "data.batch_size",
    "client optimizer": "model.client_optimizer",
    "learning rate": "model.client_optimizer.lr",
    "its schedule": "model.client_lr_schedule",
    "server optimizer": "model.server_optimizer",
    "aggregator": "model.aggregator",
    "clients weighted by": "model.weighting",
}
"""Settings in the first table of a section, keyed by the text on the page."""

_LINKS = ("config.yaml", "result.json", "metrics.jsonl", "learning_curve.png", "error.txt")


def write_report(
    directories: Sequence[Path],
    output: Path | None = None,
    columns: Sequence[str] = (),
) -> list[Path]:
    """Write the report as a page, and rewrite tables on request.

    Args:
        directories: Folders of studies. Each study has a section of the page.
        output: HTML file. By default it is ``report.html``, in the study's folder for a single
            study, and otherwise in the working directory. Links to run directories are relative to
            the file.
        columns: Columns after the labels. If this argument is given, all tables are rewritten.

    Returns:
        The written files. The page comes first.

    Raises:
        ConfigurationError: A directory is not that of a study, a file cannot be read, or a
            column is unknown.
    """
    for path in directories:
        if not (path / "study.json").is_file():
            raise ConfigurationError(
                f"report: {path} is not the folder of a study, as it has no study.json; give folders such as "
                "runs/studies/NAME-quick, or compare runs by 'runs --csv FILE'"
            )
    studies = {path: load_study(path) for path in directories}
    page = output or (next(iter(studies)) if len(studies) == 1 else Path()) / "report.html"
    for results in studies.values():
        check_columns(columns, results.metrics)
    options: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    html = Path(__file__).with_name("report.html").read_text()
    template = Environment(autoescape=True, **options).from_string(html)
    home = page.absolute().parent
    sections = [_section(results, home) for results in studies.values()]
    write_text(page, template.render(parts=sections, version=__version__))
    written = [page]
    for folder, results in studies.items():
        written += write_tables(folder, results, columns) if columns else []
    return written


def _section(results: StudyFrame, home: Path) -> dict[str, Any]:
    """Return the values that the template needs for a section of the page."""
    axes, cells = [*results.axes], results.cells
    runs = [(labels_in_words(row.labels, axes), run) for row in results.rows for run in row.runs]
    configs: dict[str, Config] = {}
    for label, attempt in ((label, Attempt(Path(run["directory"]))) for label, run in runs):
        if label not in configs and attempt.config.is_file():
            configs[label] = attempt.read_config()
    rounds = "trainer.max_epochs"
    settings = {x: {**deciding_settings(c), rounds: c["trainer"]["max_epochs"]} for x, c in configs.items()}
    shown = {
        words: dict.fromkeys(str(x) for known in settings.values() if (x := known.get(name)) is not None)
        for words, name in _SETTINGS.items()
    }
    by_spread = f"{results.metrics[results.first].capitalize()} by {short(results.spread or '', axes)}"
    whole = whole_table(results, [*results.metrics, *FURTHER])
    tables = {by_spread: spread_table(results), "All values": whole}
    tables |= {f"By client: {table.caption}": table.frame() for table in client_tables(results)}
    return {
        "results": results,
        "caption": caption(results),
        "published": bool(cells["published"].notna().any()),
        "tables": {name: table for name, table in tables.items() if table is not None},
        "figures": [*_drawn(results)],
        "settings": {x: "; ".join(cells[f"run_{x}"].dropna().unique()) for x in ("method", "partition")}
        | {words: "; ".join(values) for words, values in shown.items()},
        "runs": [_run(run, label, home) for label, run in runs],
        "base": next((yaml.safe_dump(config, sort_keys=False) for config in configs.values()), ""),
        "differences": [(x, _differences(next(iter(settings.values())), y)) for x, y in settings.items()],
        "provenance": _provenance([run for _, run in runs if "environment" in run]),
    }


def _drawn(results: StudyFrame) -> Iterator[tuple[Markup, str]]:
    """Yield each figure as HTML, with its caption."""
    for picture in pictures(results):
        try:
            yield _inline(rendered(picture.draw(), "svg").decode()), picture.caption
        except Exception as error:  # noqa: BLE001  # a failed figure must not end the report
            yield Markup("<p>{}</p>").format(f"not drawn: {type(error).__name__}: {error}"), picture.caption


def _inline(svg: str) -> Markup:
    """Return an SVG file as an element of a page, without XML header, fonts and group ids."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', body, count=1)
    return Markup(body)  # safe, since matplotlib escapes all text


def _differences(before: Config, now: Config) -> list[tuple[str, Any, Any]]:
    names = (name for name in dict.fromkeys([*before, *now]) if name != "seed_everything")
    different = [name for name in names if before.get(name) != now.get(name)]
    return [(name, before.get(name, "-"), now.get(name, "-")) for name in different]


def _run(run: Mapping[str, Any], label: str, home: Path) -> dict[str, object]:
    """Return what the template needs for a run: its columns, its label, and links."""
    place = Path(run["directory"])
    shown = {path.name: _link(path, home) for name in _LINKS if (path := place / name).is_file()}
    return {
        **run,
        "label": label,
        "place": f"{place.parent.name}/{place.name}",
        "link": _link(place, home) if place.is_dir() else "",
        "links": shown,
    }


def _link(path: Path, home: Path) -> str:
    return quote(os.path.relpath(path.absolute(), home))


def _provenance(runs: Iterable[Mapping[str, Any]]) -> dict[str, Counter[str]]:
    """Count the runs with each version of the code, each package version, each executor and so on."""
    counts: dict[str, Counter[str]] = {}
    for run in runs:
        every = {
            **run["environment"],
            "fl_lightning": ", ".join(dict.fromkeys(x["fl_lightning"] for x in run.get("provenance", ()))),
            **{name: run.get("computed_by", {}).get(name) for name in COMPUTED},
            **{f"{x} data".replace("partition data", "partition"): y for x, y in run.get("data", {}).items()},
        }
        for name, value in every.items():
            text = "unknown" if value in (None, "") else str(value)
            counts.setdefault(name.replace("_", " "), Counter())[text] += 1
    return counts
