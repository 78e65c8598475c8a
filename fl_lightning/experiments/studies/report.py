"""One HTML page, which needs no other file and no network, about studies and runs."""

import json
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from fl_lightning import __version__
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.description import deciding_settings
from fl_lightning.experiments.run_directory.directory import Attempt, Config
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.experiments.studies.cells import RUNS
from fl_lightning.experiments.studies.figures import Picture, pictures
from fl_lightning.experiments.studies.found import Found, RunFound
from fl_lightning.experiments.studies.panels import label_of, short
from fl_lightning.experiments.studies.run_groups import found_in, resolved
from fl_lightning.experiments.studies.tables import COMPUTED, seeds_of, spread_table, whole_table
from fl_lightning.files import restored, write_text
from fl_lightning.pictures.learning_curve import learning_curve_figure
from fl_lightning.pictures.style import rendered

SCALES = {
    "quick": "A declared subset that shows in minutes that everything works; what holds of it is no evidence for or against a paper.",
    "reduced": "Smaller than in the paper where the settings below say so; orderings of methods can be compared, numbers cannot.",
    "full": "The paper's setting but for what the title says, or the largest of a study of our own.",
}
"""What the scales of studies mean, those of further data sets or networks included (``full_lenet``)."""

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
"""The settings that the page shows first, by what it calls them."""

_LINKS = ("config.yaml", "result.json", "metrics.jsonl", "learning_curve.png", "error.txt")


def write_report(directories: Sequence[Path], output: Path) -> None:
    """Write the page.

    Args:
        directories: Folders of studies, each a part of the page, and run directories, which are one together.
        output: The HTML file; its links to run directories are relative to its folder.

    Raises:
        ConfigurationError: A directory is neither, or a file in it cannot be read.
    """
    founds, runs = [], []
    for path in directories:
        if (path / "study.json").is_file():
            founds.append(read_found(path))
        elif (path / "config.yaml").is_file():
            runs.append(path)
        else:
            raise ConfigurationError(
                f"report: {path} is neither a study's folder (it has no study.json) nor a run directory (no config.yaml); "
                "give such as runs/studies/NAME-quick or runs/NAME/*"
            )
    founds += [found_in(runs)] if runs else []
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(Path(__file__).with_name("report.html").read_text())
    parts = [_part(found, output.absolute().parent) for found in founds]
    write_text(output, template.render(parts=parts, version=__version__))


