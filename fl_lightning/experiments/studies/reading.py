"""Reader of a study's file. The error message lists all mistakes in the file."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.studies.claims import read_claim, read_difference
from fl_lightning.experiments.studies.definition import (
    Choice,
    Definition,
    Dotted,
    Scale,
    Study,
    labels_of,
    listed,
    rows_of,
)
from fl_lightning.yaml_file import read_yaml, reason

_NO_SUCH_KEY = "unexpected_keyword_argument"
"""pydantic's name for the error about an unknown key."""

_LARGEST = 10**7
"""Largest number of characters of a study's file, counted after YAML aliases are expanded."""

_NO_KEYS = ("[key]", "(values)", "(labels)")
"""Parts of locations in pydantic's errors that are not keys of the study's file."""

_WORDS = {
    "dataclass_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "string_type": "must be a text; write it in quotes",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "too_long": "must have at most three entries",
}
"""Messages that replace pydantic's messages, keyed by the type of the error.

pydantic's messages use terms of Python."""


def read_study(path: Path, scale: str) -> Study:
    """Read a study's file.

    Args:
        path: Path of the file.
        scale: Scale to run.

    Raises:
        ConfigurationError: The file cannot be read, has no such scale, or has mistakes at any
            scale.
    """
    definition, mistakes = _checked(_content(path))
    if definition is not None and scale not in definition.scales:
        raise ConfigurationError(
            f"--scale: {path} has no scale {scale!r}; use one of {', '.join(definition.scales)}"
        )
    studies = []
    if definition is not None:
        for name in dict.fromkeys([scale, *definition.scales]):
            study, unknown = _at_scale(path, definition, name)
            studies.append(study)
            mistakes += unknown or _contradictions(study)
    unique = [*{mistake.partition("; ")[0]: mistake for mistake in map(_printable, mistakes)}.values()]
    if len(unique) > 1:
        numbered = (f"({number}) {mistake}" for number, mistake in enumerate(unique, 1))
        raise ConfigurationError(f"{path}: {len(unique)} mistakes: {' '.join(numbered)}")
    if unique:
        raise ConfigurationError(f"{path}: {unique[0]}")
    return studies[0]


