"""Tables in CSV and parquet files."""

import csv
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.errors import ConfigurationError

MISSING = "which stands for a missing value; fill in a value, leave the sample out, or write another word if it is a name"
_UNKNOWN = ("", "na", "n/a", "<na>", "#n/a", "nan", "null", "?")
"""Words for missing values, in lower case."""
_MAYBE = ("none", "-", ".")
"""Words for missing values in a column of numbers."""
_LIKE_NUMBER = re.compile(r"[\d\s.,:/'_+-]+")
"""Numbers in other notations, and dates."""


def read_table(
    path: Path,
    targets: str | Sequence[str] | None,
    groups: str | None,
    columns: Sequence[str] | None,
) -> dict[str, Any]:
    """Read samples from the columns of a table. Spaces around names and values are removed.

    Args:
        path: A ``.csv`` file with a header, or a ``.parquet`` file.
        targets: Name of the target column, or a list of names. None: targets are not read.
        groups: Name of the column of groups. None: no groups.
        columns: Names of the feature columns. None: all columns that are neither targets nor
            groups.

    Returns:
        ``features`` (``pandas.DataFrame`` of text), ``targets`` (int64 or float64, ``[N]`` or
        ``[N, targets]``), ``class_names``, and ``groups`` (list of text), if they are read. If the
        target column has words, each word is a class: ``targets`` has the positions in the sorted
        ``class_names``. Otherwise, ``class_names`` is None.

    Raises:
        ConfigurationError: The file cannot be read, or a column or value is missing or no number.
    """
    table = read_frame(path)
    header = [*table.columns]
    names = [targets] if isinstance(targets, str) else [*(targets or ())]
    group = [groups] if groups is not None else []
    used = [*columns] if columns is not None else [name for name in header if name not in (*names, *group)]
    nameless = [name for name in used if not name or name.startswith("Unnamed: ")]
    if columns is None and nameless:
        raise ConfigurationError(
            f"data.columns: column {header.index(nameless[0]) + 1} of {path} has no name, as pandas writes its index; name the "
            "feature columns in data.columns, or write the file with index=False"
        )
    if shared := [name for name in used if name in names]:
        raise ConfigurationError(
            f"data.columns: {shared[0]} is the target, data.targets; leave it out of the features"
        )
    if columns is not None and not used:
        raise ConfigurationError(f"data.columns: [] leaves no feature; name some of {', '.join(header)}")
    for setting, wanted in (("targets", names), ("groups", group), ("columns", used)):
        for name in wanted:
            if header.count(name) != 1:
                what = f"is {'no' if name not in header else 'more than one'} column"
                raise ConfigurationError(
                    f"data.{setting}: {name} {what} of {path}; it has {', '.join(header)}"
                )
    read: dict[str, Any] = {"features": table[used]}
    if names:
        numbers, words = zip(*(_classes(path, table[name]) for name in names), strict=True)
        read["targets"] = numbers[0] if len(numbers) == 1 else np.stack(numbers, axis=1)
        read["class_names"] = words[0] if len(words) == 1 else None
    if groups is not None:
        read["groups"] = _names(path, "groups", table[groups])
    return read


def missing_word(names: Iterable[Any]) -> str | None:
    """Return the first name that stands for a missing value, or None."""
    return next(iter(_missing(names)), None)


def _missing(names: Iterable[Any]) -> list[str]:
    words = [str(name) for name in names]
    missing = [word for word in words if word.lower() in _UNKNOWN]
    maybe = [word for word in words if word.lower() in _MAYBE]
    others = [word for word in words if word not in (*maybe, *missing)]
    with suppress(ValueError):  # these words may be names, unless all others are numbers
        list(map(float, others))
        missing += maybe
    return missing


