"""Reading a study's file, with one line for whatever is wrong in it."""

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.studies.claims import difference, judge
from fl_lightning.studies.definition import Choice, Definition, Scale, Study, labels_of, listed


def read_study(path: Path, scale: str) -> Study:
    """Read a study's file.

    Args:
        path: The file.
        scale: The scale to run.

    Raises:
        ConfigurationError: The file is none, a key or label is unknown, or it has no such scale.
    """
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise ConfigurationError(
            f"study: {path} cannot be read: {reason}; give the YAML of a study"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"study: {path} is no YAML: {' '.join(str(error).split())}") from error
    definition: Definition = _built(Definition, content, str(path))
    definition = _replaced(
        definition, scales={k: _built(Scale, v, f"{path}: scales.{k}") for k, v in definition.scales.items()}
    )
    definition = _replaced(
        definition, choose=[_built(Choice, v, f"{path}: choose") for v in definition.choose]
    )
    if scale not in definition.scales:
        raise ConfigurationError(
            f"--scale: {path} has no scale {scale!r}; use one of {', '.join(definition.scales)}"
        )
    own = {name: getattr(definition.scales[scale], name) for name in ("title", "published")}
    definition = _replaced(definition, **{name: value for name, value in own.items() if value is not None})
    study = Study(
        path.stem, path.parent, definition, scale, _axes(definition, definition.scales[scale], path)
    )
    _check(study, path)
    return study


def _built(kind: type, content: Any, place: str) -> Any:
    """An object of a dataclass from a mapping, its keys and types checked."""
    if not isinstance(content, dict):
        raise ConfigurationError(f"{place}: a mapping is needed, found {type(content).__name__}")
    names = [one.name for one in fields(kind)]
    for name in content:
        if name not in names:
            raise ConfigurationError(
                f"{place}: there is no key {name!r}{nearest(str(name), names)}; use {', '.join(names)}"
            )
    hints = get_type_hints(kind) | {"scales": dict[str, Any], "choose": list[Any]}
    parser = ArgumentParser(exit_on_error=False)
    for name in content:
        parser.add_argument(f"--{name}", type=hints[name])
    try:
        checked = parser.parse_object(content).as_dict()  # classes that can be imported are no dicts before
        return kind(**{name: checked[name] for name in content})
    except (ArgumentError, TypeError) as error:
        raise ConfigurationError(f"{place}: {' '.join(str(error).split())}") from error


def _replaced(definition: Definition, **changes: Any) -> Definition:
    return Definition(
        **{**{one.name: getattr(definition, one.name) for one in fields(definition)}, **changes}
    )


def _axes(definition: Definition, scale: Scale, path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for axis in dict.fromkeys([*definition.axes, *scale.axes]):
        known = labels_of(axis, definition.axes.get(axis, scale.axes.get(axis)), path)
        own = scale.axes.get(axis)
        if own is None or axis not in definition.axes:
            found[axis] = known
            continue
        if isinstance(own, list) and isinstance(
            definition.axes[axis], list
        ):  # values, and others at this scale
            found[axis] = labels_of(axis, own, path)
            continue
        chosen = own if isinstance(own, Mapping) else {str(label): None for label in listed(own)}
        for label in map(str, chosen):
            if label not in known:
                raise ConfigurationError(
                    f"{path}: axes.{axis} has no label {label!r}{nearest(label, known)}; it has {', '.join(known)}"
                )
        found[axis] = {
            str(label): {**known[str(label)], **(settings or {})} for label, settings in chosen.items()
        }
    return found


def _check(study: Study, path: Path) -> None:
    """Refuse names of axes and labels that the study does not have at any scale."""
    definition, known = study.definition, study.known_labels()
    named = [("without", entry) for entry in definition.without]
    named += [
        ("published", {axis: x for axis, x in entry.items() if axis != "value"})
        for entry in definition.published
    ]
    named += [
        ("choose", {choice.axis: [], **{axis: [] for axis in choice.by}, **choice.at})
        for choice in definition.choose
    ]
    named += [("spread", {definition.spread: []})] if definition.spread else []
    for key, entry in named:
        for axis, labels in entry.items():
            if axis not in known:
                raise ConfigurationError(
                    f"{path}: {key}: there is no axis {axis!r}; there are {', '.join(known)}"
                )
            for label in map(str, listed(labels)):
                if label not in known[axis]:
                    raise ConfigurationError(
                        f"{path}: {key}: axis {axis} has no label {label!r}; it has {', '.join(known[axis])}"
                    )
    for axis in known:
        if not isinstance(axis, str):
            raise ConfigurationError(f"{path}: axes: {axis!r} is no name; write it in quotes")
    for choice in definition.choose:
        if choice.axis in choice.by:
            raise ConfigurationError(
                f"{path}: choose: {choice.axis} is chosen and cannot be in by, {choice.by}, too; leave it out there"
            )
        if not choice.metric.startswith("val/"):
            raise ConfigurationError(
                f"{path}: choose: metric {choice.metric} must be one of the validation data, such as val/accuracy"
            )
    nothing = {"known": known, "axes": known, "choose": [], "choices": [], "groups": []}
    nothing |= {"metrics": definition.metrics}
    for claim in definition.claims:
        judge(claim, nothing)
    if definition.difference:
        difference({**nothing, "difference": definition.difference})
    for entry in definition.published:
        if not isinstance(value := entry.get("value"), int | float) or not isfinite(value):
            raise ConfigurationError(f"{path}: published: {entry} has no number as its value")
    if not definition.metrics:
        raise ConfigurationError(f"{path}: metrics: name one at least, such as test/accuracy: test accuracy")
    every = [label for labels in study.axes.values() for label in labels.values()]
    for settings in (definition.settings, study.scale.settings, *every):
        if own := settings.keys() & {"name", "seed_everything"}:
            raise ConfigurationError(
                f"{path}: {own.pop()} is no setting of a study's cells, which have names of their own and the scale's seeds; leave it out"
            )
        if not all(isinstance(one, str) for one in listed(settings.get("config"))):
            raise ConfigurationError(
                f"{path}: config: {settings['config']} must be a file or a list of files"
            )
    for seeds in (study.scale.seeds, *(label["seeds"] for label in every if "seeds" in label)):
        known_as_list = isinstance(seeds, list) and seeds and all(type(seed) is int for seed in seeds)
        if not known_as_list or len({*seeds}) < len(seeds):
            raise ConfigurationError(
                f"{path}: seeds: {seeds} must be a list of different numbers such as [0, 1, 2]"
            )