def _printable(text: str) -> str:
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _content(path: Path) -> Any:
    """Return the content of a file. All keys are strings."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
        size = 0
        for part in json.JSONEncoder(default=_refused, skipkeys=True).iterencode(content):
            size += len(part)
            # limit the size: a few lines of nested aliases could fill the memory
            if size > _LARGEST:
                raise ValueError
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", "it is not UTF-8")
        message = f"study: {path} cannot be read: {cause}; give the YAML of a study"
        raise ConfigurationError(message) from error
    except yaml.YAMLError as error:
        raise ConfigurationError(f"study: {path} is not YAML: {reason(error)}") from error
    except (RecursionError, TypeError, ValueError) as error:
        what = "an alias within itself, too many aliases, or too many levels or digits"
        what = str(error) if isinstance(error, TypeError) else what
        message = f"study: {path} holds {what}; use texts, numbers, true, false, null, lists and mappings"
        raise ConfigurationError(message) from error
    return _with_text_keys(content)


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list) else value


def _refused(value: Any) -> None:
    raise TypeError(f"{value!r}, a value of kind {type(value).__name__}")


def _checked(content: Any) -> tuple[Definition | None, list[str]]:
    """Return the definition without unknown keys, and messages about mistakes.

    If a value is wrong, the definition is None.
    """
    adapter, mistakes = TypeAdapter(Definition), list[str]()
    while True:
        try:
            return adapter.validate_python(content), mistakes
        except ValidationError as invalid:
            errors = invalid.errors()
        mistakes += map(_in_words, errors)
        unknown = [error["loc"] for error in errors if error["type"] == _NO_SUCH_KEY]
        if len(unknown) < len(errors):
            return None, mistakes
        for *place, key in unknown:
            owner = content
            for part in place:
                owner = owner[part]
            del owner[key]


def _in_words(error: Any) -> str:
    """Return a message for an error of pydantic. The message contains the path of the key."""
    *place, last = [part for part in error["loc"] if part not in _NO_KEYS] or [""]
    within = "".join(f"{part}: " for part in [".".join(map(str, place))] if part)
    if error["type"] == "missing":
        return f"{within}{last} is missing"
    if error["type"] == _NO_SUCH_KEY:
        kind = {"scales": Scale, "choose": Choice}.get(place[0] if place else "", Definition)
        names = [key.name for key in fields(kind)]
        return f"{within}there is no key {last!r}{nearest(str(last), names)}; use {', '.join(names)}"
    shown = repr(error["input"])
    words = _WORDS.get(
        error["type"], error["msg"].removeprefix("Value error, ").replace("Input should", "must")
    )
    where = ".".join(map(str, [*place, last]))
    return f"{where}{': ' * bool(where)}{shown if len(shown) < 80 else shown[:77] + '...'} {words}"


def _at_scale(path: Path, definition: Definition, name: str) -> tuple[Study, list[str]]:
    """Return the study at a scale, and messages about unknown labels at this scale."""
    scale, mistakes = definition.scales[name], list[str]()
    axes: dict[str, dict[str, Dotted]] = {}
    for axis in dict.fromkeys([*definition.axes, *scale.axes]):
        every, chosen = definition.axes.get(axis), scale.axes.get(axis)
        # use only the scale's list, because it contains all values of the axis
        if every is None or (isinstance(chosen, list) and isinstance(every, list)):
            axes[axis] = labels_of(axis, chosen or [])
            continue
        known = labels_of(axis, every)
        further: Mapping[str, Dotted] = (
            {str(label): {} for label in chosen} if isinstance(chosen, list) else chosen or known
        )
        axes[axis] = {label: {**known.get(label, {}), **settings} for label, settings in further.items()}
        mistakes += [
            f"scales.{name}.axes.{axis} has no label {label!r}{nearest(label, known)}; it has {', '.join(known)}"
            for label in further
            if label not in known
        ]
    instead: Config = {key: x for key in ("title", "published") if (x := getattr(scale, key)) is not None}
    return Study(path.stem, path.parent, replace(definition, **instead), name, axes), mistakes


def _contradictions(study: Study) -> Iterator[str]:
    definition, known = study.definition, study.known_labels()
    named: list[tuple[str, Mapping[str, object]]] = [("without", entry) for entry in definition.without]
    named += [("published", rows_of(entry)) for entry in definition.published]
    named += [("choose", {**{axis: [] for axis in (x.axis, *x.by)}, **x.at}) for x in definition.choose]
    named += [("spread", {definition.spread: []})] if definition.spread else []
    for key, entry in named:
        for axis, labels in entry.items():
            if axis not in known:
                yield f"{key}: there is no axis {axis!r}{nearest(axis, known)}; there are {', '.join(known)}"
                continue
            for label in map(str, listed(labels)):
                if label not in known[axis]:
                    yield (
                        f"{key}: axis {axis} has no label {label!r}{nearest(label, known[axis])}; it has {', '.join(known[axis])}"
                    )
    for choice in definition.choose:
        if choice.axis in choice.by:
            yield f"choose: {choice.axis} is the chosen axis and in by {choice.by}; leave it out of by"
        for axis in {choice.axis, *choice.by} & choice.at.keys():
            yield f"choose: at cannot name a label of {axis}, which is chosen or in by; leave it out of at"
        if not choice.metric.startswith("val/"):
            yield f"choose: metric {choice.metric} must be a metric on validation data, such as val/accuracy"
        main = next(iter(definition.metrics))
        compared = [x.get("metric", main) for x in study.axes.get(choice.axis, {}).values()]
        if len({*compared}) > 1:
            yield (
                f"choose: labels of {choice.axis} have different metrics, {' and '.join(dict.fromkeys(compared))}, which cannot be "
                "compared; give all labels of the axis the same metric"
            )
        of_labels = (x["metric"] for labels in study.axes.values() for x in labels.values() if "metric" in x)
        own = next(of_labels, None)
        if own and choice.metric not in ("val/accuracy", f"val/{main.partition('/')[2]}"):
            yield (
                f"choose: metric {choice.metric} has no effect on a label with the metric {own}, which is chosen by "
                f"val/{own.partition('/')[2]}; leave one of the two out"
            )
    for axis in {x.axis for x in definition.choose if [y.axis for y in definition.choose].count(x.axis) > 1}:
        yield f"choose: {axis} is chosen twice; name it once"
    for read, texts in (
        (read_claim, [*definition.headline, *definition.claims]),
        (read_difference, filter(None, [definition.difference])),
    ):
        for words in texts:
            try:
                claim = read(words, known)
            except ConfigurationError as error:
                yield str(error)
                continue
            axes = {
                **dict.fromkeys(claim.fixed, "names a label"),
                **dict.fromkeys(claim.constraints[0], "compares labels"),
            }
            for axis in [choice.axis for choice in study.choices if choice.axis in axes]:
                key = "difference" if read is read_difference else "claims"
                yield (
                    f"{key}: {words!r} {axes[axis]} of {axis}, but the table has only the chosen label; "
                    "leave the axis out of choose"
                )
    for words in {*definition.headline} & {*definition.claims}:
        yield f"headline: {words!r} is in claims too; keep it in headline"
    for first, second in combinations(definition.published, 2):
        if study.has({axis: [*map(str, listed(x))] for axis, x in rows_of(first).items()}, rows_of(second)):
            yield f"published: {first} and {second} are values of the same row; keep one"
    for key in ("metric", "seeds"):
        rows = [(axis, label, x) for axis, labels in study.axes.items() for label, x in labels.items()]
        given: list[tuple[dict[str, str], Any]] = [
            ({axis: label}, x[key]) for axis, label, x in rows if key in x
        ]
        for (row, value), (other_row, other_value) in combinations(given, 2):
            if value != other_value and row.keys() != other_row.keys() and study.has(row, other_row):
                yield f"{key}: {value} of {row} and {other_value} of {other_row} are for the same row; keep one"