def read_frame(path: Path) -> Any:
    """Return a table as a ``pandas.DataFrame`` of text. Its index are lines (CSV) or rows (parquet).

    The separator of a CSV file is a comma, semicolon, tab or vertical bar. If it is a semicolon, a
    comma between digits is a decimal point.
    """
    import pandas as pd  # only tables need pandas

    try:
        if path.suffix == ".parquet":
            typed = pd.read_parquet(path).reset_index(drop=True)
            table = typed.astype(object).where(typed.notna(), "").map(str)
            table.index += 1
        else:
            table = _read_csv(path)
    except ImportError as error:
        raise ConfigurationError(
            f"data.features: {path} needs the package pyarrow; pip install pyarrow"
        ) from error
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error).strip().splitlines()[-1]
        remedy = "write a header, and as many values in each line"
        if isinstance(error, UnicodeDecodeError):
            remedy = "save it as UTF-8"
        raise ConfigurationError(
            f"data.features: {path} cannot be read as a table ({reason}); {remedy}"
        ) from error
    if not len(table):
        raise ConfigurationError(
            f"data.features: {path} has a header, but no samples; add a line for each sample"
        )
    table.columns = [str(name).strip() for name in table.columns]
    # one form of letters with marks: two forms of Köln look alike
    table = table.apply(lambda column: column.str.strip().str.normalize("NFC"))
    if (empty := (table == "").all(axis=1).to_numpy()).any():
        raise ConfigurationError(f"data.features: {_place(path, table, empty)} has no value; leave it out")
    return table


def _with_points(path: Path, table: Any) -> Any:
    """Replace decimal commas by points.

    Raises:
        ConfigurationError: A number beside decimal commas has points, which may divide thousands.
    """
    decimal, thousands = r"\s*([-+]?\d+),(\d+)\s*", r"\s*[-+]?\d{1,3}(\.\d{3})+\s*"
    if not table.apply(lambda column: column.str.fullmatch(decimal)).any(axis=None):
        return table
    grouped = table.apply(lambda column: column.str.fullmatch(thousands)).to_numpy()
    for row, column in np.argwhere(grouped)[:1]:
        raise ConfigurationError(
            f"data.features: {_place(path, table, [row])} has {table.iloc[row, column]} beside decimal commas, which may be a number of "
            "thousands; write it without points"
        )
    return table.replace(f"^{decimal}$", r"\1.\2", regex=True)


def _read_csv(path: Path) -> Any:
    """Return a CSV file as text. The index has the first line of each record.

    The separator is the character that divides the header into most columns.

    Raises:
        ValueError: A line has another number of values than the header, or there is no header.
    """
    import pandas as pd

    rows, starts = list[list[str]](), list[int]()
    with path.open(newline="", encoding="utf-8-sig") as file:
        header = file.readline()
        separator = max(",;\t|", key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))
        file.seek(0)
        reader = csv.reader(file, delimiter=separator, skipinitialspace=True)
        columns = next(reader, [])
        next_line = reader.line_num + 1
        for row in reader:
            if len(row) != len(columns):
                raise ValueError(f"line {reader.line_num} has {len(row)} values for {len(columns)} columns")
            rows.append(row)
            starts.append(next_line)
            next_line = reader.line_num + 1
    if not columns:
        raise ValueError("no header")
    table = pd.DataFrame(rows, index=starts, columns=columns, dtype=str)
    return _with_points(path, table) if separator == ";" else table


def _place(path: Path, values: Any, rows: Any) -> str:
    return f"{'row' if path.suffix == '.parquet' else 'line'} {values.index[rows][0]} of {path}"


def _floats(values: Any) -> NDArray[np.float64]:
    """Convert text to the nearest floats; NaN if a value is no number."""

    def number(word: str) -> float:
        try:
            return nan if "_" in word else float(word)  # to Python, 1_0 is a number
        except ValueError:
            return nan

    return np.fromiter(map(number, values.to_list()), np.float64, len(values))


def _category(word: str) -> str:
    """Return the name of a category, so that 1 and 1.0 have one name."""
    try:
        return word if "_" in word else format(float(word), ".15g")
    except ValueError:
        return word


