"""Tables in CSV and parquet files."""

import csv
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from decimal import Context, Decimal
from math import nan
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
from numpy.typing import NDArray

from fl_lightning.client_data.preprocessing import Preprocessing
from fl_lightning.datamodules.column_hints import subject_hint
from fl_lightning.errors import ConfigurationError

Columns = Sequence[str] | Mapping[str, Sequence[str]] | None
"""Names of feature columns, or ``{"except": names}``."""

MISSING = "which stands for a missing value; fill in a value, leave the sample out, or write another word if it is a name"
_UNKNOWN = ("", "na", "n/a", "<na>", "#n/a", "nan", "null", "?")
"""Words for missing values, in lower case."""
_MAYBE = ("none", "-", ".")
"""Words for missing values in a column of numbers."""
_LIKE_NUMBER = re.compile(r"[\d\s.,:/'_+%\u2212-]+")
"""Numbers in other notations, and dates."""


def read_table(
    path: Path,
    targets: str | Sequence[str] | None,
    named: Mapping[str, str | None],
    columns: Columns,
    decimal: str | None = None,
    missing: Sequence[str] | None = None,
    frame: Any = None,
) -> dict[str, Any]:
    """Read samples from the columns of a table. Spaces around names and values are removed.

    Args:
        path: A ``.csv`` file with a header, or a ``.parquet`` file.
        targets: Name of the target column, or a list of names. None: targets are not read.
        named: Column of ``groups`` and column of ``subjects``. None: the table has no such column.
        columns: Names of the feature columns. None: all columns that are neither targets nor
            groups nor subjects. ``{"except": names}``: all of these columns but the named ones.
        decimal: See :func:`read_frame`.
        missing: See :func:`read_frame`.
        frame: See :func:`read_frame`.

    Returns:
        ``features`` and ``targets`` (``pandas.DataFrame`` of text, see :func:`read_frame`), and
        ``groups`` and ``subjects`` (lists of text), if they are read.

    Raises:
        ConfigurationError: The file cannot be read, or a column or value is missing.
    """
    table = read_frame(path, decimal, missing, frame)
    header = [*table.columns]
    names = [targets] if isinstance(targets, str) else [*(targets or ())]
    given = {setting: name for setting, name in named.items() if name is not None}
    others = (*names, *given.values())
    excepted = list[str]()
    if isinstance(columns, Mapping):
        if {*columns} != {"except"}:
            raise ConfigurationError(
                f"data.columns: {columns} has other keys than except; write {{except: [NAME, ...]}} or [NAME, ...]"
            )
        given_names: Any = columns["except"]  # a single name is a list of one, as for targets
        excepted, columns = [given_names] if isinstance(given_names, str) else [*given_names], None
    left = [name for name in header if name not in (*others, *excepted)]
    used = left if columns is None else [*columns]
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
    wanted_columns = ("columns", [*used, *excepted])
    for setting, wanted in (("targets", names), *((x, [y]) for x, y in given.items()), wanted_columns):
        for name in wanted:
            if header.count(name) != 1:
                what = f"is {'no' if name not in header else 'more than one'} column"
                raise ConfigurationError(
                    f"data.{setting}: {name} {what} of {path}; it has {', '.join(header)}"
                )
    if not used:
        shown = {"except": excepted} if excepted else columns
        raise ConfigurationError(f"data.columns: {shown} leaves no feature; name some of {', '.join(header)}")
    read: dict[str, Any] = {"features": table[used]}
    if names:
        read["targets"] = table[names]
    read |= {setting: _names(path, setting, table[name]) for setting, name in given.items()}
    hint = "" if "subjects" in given else subject_hint(table, [x for x in header if x not in others])
    read["features"].attrs["subject hint"] = hint
    return read


def missing_word(names: Iterable[Any], listed: Sequence[str] | None = None) -> str | None:
    """Return the first name that stands for a missing value, or None.

    Args:
        names: Different names.
        listed: The words for missing values. None: the built-in words.
    """
    return next(iter(_missing(names, listed)), None)


