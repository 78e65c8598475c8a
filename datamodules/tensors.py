"""Data sets from tensors, arrays or tables."""

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.client_data.fingerprint import digest
from fl_lightning.client_data.new_samples import NewSamples
from fl_lightning.client_data.preprocessing import Preprocessing
from fl_lightning.datamodules.column_hints import feature_hints, gap_hints, label_hint
from fl_lightning.datamodules.folds import check_fold, folds_of_samples
from fl_lightning.datamodules.images import Samples, balanced_subset
from fl_lightning.datamodules.in_memory import InMemorySamples
from fl_lightning.datamodules.partition_file import FromFile
from fl_lightning.datamodules.partitions import Natural
from fl_lightning.datamodules.subjects import Subjects
from fl_lightning.datamodules.tables import (
    find_categories,
    find_classes,
    raw_features,
    read_frame,
    read_table,
    read_targets,
)
from fl_lightning.datamodules.tensor_parts import (
    NAMES,
    PARTS,
    check_lengths,
    checked_tensor,
    has_classes,
    is_frame,
    numbers_of_names,
    read_parts,
    rounded,
    rows_as_bytes,
    strata_of,
)
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import user_path
from fl_lightning.randomness import generator
from fl_lightning.recorded import describe

Array = Tensor | NDArray[Any]
_UNITS = {".csv": "line", ".parquet": "row"}  # words for the place of a sample