def find_categories(path: Path, table: Any, categorical: Collection[str]) -> dict[str, list[str | None]]:
    """Return the sorted categories of each categorical column of a table of features.

    Args:
        path: File of the table, for messages.
        table: ``pandas.DataFrame`` of text.
        categorical: Names of categorical columns. Columns of words are categorical too.

    Raises:
        ConfigurationError: A column is missing, mixes words and numbers, or has another word in
            each sample.
    """
    if others := set(categorical).difference(table):
        raise ConfigurationError(
            f"data.categorical: {min(others)} is no feature column of {path}; use some of {', '.join(table)}"
        )
    categories: dict[str, list[str | None]] = {}
    for name in table:
        words = table[name][~table[name].isin(_missing(table[name].unique()))]
        wrong = np.isnan(_floats(words))
        if name not in categorical:
            if not wrong.any():
                continue
            if len(odd := words[words.map(_LIKE_NUMBER.fullmatch).notna()] if wrong.all() else words[wrong]):
                raise ConfigurationError(
                    f"data.columns: {name} is no column of numbers, {_place(path, odd, [0])} has {odd.iloc[0]!r}; write a number or leave the value empty, "
                    f"name {name} in data.categorical, or leave the column out of data.columns"
                )
            if words.is_unique:
                raise ConfigurationError(
                    f"data.columns: {name} has another word in each of {len(words)} samples, as a name has; leave the column "
                    "out of data.columns"
                )
        categories[name] = [*sorted({*map(_category, words)})]
    return categories


def read_column(
    path: Path, values: Any, categories: Sequence[str | None] | None, may_miss: bool
) -> NDArray[np.float64]:
    """Return the numbers in a feature column. A missing value is NaN.

    Args:
        path: File of the table, for messages.
        values: The column, a ``pandas.Series``.
        categories: Categories of the column. The number of a value is its position in this list, or
            -1 if the list does not contain the value. None: the values are numbers.
        may_miss: Whether values may be missing.

    Raises:
        ConfigurationError: A value is missing, or is no number.
    """
    words = values.astype(object).where(values.notna(), "").map(str).str.strip()
    position = {category: i for i, category in enumerate(categories or ()) if category is not None}
    known = _floats(words) if categories is None else words.map(_category).map(position).to_numpy(np.float64)
    gaps = (*_UNKNOWN, *_missing([*filter(None, categories or ()), *_MAYBE]))
    missing = np.isnan(known) & words.str.lower().isin(gaps).to_numpy()
    wrong = np.isnan(known) & ~missing
    if missing.any() and not may_miss:
        raise ConfigurationError(
            f"data.columns: {_place(path, words, missing)} has no value for {values.name}; set data.impute, for example to median, "
            "or leave the sample or the column out"
        )
    if wrong.any() and categories is None:
        raise ConfigurationError(
            f"data.columns: {values.name} is no column of numbers, {_place(path, words, wrong)} has {words[wrong].iloc[0]!r}; write a number"
        )
    return np.where(wrong, -1, known)


def _names(path: Path, setting: str, values: Any) -> list[str]:
    if (word := missing_word(values.unique())) is not None:
        has = f"has {word} for {values.name}, {MISSING}"
        if not word:
            has = f"has no {values.name}; fill in a value, or leave the sample out"
        raise ConfigurationError(f"data.{setting}: {_place(path, values, values == word)} {has}")
    return [str(value) for value in values.to_list()]


def _classes(path: Path, values: Any) -> tuple[NDArray[Any], list[str] | None]:
    """Convert a column to numbers.

    Returns:
        The numbers and None. If a value is no number, each value is a name: the result is the
        position of each value in the sorted list of names, and this list.
    """
    numbers = _floats(values)
    if np.isnan(numbers).any():
        names, positions = np.unique(_names(path, "targets", values), return_inverse=True)
        return positions, [*map(str, names)]
    with suppress(ValueError, OverflowError):  # a decimal point, or more than 64 bits
        return np.asarray([*map(int, values.to_list())], np.int64), None
    return numbers, None