def _missing(names: Iterable[Any], listed: Sequence[str] | None) -> list[str]:
    words = [str(name) for name in names]
    if listed is not None:
        forms = {"", *map(_form, listed)}
        return [word for word in words if _form(word) in forms]
    missing = [word for word in words if word.lower() in _UNKNOWN]
    maybe = [word for word in words if word.lower() in _MAYBE]
    others = [word for word in words if word not in (*maybe, *missing)]
    with suppress(ValueError):  # these words may be names, unless all others are numbers
        list(map(float, others))
        missing += maybe
    return missing


def _form(word: str) -> str:
    """Return the form in which a word is compared with listed words: -999.0 is -999, and Unknown is unknown."""
    return _category(normalize("NFC", word.strip())).lower()


def read_frame(
    path: Path, decimal: str | None = None, missing: Sequence[str] | None = None, frame: Any = None
) -> Any:
    """Return a table as a ``pandas.DataFrame`` of text. Its index are lines (CSV) or rows (parquet).

    The separator of a CSV file is a comma, semicolon, tab or vertical bar. If it is a semicolon, a
    comma between digits is a decimal point. The frame's ``attrs`` have these entries:

    - ``text``: Names of the columns of text: a parquet file types them as text, or a value is an
      integer with a leading zero.
    - ``categorical``: Names of the columns that a parquet file types as categories.
    - ``decimal``: Decimal mark of a CSV file. None: no number has one.
    - ``missing``: The argument.

    Args:
        path: A ``.csv`` or ``.parquet`` file.
        decimal: Decimal mark of the training file. None: it is unknown.
        missing: Words for missing values in addition to the empty word. None: the built-in words.
        frame: A ``pandas.DataFrame``, read as its parquet file would be. ``path`` is then its name in
            messages. None: the file is read.
    """
    import pandas as pd  # only tables need pandas

    text, categorical = set[str](), set[str]()
    try:
        if path.suffix == ".csv":
            table, decimal = _read_csv(path, decimal)
        else:
            typed = frame
            if frame is None:
                from pyarrow import parquet

                # objects: float64, which pandas takes for integers beside gaps, would round large ones
                file = parquet.read_table(path)
                typed = file.to_pandas(integer_object_nulls=True)
                # categories of numbers are read as numbers, but pandas records their type
                records = (file.schema.pandas_metadata or {}).get("columns", ())
                categorical = {str(x["name"]).strip() for x in records if x["pandas_type"] == "categorical"}
            typed = typed.reset_index(drop=True)
            typed.columns = typed.columns.map(str).str.strip()
            text = {x for x, column in typed.items() if pd.api.types.infer_dtype(column) == "string"}
            categorical |= {x for x, kind in typed.dtypes.items() if kind == "category"}
            table = typed.astype(object).where(typed.notna(), "").map(str)
            table.index += 1
    except ImportError as error:
        raise ConfigurationError(
            f"data.features: {path} needs the package pyarrow; pip install pyarrow"
        ) from error
    except ConfigurationError:
        raise
    except (OSError, ValueError, csv.Error) as error:
        reason = str(error).strip().splitlines()[-1]
        remedy = "write a header, and as many values in each line"
        if isinstance(error, UnicodeDecodeError):
            remedy = "save it as UTF-8"
        elif isinstance(error, csv.Error):
            remedy = 'close each quote, and write "" for a quote inside quotes'
        raise ConfigurationError(
            f"data.features: {path} cannot be read as a table ({reason}); {remedy}"
        ) from error
    if not len(table):
        raise ConfigurationError(
            f"data.features: {path} has a header, but no samples; add a line for each sample"
        )
    # one form of letters with marks: two forms of Köln look alike
    table = table.apply(lambda column: column.str.strip().str.normalize("NFC"))
    if (empty := (table == "").all(axis=1).to_numpy()).any():
        raise ConfigurationError(f"data.features: {_place(path, table, empty)} has no value; leave it out")
    zero_first = table.columns[_cells(table, r"0\d+").any(axis=0)]
    table.attrs = {"text": text.union(zero_first), "categorical": categorical}
    table.attrs |= {"decimal": decimal, "missing": missing}
    return table


def _cells(table: Any, pattern: str) -> NDArray[np.bool_]:
    """Return whether each value of a table matches a pattern."""
    matches: NDArray[np.bool_] = table.apply(lambda column: column.str.fullmatch(pattern)).to_numpy()
    return matches