class TensorData(InMemorySamples):
    """Features and targets of any type and shape.

    A partition needs a class for each sample. The class depends on the targets:

    - Integer targets ``[N]`` are the classes, numbered from 0. In a table, the targets may be names.
    - Other targets ``[N]`` are divided into ten groups at their quantiles. Each group counts as a
      class.
    - If targets have more dimensions, all samples are of one class.

    Tables are read by these rules:

    - The separator of a CSV file is a comma, a semicolon, a tab or a vertical bar. If it is a
      semicolon, a comma between digits is a decimal point. A number such as ``8.700`` is then
      refused, because its point may divide thousands. New tables for a trained model have the
      decimal mark of the training table.
    - Values may be in quotes. Blanks around names and values are removed.
    - Numbers are read as float64. A number that is infinite in float32 is refused.
    - ``none``, ``-`` and ``.`` are missing values in a column whose other values are numbers. A row
      without any value is refused.
    - A column of words is a column of categories. Numbers are one category if they are exactly
      equal, such as ``1``, ``1.0`` and ``1e0``. If an integer of a CSV file has a leading zero, its
      column is one of categories, in which ``01`` and ``1`` differ. In a parquet file, the types
      decide.
    - A column of numbers and words is refused. So are dates and numbers in other notations (``5%``,
      ``1_0``), and a column with another word in each sample. Exceptions are columns in
      ``categorical``.
    - Labels of classes are integers (``1``, not ``1.0``) or names. If a label is a word or has a
      leading zero, or a parquet file types the labels as text, all labels are names. In other
      targets, a word among numbers is refused. Among several targets, a column of words is numbered
      in the order of its sorted names.

    Args:
        features: Tensor or array ``[N, ...]``, a ``pandas.DataFrame``, or the path of a file. A
            DataFrame is read as its parquet file would be, without its index. A ``.npz`` or ``.pt`` file
            holds ``features`` and ``targets``; ``groups``, ``subjects``, ``test_features``,
            ``test_targets``, ``test_groups`` and ``test_subjects`` are optional. A ``.csv`` file has a
            header. A ``.parquet`` file needs the package pyarrow. Float64 is scaled in float64, and
            then converted to float32.
        targets: Tensor or array ``[N, ...]``. For a table: the name of the target column, or a list
            of names.
        groups: Group of each sample ``[N]``, as integers or names. For a table: name of the column
            of groups. With groups, the default partition is ``Natural``, which makes each group a
            client. The partitions ``IID``, ``Dirichlet``, ``Shards``, ``GammaSimilarity`` and
            ``FromFile`` ignore groups and are refused.
        subjects: Subject of each sample ``[N]``, such as a patient, as integers or names. For a
            table: name of the column. All samples of a subject stay together in each part of the
            data that is drawn: test data, validation data and clients. Shares such as
            ``test_fraction`` are shares of the subjects.
        columns: Names of the feature columns of a table. Default: all columns that are neither
            targets nor groups nor subjects. ``{except: [patient, date]}``: all of these columns but
            the named ones.
        categorical: Names of the feature columns of a table that are categories. Columns of words
            are categories in any case. Each category of the training samples becomes an input that
            is 0 or 1. For other categories, all these inputs are 0.
        impute: Strategy that replaces missing values (NaN in a tensor) by a value of the training
            samples: ``"mean"``, ``"median"`` or ``"most_frequent"``. Missing categories are
            replaced by the most frequent category. None: missing values are refused.
        missing: Words for missing values in a table, such as ``["-999", "unknown"]``, in place of the
            built-in words (``NA``, ``nan``, ``?``, ...). An empty value is always missing. Case is
            ignored, and numbers are equal by value. ``[]``: ``NA`` is a word, such as North America.
        test_features: Test features. Default: a share of the samples, see ``test_fraction``.
        test_targets: Test targets.
        test_groups: Group of each test sample. If it is given, each client has its own test data.
        test_subjects: Subject of each test sample. No subject may have training and test samples.
        test_fraction: Share of the samples, in (0, 1), that becomes the test data if no test data
            are given. The draw is stratified and the same for every seed.
        folds: Number of folds of a cross-validation. Each client's subjects are divided into folds,
            stratified by class and the same for every seed. ``test_fraction`` is then ignored. The
            partition must be ``Natural`` or a ``FromFile`` that assigns every sample.
        fold: Fold, from 0 to ``folds - 1``, that becomes the test data.
        standardize: Whether features are scaled to mean 0 and standard deviation 1 over the
            training samples. Constant features become 0. Categories are not scaled.
        **settings: Settings of :class:`~fl_lightning.datamodules.in_memory.InMemorySamples`.

    Attributes:
        preprocessing: Map from raw features to inputs. It is fitted after ``setup``.

    Raises:
        ConfigurationError: A file, column or tensor cannot be used.
    """

    deciding_files = ("features",)

    def __init__(
        self,
        features: Any,
        targets: Any = None,
        *,
        groups: Any = None,
        subjects: Any = None,
        columns: Sequence[str] | dict[str, list[str]] | None = None,
        categorical: Sequence[str] = (),
        impute: Literal["mean", "median", "most_frequent"] | None = None,
        missing: Sequence[str | float] | None = None,
        test_features: Any = None,
        test_targets: Any = None,
        test_groups: Any = None,
        test_subjects: Any = None,
        test_fraction: float = 0.2,
        folds: int | None = None,
        fold: int = 0,
        standardize: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        check_fold(folds, fold)
        self.folds, self.fold = folds, fold
        parts = features, targets, groups, subjects, test_features, test_targets, test_groups, test_subjects
        given = dict(zip(PARTS, parts, strict=True))
        words = None if missing is None else [*map(str, missing)]
        path = Path("DataFrame")
        if is_frame(features):
            of_names = {name: given[name] for name in NAMES}
            given |= read_table(path, targets, of_names, columns, missing=words, frame=features)
        elif isinstance(features, str | Path):
            path = user_path("data.features", str(features))
            given = read_parts(path, given, columns, missing=words)
        self.preprocessing, self.targets = Preprocessing(impute=impute), dict[str, list[str] | None]()
        self._unit, places, self._group_column = "index", None, groups if isinstance(groups, str) else None
        if is_frame(table := given["features"]):
            if hint := table.attrs["subject hint"]:
                self.notes.append(hint)
            categories, decimal = find_categories(path, table, categorical), table.attrs["decimal"]
            self.preprocessing = Preprocessing([*table], categories, impute, decimal=decimal, missing=words)
            self._unit, places = _UNITS.get(path.suffix, "row"), torch.tensor(table.index)
            given["features"] = raw_features(self.preprocessing, table, path)
            chosen = {*categorical, *table.attrs["categorical"]}
            self.notes += feature_hints(path, table, given["features"], categories, chosen)
            if given["targets"] is not None:
                self.targets = find_classes(path, given["targets"])
                texts, given["targets"] = given["targets"], read_targets(path, given["targets"], self.targets)
                numbered = has_classes(torch.from_numpy(given["targets"]))
                counts = {x: texts[x].value_counts() for x, y in self.targets.items() if y or numbered}
                self.notes += filter(None, (label_hint(x, "class", y.to_dict()) for x, y in counts.items()))
        for setting, value in {
            "columns": columns,
            "categorical": categorical or None,
            "missing": words,
        }.items():
            if value is not None and not is_frame(table):
                raise ConfigurationError(
                    f"data.{setting}: {value} needs a table; give a .csv or .parquet file in data.features, or leave data.{setting} out"
                )
        for name, names in self.targets.items():
            if names is not None:
                shown = ", ".join(names[:10]) + ", ..." * (len(names) > 10)
                self.notes.append(f"classes of {name}: {shown}")
                self.class_names = names if len(self.targets) == 1 else None
        self.test_fraction = test_fraction
        self.standardize = self.scaled_by_training = standardize
        known = {name: x for name, x in given.items() if x is not None}
        data = {n: checked_tensor(f"data.{n}", x, impute) for n, x in known.items() if not n.endswith(NAMES)}
        named = {name: x for name, x in known.items() if name.endswith("groups")}
        numbers, self._group_names = numbers_of_names("groups", named, words)
        of_subjects, self._subject_names = numbers_of_names(
            "subjects", {name: x for name, x in known.items() if name.endswith("subjects")}, words
        )
        self._data = data | numbers | of_subjects
        check_lengths(self._data)
        if is_frame(table) and "groups" in numbers:
            values, groups_of = self._data["features"].numpy(), numbers["groups"].numpy()
            self.notes += gap_hints([*table], values, groups_of, self._group_names)
        self._places = torch.arange(len(self._data["features"])) if places is None else places
        if isinstance(subjects, str):
            self._subject_setting = f"data.subjects {subjects}"
        for part in ("", "test_") if of_subjects else ():
            if f"{part}targets" in data and f"{part}subjects" not in of_subjects:
                raise ConfigurationError(
                    f"data.{part}subjects: missing, although subjects are given; give the subject of each sample"
                )
        if "test_targets" not in self._data:
            self._draws_test = True
        elif folds is not None:
            raise ConfigurationError(
                f"data.folds={folds} draws the test data, but data.test_targets are given; leave one of them out"
            )
        if settings.get("partition") is None and named:
            self.partition = Natural()
        of_honest = getattr(self.partition, "partition", self.partition)
        if named and of_honest.ignores_groups:
            name = next(iter(named))
            raise ConfigurationError(
                f"data.{name}: {groups if isinstance(groups, str) else name} would be ignored by the partition "
                f"{describe(self.partition)}; use data.partition: Natural, or leave the groups out"
            )
        if folds is not None and type(self.partition) not in (Natural, FromFile):
            raise ConfigurationError(
                f"data.folds={folds} divides the samples of each client, which {describe(self.partition)} draws anew for each seed; "
                "give data.groups, or use data.partition: FromFile"
            )
        given_targets = [self._data[name] for name in ("targets", "test_targets") if name in self._data]
        every = torch.cat([strata_of(x) for x in given_targets])
        if has_classes(self._data["targets"]):
            lowest, highest = int(every.min()), int(every.max())
            if lowest != 0 or highest >= len(every):
                raise ConfigurationError(
                    f"data.targets: the classes of {len(every)} samples are {lowest} to {highest}; number the classes from 0 to C - 1, with at "
                    "least as many samples as classes, give names in a table, or floating-point targets if they are no classes"
                )
            self.num_classes = highest + 1
        self.input_shape = self._data["features"].shape[1:]
        kinds = [x.dtype for name, x in self._data.items() if "features" in name]
        self.preprocessing.dtype = rounded(reduce(torch.promote_types, kinds))
        self.in_features = self.preprocessing.inputs(self._data["features"][:1]).numel()

    def facts(self) -> dict[str, Any]:
        """Return what a trained model needs of its data, with the fitted preprocessing."""
        targets = self._data["targets"]
        kind = {"target_dtype": rounded(targets.dtype), "target_shape": [*targets.shape[1:]]}
        return {
            **super().facts(),
            "normalize": vars(self.preprocessing),
            "targets": self.targets,
            "groups": self._group_column,
            **kind,
        }

    @classmethod
    def new_samples(cls, path: Path, known: Any, labelled: bool) -> NewSamples:
        """Read a new file. Columns that are no features are ignored, and so are groups."""
        preprocessing = Preprocessing(**known.normalize)
        if path.suffix in (".csv", ".parquet") and not preprocessing.columns:
            raise ConfigurationError(f"{path} is a table, but the run's data are arrays; give .npz or .pt")
        given = {**dict.fromkeys(PARTS), "targets": [*known.targets] or None}
        rules = preprocessing.decimal, preprocessing.missing
        read = read_parts(path, given, preprocessing.columns or None, labelled, *rules)
        places, unit = None, _UNITS.get(path.suffix, "index")
        if unit != "index":
            table = read["features"]
            places, read["features"] = table.index.to_list(), raw_features(preprocessing, table, path)
        features = checked_tensor(
            f"{path}: features", read["features"], preprocessing.impute, preprocessing.dtype
        )
        if (shape := [*features.shape[1:]]) != known.input_shape:
            raise ConfigurationError(
                f"{path}: samples have the shape {shape}, but {known.input_shape} in the run; give the features of the run, in their order"
            )
        targets = None
        if labelled and places:
            of_run = {x: names or known.class_names for x, names in known.targets.items()}
            read["targets"] = read_targets(path, read["targets"], of_run)
        if labelled:
            targets = checked_tensor(f"{path}: targets", read["targets"], None, known.target_dtype)
            if (shape := [len(features), *known.target_shape]) != [*targets.shape]:
                raise ConfigurationError(
                    f"{path}: targets have the shape {[*targets.shape]}, but {shape} as in the run; give a target for each sample"
                )
        if targets is not None and known.num_classes is not None:
            for unknown in targets[(targets < 0) | (targets >= known.num_classes)][:1].tolist():
                raise ConfigurationError(
                    f"{path}: the target {unknown} is no class of the run; its classes are 0 to {known.num_classes - 1}"
                )
        clients, column = None, known.groups
        if places and column is not None and column in (table := read_frame(path, preprocessing.decimal)):
            clients = table[column].to_list()
        notes = preprocessing.describe(features)
        return NewSamples(unit, places or range(len(features)), features.__getitem__, targets, notes, clients)

    def is_training_sample(self, samples: NewSamples) -> list[bool]:
        """Return whether each sample of a file equals a training sample in all features and its target."""
        parts, trained = self._split(), torch.unique(torch.cat(self.distribution.clients))
        known = {*rows_as_bytes(parts["features"][trained], parts["targets"][trained])}
        assert samples.targets is not None
        features = samples.inputs(slice(None)).to(parts["features"].dtype)
        return [row in known for row in rows_as_bytes(features, samples.targets)]

    def class_histograms(self) -> list[list[int]]:
        """Return ``[i][c]``, the number of samples of class c at client i.

        The list is empty if the data have no classes.
        """
        return super().class_histograms() if self.num_classes is not None else []

    def _make_clients(self) -> None:
        self.loaded = digest(self._data)
        parts = self._split()
        self._place_of = torch.cat([parts["places"], parts["test_places"]])
        strata = [strata_of(parts[name]) for name in ("targets", "test_targets")]
        subjects = None
        if "subjects" in parts:
            of = torch.cat([parts["subjects"], parts["test_subjects"]])
            subjects = Subjects(of, torch.cat(strata), self._subject_names)
        groups, test_groups = parts.get("groups"), parts.get("test_groups")
        dealt = self.distribute(strata[0], strata[1], groups, test_groups, self._group_names, subjects)
        features = torch.cat([parts["features"], parts["test_features"]])
        targets = torch.cat([parts["targets"], parts["test_targets"]])
        trained = dealt.clients[: len(dealt.clients) - self._num_held_out]
        self.preprocessing.fit(features[torch.unique(torch.cat(trained))], self.standardize)
        self.notes += self.preprocessing.listed(features) + self.preprocessing.describe(features)
        self._give(Samples(self.preprocessing.inputs(features), targets))

    def _split(self) -> dict[str, Tensor]:
        """Return training and test data. If no test data are given, draw them from the samples."""
        data = {**self._data, "places": self._places}
        if "test_targets" in data:
            return data | {"test_places": torch.arange(len(data["test_targets"]))}
        strata, draws = strata_of(data["targets"]), generator(0, "tensor test split")
        if self.folds is not None:
            return _divided(data, self._fold(strata, data))
        size, unit = len(strata), "samples"
        if "subjects" in data:
            size, unit = len(self._subject_names), "subjects"
        count = round(self.test_fraction * size)
        if not 0 < count < size:
            raise ConfigurationError(
                f"test_fraction={self.test_fraction} takes {count} of {size} {unit}; use a value that leaves {unit} for both"
            )
        if "subjects" in data:
            subjects = Subjects(data["subjects"], strata, self._subject_names)
            drawn = subjects.subset(torch.arange(len(strata)), self.test_fraction, draws)
        else:
            drawn = balanced_subset(strata, count, draws)
        return _divided(data, torch.isin(torch.arange(len(strata)), drawn))

    def _identified(self, samples: Tensor) -> dict[str, Sequence[str | int]]:
        return {self._unit: self._place_of[samples].tolist()}

    def _fold(self, strata: Tensor, data: dict[str, Tensor]) -> Tensor:
        """Return which samples are the test samples of the fold. Add the groups of a file of clients."""
        if isinstance(self.partition, FromFile):
            data["groups"] = self.partition.client_of_each(strata)
            self._group_names = [*map(str, range(int(data["groups"].max()) + 1))]
            self.notes.append(f"folds of the clients in {self.partition.path}")
            self.partition = Natural()
        assert self.folds is not None
        fold_of, notes = folds_of_samples(
            strata, data["groups"], self._group_names, data.get("subjects"), self.folds, self.fold
        )
        self.notes += notes
        return fold_of == self.fold


def _divided(data: Mapping[str, Tensor], is_test: Tensor) -> dict[str, Tensor]:
    test = {f"test_{name}": x[is_test] for name, x in data.items()}
    return {name: x[~is_test] for name, x in data.items()} | test


class ScikitLearn(TensorData):
    """A table that scikit-learn contains. The data need no download.

    Args:
        table: Name of the table:

            - ``"breast_cancer"``: 569 samples, 30 features, 2 classes.
            - ``"wine"``: 178 samples, 13 features, 3 classes.
            - ``"iris"``: 150 samples, 4 features, 3 classes.
            - ``"diabetes"``: 442 samples, 10 features, a numeric target.
        standardize: See :class:`TensorData`.
        **settings: Settings of :class:`TensorData`.

    Raises:
        ConfigurationError: The table is unknown.
    """

    def __init__(self, table: str = "breast_cancer", *, standardize: bool = True, **settings: Any) -> None:
        from sklearn import datasets  # this import takes seconds

        tables = ("breast_cancer", "wine", "iris", "diabetes")
        if table not in tables:
            raise ConfigurationError(f"data.table: {table!r} is no table; use one of {', '.join(tables)}")
        loaded = getattr(datasets, f"load_{table}")()
        super().__init__(loaded.data, loaded.target, standardize=standardize, **settings)
        self.table = table
        if self.num_classes is not None:
            self.class_names = [str(name) for name in loaded.target_names]
