"""Hints about columns of a table that are often read in another way than their writer meant.

A hint does not change the data. There are hints about these columns and values:

- Integers that differ in each sample, if they count up, lie close together, have the same six or
  more digits, or are named like an id.
- Numbers with a unit in each cell, such as ``72 kg``, and leading zeros in a CSV file. Both are read
  as categories.
- A repeated extreme value that is far from all others, such as -999.
- Categories or classes that differ in case or blanks alone, or that have one sample.
- A column that is named like an id and repeats its values, if no subjects are named.
- A feature without a value in at least five samples of a client, and in no other sample of it.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_FEWEST = 10  # samples of a column that a hint can be about
_SHOWN = 10  # hints about features
_PAIRS = 5  # expected pairs of equal values, if integers are drawn at random from their range
_CODE = 6  # digits of a code: integers of one width that all differ
_REPEATS, _OTHERS = 3, 5  # samples of a repeated extreme value, and different other values
_FAR = 5  # ranges of the other values between the other values and a repeated extreme value
_NAMED = 5  # clients in a hint
_GAP = 5  # fewest samples of a client without any value of a feature
_ID = re.compile(
    r"(?i)(^|[\W_])(patient|subject|participant|person|case|study|mrn|pid|id)s?($|[\W_])"
)  # names of ids
_UNIT = r"[-+]?\d+(?:[.,]\d+)?\s*([^\W\d_][\w/^]*)"


def subject_hint(table: Any, names: Sequence[str]) -> str:
    """Return a hint if one of the columns has the name of subjects, and repeats its values.

    Args:
        table: ``pandas.DataFrame`` of text.
        names: Columns that are neither targets nor groups.
    """
    counts = {name: table[name].nunique() for name in names if _ID.search(name)}
    repeated = [name for name, count in counts.items() if _FEWEST <= count <= len(table) / 1.5]
    if not repeated:
        return ""
    name = repeated[0]
    return (
        f"{len(table):,} rows, {counts[name]:,} values of {name}: are rows of one {name} to stay together? "
        f"then set data.subjects: {name}"
    )


def gap_hints(
    columns: Sequence[str], features: NDArray[Any], groups: NDArray[Any], names: Sequence[str]
) -> list[str]:
    """Return a hint about each feature that has no value at all at some clients.

    Args:
        columns: Names of the features.
        features: Values of the features ``[N, features]``. NaN is a missing value.
        groups: Number of each sample's client ``[N]``.
        names: Names of the clients.
    """
    hints, missing = list[str](), np.isnan(features)
    sizes = np.bincount(groups, minlength=len(names))
    for column, gaps in zip(columns, missing.T, strict=True):
        counts = np.bincount(groups[gaps], minlength=len(names))
        clients = [names[int(x)] for x in np.flatnonzero((counts == sizes) & (sizes >= _GAP))]
        if clients:
            more = ", ..." if len(clients) > _NAMED else ""
            hints.append(
                f"{column} has no value at {', '.join(clients[:_NAMED])}{more}: leave it out by data.columns: {{except: [{column}]}}, or "
                "replace it there by values of others"
            )
    return hints


def feature_hints(
    path: Path,
    table: Any,
    features: NDArray[np.float64],
    categories: Mapping[str, Sequence[str | None]],
    chosen: Collection[str] = (),
) -> list[str]:
    """Return at most ten hints about features: ids, units, leading zeros, gaps, rare categories.

    Args:
        path: File of the table.
        table: ``pandas.DataFrame`` of text with the feature columns.
        features: Their numbers ``[N, columns]``. NaN: the value is missing. In a column of
            categories, the number of the category.
        categories: Names of the categories of each categorical column.
        chosen: Columns that are meant as categories: the user or the file's types say so.
    """
    hints = list[str]()
    for (name, words), numbers in zip(table.items(), features.T, strict=True):
        given = ~np.isnan(numbers)
        if name not in categories:
            hint = _number_hint(name, words[given], numbers[given])
        else:
            names = [str(x) for x in categories[name]]
            counts = np.bincount(numbers[given].astype(int), minlength=len(names)).tolist()
            hint = "" if name in chosen else _word_hint(name, words[given], path.suffix == ".csv")
            hint = hint or label_hint(name, "category", dict(zip(names, counts, strict=True)))
        hints += [hint] if hint else []
    more = f"and {len(hints) - _SHOWN} more hints about other columns"
    return hints if len(hints) <= _SHOWN else [*hints[:_SHOWN], more]


def _number_hint(name: str, words: Any, numbers: NDArray[np.float64]) -> str:
    values, counts = np.unique(numbers, return_counts=True)
    integers = (values == np.rint(values)).all() and words.str.fullmatch(r"[-+]?\d+").all()
    if len(values) == len(numbers) >= _FEWEST and integers:
        ordered = len({*np.sign(np.diff(numbers))}) == 1
        dense = len(values) ** 2 > 2 * _PAIRS * (values[-1] - values[0] + 1)
        code = words.str.len().nunique() == 1 and len(words.iloc[0]) >= _CODE
        if ordered or dense or code or _ID.search(name):
            return (
                f"{name} differs in each of {len(numbers):,} samples, as row numbers, ids and times do; leave it out by "
                f"data.columns: {{except: [{name}]}}"
            )
    for end, others in ((0, values[1:]), (-1, values[:-1])):
        if len(others) >= _OTHERS and counts[end] >= _REPEATS:
            nines = re.fullmatch(r"-?9{2,}", f"{values[end]:.0f}")
            gap = max(others[0] - values[end], values[end] - others[-1])
            if gap > (others[-1] - others[0]) * (1 if nines else _FAR):
                word = words.iloc[int((numbers == values[end]).argmax())]
                return (
                    f"{name} is {word} in {counts[end]:,} of {len(numbers):,} samples, far from {others[0]:g} to {others[-1]:g}; if it stands for "
                    f'a missing value, set data.missing: ["{word}"] and data.impute'
                )
    return ""


def _word_hint(name: str, words: Any, untyped: bool) -> str:
    units = words.str.extract(f"^{_UNIT}$", expand=False)
    if len(words) >= _FEWEST and units.notna().all() and units.nunique() == 1:
        return (
            f"{name} has numbers with a unit, such as {words.iloc[0]!r}, which are read as categories; write the numbers alone, or name "
            f"{name} in data.categorical"
        )
    if untyped and len(zero := words[words.str.fullmatch(r"0\d+")]):
        return (
            f"{name} has numbers with leading zeros, such as {zero.iloc[0]}, which are read as categories; name {name} in data.categorical, "
            "or write the numbers without zeros"
        )
    return ""


def label_hint(name: str, kind: str, counts: Mapping[str, int]) -> str:
    """Return a hint if two labels differ in case or blanks alone, or a label has one sample.

    Args:
        name: Name of the column.
        kind: ``"class"`` or ``"category"``.
        counts: Number of samples of each label.
    """
    if sum(counts.values()) < _FEWEST:
        return ""
    usual = dict[str, str]()
    for label in sorted(counts, key=lambda x: -counts[x]):  # the most frequent form is the usual one
        like = usual.setdefault("".join(label.casefold().split()), label)
        if like != label:
            return (
                f"{name}: the {kind} {label!r} (samples: {counts[label]:,}) looks like {like!r} ({counts[like]:,}); write one word if both are "
                f"one {kind}"
            )
    if rare := [label for label, count in counts.items() if count == 1]:
        remedy = "the sample out" if kind == "class" else f"{name} out by data.columns: {{except: [{name}]}}"
        return (
            f"{name}: {len(rare):,} of {len(counts):,} labels have one sample, such as the {kind} {rare[0]!r}; correct a misspelling, or leave "
            f"{remedy}"
        )
    return ""