def _with_points(path: Path, table: Any, separator: str, decimal: str | None) -> tuple[Any, str | None]:
    """Replace decimal commas by points. Return the table and its decimal mark.

    Raises:
        ConfigurationError: A number has points, and the decimal mark is a comma, or the other way
            round. They may divide thousands.
    """
    if separator == ",":
        return table, "."
    number = r"\s*([-+]?\d*)[{}](\d+(?:[eE][-+]?\d+)?)\s*"
    grouped = r"\s*[-+]?[1-9]\d{{0,2}}([{}]\d{{3}})+\s*"
    commas = separator == ";" and bool(_cells(table, number.format(",")).any())
    points = bool(_cells(table, number.format(".")).any())
    divided = "." * (commas or decimal == ",") + "," * (commas and decimal == ".")
    for row, column in np.argwhere(_cells(table, grouped.format(divided)))[:1] if divided else ():
        value = table.iloc[row, column]
        mark, other = ("commas", "points") if "." in value else ("points of the training file", "commas")
        raise ConfigurationError(
            f"data.features: {_place(path, table, [row])} has {value} beside decimal {mark}, which may be a number of thousands; write it "
            f"without {other}"
        )
    if commas:
        table = table.replace(f"^{number.format(',')}$", r"\1.\2", regex=True)
    return table, "," if commas else "." if points else None


def _read_csv(path: Path, decimal: str | None) -> tuple[Any, str | None]:
    """Return a CSV file as text, and its decimal mark. The index has the first line of each record.

    The separator is the character that divides the header into most columns.

    Raises:
        ValueError: A line has another number of values than the header, or there is no header.
        csv.Error: A quote does not close.
    """
    import pandas as pd

    rows, starts, next_line = list[list[str]](), list[int](), 1
    with path.open(newline="", encoding="utf-8-sig") as file:
        header = file.readline()
        separator = max(",;\t|", key=lambda mark: len(next(csv.reader([header], delimiter=mark), [])))
        file.seek(0)
        lines = (re.sub(f'" +(?=[{separator}\\r\\n])', '"', line) for line in file)  # blanks after a quote
        reader = csv.reader(lines, delimiter=separator, skipinitialspace=True, strict=True)
        try:
            columns = [name.strip() for name in next(reader, [])]
            next_line = reader.line_num + 1
            for row in reader:
                if len(row) != len(columns):
                    raise ValueError(
                        f"line {reader.line_num} has {len(row)} values for {len(columns)} columns"
                    )
                rows.append(row)
                starts.append(next_line)
                next_line = reader.line_num + 1
        except csv.Error as error:
            raise csv.Error(f"a quote in line {next_line} does not close: {error}") from error
    if not columns:
        raise ValueError("no header")
    table = pd.DataFrame(rows, index=starts, columns=columns, dtype=str)
    return _with_points(path, table, separator, decimal)


def _place(path: Path, values: Any, rows: Any) -> str:
    return f"{'line' if path.suffix == '.csv' else 'row'} {values.index[rows][0]} of {path}"


def _floats(values: Any) -> NDArray[np.float64]:
    """Convert text to the nearest floats; NaN if a value is no number."""

    def number(word: str) -> float:
        try:
            return nan if "_" in word else float(word)  # to Python, 1_0 is a number
        except ValueError:
            return nan

    return np.fromiter(map(number, values.to_list()), np.float64, len(values))


def _category(word: str) -> str:
    """Return the name of a category, so that 1, 1.0 and 1e0 have one name."""
    try:
        number = Decimal(word)  # exact: a float would round codes of 17 digits
        if "_" in word or re.fullmatch(r"0\d+", word):
            return word
        return format(number.normalize(Context(prec=len(word))) if number else Decimal(0), "f")
    except ArithmeticError:  # no number, or none with so large an exponent
        return word