def read_found(folder: Path) -> Found:
    """What a study has found, with the directories of its runs where they are now.

    Args:
        folder: The study's folder, in ``studies`` beside the folder of all runs.

    Raises:
        ConfigurationError: Its ``study.json`` cannot be read.
    """
    try:
        found: Found = restored(json.loads((folder / "study.json").read_text()))
        cells = folder.resolve().parents[1] / RUNS
        for run in (run for group in found["groups"] for run in group["runs"]):
            run["directory"] = str(cells.joinpath(*Path(run["directory"]).parts[-2:]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"report: {folder / 'study.json'} is not what a study writes; run the study again"
        ) from error
    return found


def _part(found: Found, home: Path) -> dict[str, Any]:
    """What the template says about a study or about runs."""
    axes = [*found["axes"]]
    runs = [run for group in found["groups"] for run in group["runs"]]
    configs = [
        next((config for run in group["runs"] if (config := _config(run)) is not None), None)
        for group in found["groups"]
    ]
    first = next((config for config in configs if config is not None), None)
    first_metric = next(iter(found["metrics"].values())).capitalize()
    tables = {f"{first_metric} by {short(found['spread'] or '')}": spread_table(found)}
    tables["All values"] = whole_table(found)
    return {
        "found": found,
        "seeds": seeds_of(found),
        "scale": SCALES.get(found["scale"].partition("_")[0], ""),
        "tables": {name: rows for name, rows in tables.items() if rows is not None},
        "figures": [*_drawn(found)],
        "settings": {
            "method": "; ".join(dict.fromkeys(run["method"] for run in runs if "method" in run)),
            "partition": "; ".join(dict.fromkeys(run["partition"] for run in runs if "partition" in run)),
            **_in_words([config for config in configs if config is not None]),
        },
        "runs": [
            _run(run, label_of(group, axes), home) for group in found["groups"] for run in group["runs"]
        ],
        "base": yaml.safe_dump(first, sort_keys=False) if first else "",
        "differences": [
            (label_of(group, axes), _differences(first, config))
            for group, config in zip(found["groups"], configs, strict=True)
            if first is not None and config is not None
        ],
        "provenance": _provenance(found),
    }


def _drawn(found: Found) -> Iterator[tuple[Markup, str]]:
    """Figures as HTML, and their captions; of a single run its own pictures, too."""
    runs = [run for group in found["groups"] for run in group["runs"]]
    place = Path(runs[0]["directory"])
    drawable = pictures(found)
    if len(runs) == 1 and (place / "policy.json").is_file() and (place / "metrics.jsonl").is_file():
        rows, policy = read_metrics(place / "metrics.jsonl"), json.loads((place / "policy.json").read_text())
        drawable = [
            Picture(
                "learning_curve",
                "learning curve",
                lambda title: learning_curve_figure(rows, policy, title),
            )
        ]
    for picture in drawable:
        try:
            yield _inline(rendered(picture.draw([]), "svg").decode()), picture.caption
        except Exception as error:  # noqa: BLE001  # matplotlib's: the page is more than its figures
            yield Markup("<p>{}</p>").format(f"not drawn: {type(error).__name__}: {error}"), picture.caption
    for path in sorted(place.glob("*.png")) if len(runs) == 1 else []:
        if path.name != "learning_curve.png":
            source = b64encode(path.read_bytes()).decode()
            words = path.stem.replace("_", " ")
            yield Markup('<img alt="{}" src="data:image/png;base64,{}">').format(words, source), words


def _inline(svg: str) -> Markup:
    """An SVG file as a part of a page: without its head, fonts and the names of its groups, which other figures have, too."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    body = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', body, count=1)
    return Markup(body)  # matplotlib escapes the texts in it


def _config(run: RunFound) -> Config | None:
    attempt = Attempt(Path(run["directory"]))
    return resolved(attempt) if attempt.config.is_file() else None


def _flat(config: Config) -> Config:
    """The settings that decide results, and the number of rounds."""
    return {**deciding_settings(config), "trainer.max_epochs": config["trainer"]["max_epochs"]}


def _differences(first: Config, config: Config) -> list[tuple[str, Any, Any]]:
    """Settings with their values in the first configuration and in another one."""
    before, now = _flat(first), _flat(config)
    names = (name for name in dict.fromkeys([*before, *now]) if name != "seed_everything")
    return [
        (name, before.get(name, "-"), now.get(name, "-"))
        for name in names
        if before.get(name) != now.get(name)
    ]


def _in_words(configs: Sequence[Config]) -> dict[str, str]:
    """The values of the settings that a reader asks for first, all of those that differ."""
    flat = [_flat(config) for config in configs]
    values = {
        words: dict.fromkeys(str(x) for one in flat if (x := one.get(name)) is not None)
        for words, name in _SETTINGS.items()
    }
    return {words: "; ".join(own) for words, own in values.items() if own}


def _run(run: RunFound, label: str, home: Path) -> dict[str, object]:
    """A run's line: where it is, and where it can be seen."""
    place = Path(run["directory"])
    shown = {path.name: _link(path, home) for name in _LINKS if (path := place / name).is_file()}
    identity = place / "wandb_id"
    offline = sorted(place.glob("wandb/offline-run-*"))
    return {
        **run,
        "label": label,
        "place": f"{place.parent.name}/{place.name}",
        "link": _link(place, home) if place.is_dir() else "",
        "links": shown,
        "wandb": identity.read_text().strip() if identity.is_file() else "",
        "offline": _link(offline[-1], home) if offline else "",
    }


def _link(path: Path, home: Path) -> str:
    return quote(os.path.relpath(path.absolute(), home))


def _provenance(found: Found) -> Mapping[str, Mapping[str, int]]:
    """What computed the runs: each value with the number of runs that it is of."""
    counts: dict[str, Counter[str]] = {}
    for run in (run for group in found["groups"] for run in group["runs"] if "environment" in run):
        computed = run.get("computed_by", {})  # of an older study.json there is none
        sources = ", ".join(dict.fromkeys(str(one.get("source")) for one in run["provenance"]))
        every = {
            **run["environment"],
            "source hash": sources,
            **{name: computed.get(name) for name in COMPUTED},
            **{f"{name} data" if name != "partition" else name: x for name, x in run["data"].items()},
        }
        for name, value in every.items():
            text = "unknown" if value in (None, "") else str(value)
            counts.setdefault(name.replace("_", " "), Counter())[text] += 1
    return counts
