"""Reader of a study's file. The error message lists all mistakes in the file."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.experiments.run_directory.directory import Config
from fl_lightning.experiments.studies.claims import read_claim, read_difference
from fl_lightning.experiments.studies.definition import (
    FOLD,
    Choice,
    Definition,
    Dotted,
    Scale,
    Study,
    labels_of,
    listed,
    matches,
    rows_of,
)
from fl_lightning.yaml_file import Lined, read_yaml, reason

_NO_KEYS = ("[key]", "(values)", "(labels)")
"""Parts of locations in pydantic's errors that are not keys of the study's file."""

_WORDS = {
    "dataclass_type": "must be a mapping",
    "dict_type": "must be a mapping",
    "int_type": "must be a whole number",
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
    tree = _tree(path)
    try:
        # JSON has only text keys, and no mapping or list of YAML twice
        definition = TypeAdapter(Definition).validate_python(json.loads(json.dumps(tree)))
    except ValidationError as invalid:
        raise all_mistakes(path, [_in_words(error, tree) for error in invalid.errors()]) from None
    except (RecursionError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"study: {path}: {error}; use texts, numbers, true, false, null, lists and mappings"
        ) from error
    if scale not in definition.scales:
        raise ConfigurationError(
            f"--scale: {path} has no scale {scale!r}; use one of {', '.join(definition.scales)}"
        )
    studies, mistakes = list[Study](), list[str]()
    for name in dict.fromkeys([scale, *definition.scales]):
        study, unknown = _at_scale(path, definition, name)
        studies.append(study)
        mistakes += unknown or _contradictions(study)
    if mistakes:
        raise all_mistakes(path, mistakes)
    return studies[0]


def all_mistakes(where: object, mistakes: Iterable[str]) -> ConfigurationError:
    """Return an error that lists mistakes in one line. Mistakes with equal starts are listed once."""
    unique = [*{text.partition("; ")[0]: text for text in map(_printable, mistakes)}.values()]
    if len(unique) == 1:
        return ConfigurationError(f"{where}: {unique[0]}")
    numbered = " ".join(f"({number}) {text}" for number, text in enumerate(unique, 1))
    return ConfigurationError(f"{where}: {len(unique)} mistakes: {numbered}")


def _printable(text: str) -> str:
    return "".join(x if x.isprintable() else x.encode("unicode_escape").decode() for x in text)


def _tree(path: Path) -> Any:
    try:
        return read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", "it is not UTF-8")
        message = f"study: {path} cannot be read: {cause}; give the YAML of a study"
        raise ConfigurationError(message) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigurationError(f"study: {path} is not YAML: {reason(error)}") from error


def _in_words(error: Any, tree: Any) -> str:
    """Return a message for an error of pydantic, with the path and the line of the key."""
    *place, last = [part for part in error["loc"] if part not in _NO_KEYS] or [""]
    within = "".join(f"{part}: " for part in [".".join(map(str, place))] if part)
    line = _line(tree, [*place, last])
    if error["type"] == "missing":
        return f"{within}{last} is missing{line}"
    if error["type"] == "unexpected_keyword_argument":
        kind = {"scales": Scale, "choose": Choice}.get(place[0] if place else "", Definition)
        names = [key.name for key in fields(kind)]
        return f"{within}there is no key {last!r}{nearest(str(last), names)}; use {', '.join(names)}{line}"
    shown = repr(error["input"])
    words = _WORDS.get(
        error["type"],
        error["msg"].removeprefix("Value error, ").replace("Input should", "must").replace("a valid", "a"),
    )
    where = ".".join(map(str, [*place, last]))
    return f"{where}{': ' * bool(where)}{shown if len(shown) < 80 else shown[:77] + '...'} {words}{line}"


def _line(tree: Any, place: Sequence[str | int]) -> str:
    """Return the line of the innermost key of a place, such as `` (line 7)``; empty if unknown."""
    line = 0
    for part in place:
        if isinstance(tree, Lined):
            key = next((key for key in tree if str(key) == part), None)
            line, tree = tree.lines.get(key, line), tree.get(key)
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
    return f" (line {line})" if line else ""


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
    if FOLD in axes:  # a label chosen on one fold's validation data has seen test data of other folds
        choose = [replace(x, by=[*dict.fromkeys([*x.by, FOLD])]) for x in definition.choose]
        definition = replace(definition, choose=choose)
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
    for key, entry in named:
        if FOLD in entry and key != "choose":
            yield f"{key}: {FOLD} has no rows of its own, as a row has the runs of all folds; leave it out"
    for choice in definition.choose:
        if choice.axis in choice.by:
            yield f"choose: {choice.axis} is the chosen axis and in by {choice.by}; leave it out of by"
        for axis in {choice.axis, *choice.by} & choice.at.keys():
            yield f"choose: at cannot name a label of {axis}, which is chosen or in by; leave it out of at"
        if not choice.metric.startswith("val"):
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
            if FOLD in axes:
                yield f"claims: {words!r} {axes[FOLD]} of {FOLD}, but a value is the mean over all folds; leave it out"
            for axis in [choice.axis for choice in study.choices if choice.axis in axes]:
                key = "difference" if read is read_difference else "claims"
                yield (
                    f"{key}: {words!r} {axes[axis]} of {axis}, but the table has only the chosen label; "
                    "leave the axis out of choose"
                )
    for words in {*definition.headline} & {*definition.claims}:
        yield f"headline: {words!r} is in claims too; keep it in headline"
    for row in study.combinations():
        for first, second in pairwise(x for x in definition.published if matches(row, rows_of(x))):
            yield f"published: {first} and {second} are values of the same row; keep one"
        for key in ("metric", "seeds"):
            given = [(x, own[key]) for x in row.items() if key in (own := study.axes[x[0]][x[1]])]
            for ((axis, label), value), ((other, other_label), second) in pairwise(given):
                if value != second:
                    yield (
                        f"{key}: {value} of {axis}={label} and {second} of {other}={other_label} are for the same row; keep one"
                    )