def find_categories(path: Path, table: Any, categorical: Collection[str]) -> dict[str, list[str | None]]:
    """Return the sorted categories of each categorical column of a table of features.

    Args:
        path: File of the table, for messages.
        table: ``pandas.DataFrame`` of :func:`read_frame`.
        categorical: Names of categorical columns. Columns of words are categorical too, and so are
            columns that the file types as text or categories.

    Raises:
        ConfigurationError: A column is missing, mixes words and numbers, or has another word in
            each sample.
    """
    if others := set(categorical).difference(table):
        raise ConfigurationError(
            f"data.categorical: {min(others)} is no feature column of {path}; use some of {', '.join(table)}"
        )
    text, categorical = table.attrs["text"], {*categorical, *table.attrs["categorical"]}
    categories: dict[str, list[str | None]] = {}
    for name in table:
        words = table[name][~table[name].isin(_missing(table[name].unique(), table.attrs["missing"]))]
        wrong = np.isnan(_floats(words))
        if name not in categorical:
            if name not in text and not wrong.any():
                continue
            odd = words[words.map(_LIKE_NUMBER.fullmatch).notna()] if wrong.all() else words[wrong]
            if len(odd) and (wrong.all() or name not in text or not _whole(words[~wrong])):
                raise ConfigurationError(
                    f"data.columns: {name} is no column of numbers, {_place(path, odd, [0])} has {odd.iloc[0]!r}; write a number or leave the value empty, "
                    f"name {name} in data.categorical, list a word for missing values in data.missing, or leave the column out by data.columns: {{except: [{name}]}}"
                )
            if words.is_unique:
                raise ConfigurationError(
                    f"data.columns: {name} has another word in each of {len(words)} samples, as a name has; leave the column "
                    f"out by data.columns: {{except: [{name}]}}, or write numbers without a unit"
                )
        categories[name] = [*sorted({*map(_category, words)})]
    return categories


def raw_features(preprocessing: Preprocessing, table: Any, path: Path) -> Any:
    """Return the numbers of a table, float64 ``[N, columns]``.

    A missing value is NaN. A category is its position in ``categories``, or -1 if it is unknown.

    Args:
        preprocessing: Columns, categories, and whether values may be missing.
        table: ``pandas.DataFrame`` with the feature columns. Other columns are ignored.
        path: File of the table, for messages.

    Raises:
        ConfigurationError: A column or a value is missing, or a value is no number.
    """
    columns, categories = preprocessing.columns, preprocessing.categories
    if absent := [name for name in columns if name not in table]:
        raise ConfigurationError(
            f"data.columns: {absent[0]} is no column of {path}; it has {', '.join(map(str, table))}"
        )
    rules = bool(preprocessing.impute), preprocessing.missing
    parts = [read_column(path, table[x], categories.get(x), *rules) for x in columns]
    return np.stack(parts, axis=1)


def read_column(
    path: Path,
    values: Any,
    categories: Sequence[str | None] | None,
    may_miss: bool,
    listed: Sequence[str] | None = None,
) -> NDArray[np.float64]:
    """Return the numbers in a feature column. A missing value is NaN.

    Args:
        path: File of the table, for messages.
        values: The column, a ``pandas.Series``.
        categories: Categories of the column. The number of a value is its position in this list, or
            -1 if the list does not contain the value. None: the values are numbers.
        may_miss: Whether values may be missing.
        listed: Words for missing values. None: the built-in words.

    Raises:
        ConfigurationError: A value is missing, or is no number.
    """
    words = values.astype(object).where(values.notna(), "").map(str).str.strip()
    position = {category: i for i, category in enumerate(categories or ()) if category is not None}
    known = _floats(words) if categories is None else words.map(_category).map(position).to_numpy(np.float64)
    if listed is None:
        gaps = (*_UNKNOWN, *_missing([*filter(None, categories or ()), *_MAYBE], None))
        missing = np.isnan(known) & words.str.lower().isin(gaps).to_numpy()
    else:
        missing = words.isin(_missing(words.unique(), listed)).to_numpy()
        known = np.where(missing, nan, known)
    wrong = np.isnan(known) & ~missing
    if missing.any() and not may_miss:
        example = "median" if categories is None else "most_frequent"
        raise ConfigurationError(
            f"data.columns: {_place(path, words, missing)} has no value for {values.name}; set data.impute, for example to {example}, "
            "or leave the sample or the column out"
        )
    if categories is None:
        _check_finite(path, "columns", words, known)
    if wrong.any() and categories is None:
        raise ConfigurationError(
            f"data.columns: {values.name} is no column of numbers, {_place(path, words, wrong)} has {words[wrong].iloc[0]!r}; write a number"
        )
    return np.where(wrong, -1, known)


def _names(path: Path, setting: str, values: Any) -> list[str]:
    if (word := missing_word(values.unique(), values.attrs["missing"])) is not None:
        has = f"has {word} for {values.name}, {MISSING} (data.missing: [] then allows it)"
        if not word:
            has = f"has no {values.name}; fill in a value, or leave the sample out"
        raise ConfigurationError(f"data.{setting}: {_place(path, values, values == word)} {has}")
    return [str(value) for value in values.to_list()]


def _check_finite(path: Path, setting: str, words: Any, numbers: NDArray[Any]) -> None:
    """Check that the numbers of a column are finite in float32, the precision of inputs and targets."""
    if (large := np.abs(numbers) > np.finfo(np.float32).max).any():
        raise ConfigurationError(
            f"data.{setting}: {_place(path, words, large)} has {words[large].iloc[0]} for {words.name}, which is not finite in float32; "
            "correct the value or its unit"
        )


def _whole(words: Any) -> bool:
    """Return whether all numbers are integers without a decimal point."""
    return bool(words.str.fullmatch(r"[-+]?\d+").all())


def find_classes(path: Path, table: Any) -> dict[str, list[str] | None]:
    """Return the sorted names of the classes in each target column. None: the column has numbers.

    If a value is no number, or the column is one of text, each value is a name.

    Args:
        path: File of the table, for messages.
        table: ``pandas.DataFrame`` of :func:`read_frame` with the target columns.

    Raises:
        ConfigurationError: A value is missing, or a word is beside numbers that are no names: they
            have decimal places, or there are several targets.
    """
    classes: dict[str, list[str] | None] = {}
    for name, values in table.items():
        wrong = np.isnan(_floats(values))
        if not wrong.any() and name not in table.attrs["text"] | table.attrs["categorical"]:
            classes[name] = None
            continue
        classes[name] = sorted({*_names(path, "targets", values)})
        if wrong.any() and not wrong.all() and (len(table.columns) > 1 or not _whole(values[~wrong])):
            raise ConfigurationError(
                f"data.targets: {_place(path, values, wrong)} has {values[wrong].iloc[0]!r} for {name} beside numbers; write a number, or "
                "begin each name with a letter"
            )
    return classes


def read_targets(path: Path, table: Any, classes: Mapping[str, Sequence[str] | None]) -> NDArray[Any]:
    """Return the targets of a table, int64 or float64, ``[N]`` or ``[N, targets]``.

    Args:
        path: File of the table, for messages.
        table: ``pandas.DataFrame`` of text with the target columns.
        classes: Names of the classes in each column; the number of a name is its position. None:
            the values are numbers.

    Raises:
        ConfigurationError: A value is missing, is no class or no number, or is not finite.
    """
    parts = [_target(path, table[name], names) for name, names in classes.items()]
    return parts[0] if len(parts) == 1 else np.stack(parts, axis=1)


def _target(path: Path, values: Any, names: Sequence[str] | None) -> NDArray[Any]:
    words, numbers = _names(path, "targets", values), _floats(values)
    if names is not None:
        if len(unknown := values[~values.isin(names)]):
            raise ConfigurationError(
                f"data.targets: {_place(path, unknown, [0])}: the target {unknown.iloc[0]} is no class of the run; its classes are {', '.join(names)}"
            )
        position = {name: number for number, name in enumerate(names)}
        return np.array([position[word] for word in words])
    if (wrong := np.isnan(numbers)).any():
        raise ConfigurationError(
            f"data.targets: {_place(path, values, wrong)} has {values[wrong].iloc[0]!r} for {values.name}; write a number"
        )
    _check_finite(path, "targets", values, numbers)
    with suppress(ValueError, OverflowError):  # a decimal point, or more than 64 bits
        return np.asarray([*map(int, words)], np.int64)
    return numbers
