"""Verdicts on the claims of a study.

Each claim is tested on differences between runs with equal seeds, or on the folds' mean differences.
Holm's procedure corrects for the number of claims. With a probability of at most :data:`FAMILY_ERROR`, one or more verdicts are
wrong.

Claims that are corrected together form a family. Headline claims form a separate family if they
have at least :data:`HEADLINE_SEEDS` seeds.
"""

import statistics
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf, isclose, isfinite
from typing import NamedTuple

import pandas as pd
from scipy.stats import t

from fl_lightning.experiments.studies.claims import Claim, read_claim, read_difference
from fl_lightning.experiments.studies.columns import VALUE_COLUMNS
from fl_lightning.experiments.studies.study_frame import Row, StudyFrame, Verdict, labelled
from fl_lightning.experiments.studies.table_columns import on_own_data

FAMILY_ERROR = 0.05
"""Largest probability of one or more wrong verdicts in a family of claims."""

HEADLINE_SEEDS = 5
"""Number of seeds from which headline claims are corrected separately from other claims."""

ONE_PAIR = 0.1
"""Smallest difference between two runs that agrees with or contradicts a claim.

The value is 2 √2 · 0.035. If each run has a standard deviation of 0.035, this is twice the standard
deviation of the difference.
"""

_EQUAL = 1e-6
"""Largest deviation of equal differences. An accuracy is rounded to float32."""

AGREES, CONTRADICTS = "one pair agrees", "one pair contradicts"


class Comparison(NamedTuple):
    """Comparison of two combinations. It uses the differences between runs with equal seeds.

    Attributes:
        mean: Mean paired difference.
        error: Standard error of the mean; infinite for one pair.
        pairs: Number of pairs, or of folds.
        low: The claim is that the mean is above this bound: 0 for an ordering, the negative margin
            for an equality.
        high: The claim is that the mean is below this bound: infinite for an ordering.
        of_folds: Whether ``pairs`` counts folds, which share training samples.
    """

    mean: float
    error: float
    pairs: int
    low: float
    high: float
    of_folds: bool = False

    @classmethod
    def of(
        cls, differences: Sequence[float], margin: float | None = None, folds: int | None = None
    ) -> "Comparison":
        """Return the comparison, given the differences between runs with equal seeds.

        Folds share training samples, so differences of K folds are not independent. The variance of
        their mean is then (1/n + 1/(K - 1)) s^2. Here s^2 is the sample variance of the n
        differences, and 1/(K - 1) is the ratio of test and training samples. See Nadeau and Bengio,
        "Inference for the generalization error", Machine Learning 52, 2003, section 5.

        If there are only two differences and they are equal, they count as one. They can be equal
        by chance, because accuracies are multiples of 1 / (number of test samples). Their standard
        deviation of 0 would decide any claim.
        """
        n = len(differences)
        n = 1 if n == 2 and isclose(*differences, rel_tol=0, abs_tol=_EQUAL) else n
        shared = 1 / (folds - 1) if folds else 0
        error = statistics.stdev(differences) * (1 / n + shared) ** 0.5 if n > 1 else inf
        low, high = (0.0, inf) if margin is None else (-margin, margin)
        return cls(statistics.mean(differences), error, n, low, high, bool(folds))

    @property
    def p_for(self) -> float:
        """One-sided p-value of a mean between ``low`` and ``high``."""
        return max(self._p_above(self.low), 1 - self._p_above(self.high))

    @property
    def p_against(self) -> float:
        """One-sided p-value of a mean below ``low`` or above ``high``."""
        return min(self._p_above(self.high), 1 - self._p_above(self.low))

    def _p_above(self, bound: float) -> float:
        """Return the p-value of Student's t-test for a mean above a bound. One pair has none."""
        if self.error == 0:
            return (1 - (self.mean > bound) + (self.mean < bound)) / 2
        return float(t.sf((self.mean - bound) / self.error, self.pairs - 1))

    def half_width(self, level: float) -> float:
        """Return half the width of the mean's confidence interval with coverage 1 - ``level``.

        The result is the smallest mean difference that decides an ordering. It is also the smallest
        margin that a mean difference of 0 confirms. For one pair, the result is :data:`ONE_PAIR`.
        """
        if self.pairs < 2:
            return ONE_PAIR
        return self.error * float(t.isf(level / 2, self.pairs - 1))

    def kind(self, level: float, tests: int = 1) -> str:
        """Return ``"holds"``, ``"does not hold"`` or ``"undecided"``.

        A single pair of runs gives ``AGREES``, ``CONTRADICTS`` or ``"undecided"``.

        Args:
            level: Probability of a wrong verdict.
            tests: Number of the claim's tests. One test is enough to contradict the claim.
        """
        if self.pairs < 2:
            low, high = self.mean - ONE_PAIR, self.mean + ONE_PAIR
            agrees, against = self.low < low <= high < self.high, high < self.low or low > self.high
            return AGREES if agrees else CONTRADICTS if against else "undecided"
        if 2 * self.p_for <= level:
            return "holds"
        return "does not hold" if 2 * tests * self.p_against <= level else "undecided"

    def in_words(self, level: float) -> str:
        """Return the mean difference in words, with a confidence interval for several pairs."""
        if self.pairs < 2:
            small = ", which cannot confirm so small a margin" * (self.high <= ONE_PAIR)
            return f"difference {self.mean:+.3f} in one pair{small}"
        half = self.half_width(level)
        interval = f"{self.mean - half:+.3f} to {self.mean + half:+.3f}"
        unit = "folds, which share training samples" if self.of_folds else "pairs"
        return f"mean difference {self.mean:+.3f}, interval {interval}, {self.pairs} {unit}"


def p_of(tests: Sequence[Comparison]) -> float | None:
    """Return the two-sided p-value of a claim; None if all tests have only one pair.

    The p-value is computed from two one-sided p-values:

    - The first is the largest ``p_for`` of the claim's tests, because all tests must hold.
    - The second is the smallest ``p_against`` of the tests, multiplied by the number of tests. One
      failed test contradicts the claim.

    The result is twice the smaller of the two, but at most 1.
    """
    if all(test.pairs < 2 for test in tests):
        return None
    p_for = max(test.p_for if test.pairs > 1 else 1 for test in tests)
    p_against = len(tests) * min(test.p_against if test.pairs > 1 else 1 for test in tests)
    return float(min(1, 2 * min(p_for, p_against)))


def holm(values: Sequence[float], error: float = FAMILY_ERROR) -> list[tuple[float, float]]:
    """Correct p-values for multiple tests by Holm's procedure (Holm, 1979).

    Args:
        values: P-values of all tests.
        error: Largest probability of one or more wrong rejections (default :data:`FAMILY_ERROR`).

    Returns:
        For each p-value, the adjusted p-value and the significance level. The adjusted p-value is
        at most ``error`` if and only if the p-value is at most this level.
    """
    order = sorted(range(len(values)), key=lambda index: values[index])
    tested: dict[int, tuple[float, float]] = {}
    adjusted, level = 0.0, error
    for rank, index in enumerate(order):
        # Holm's procedure ends at the first p-value above its level; the level then stays the same
        level = error / (len(values) - rank) if adjusted <= error else level
        adjusted = max(adjusted, min(1.0, (len(values) - rank) * values[index]))
        tested[index] = adjusted, level
    return [tested[index] for index in range(len(values))]


def paired_differences(results: StudyFrame) -> StudyFrame:
    """Return results whose values are differences, for example of GN and BN.

    Each difference is between two runs with the same seed.

    Args:
        results: Results of a study that has a ``difference``.

    Raises:
        ConfigurationError: The difference cannot be read.
    """
    assert results.difference is not None
    metric = results.first
    sides, (more, less), *_ = read_difference(results.difference, results.known)
    pairs = [*paired(more, less, results)]
    values = [
        {"labels": row.labels, "metric": metric, **run}
        for row, other in pairs
        for run in (row.of(metric) - other.of(metric)).dropna().reset_index().to_dict("records")
    ]
    kept = {tuple(row.labels.values()) for row, _ in pairs}
    return replace(
        results,
        cells=results.cells[[labels in kept for labels in results.cells.index]].assign(published=None),
        values=labelled(values, results.axes, VALUE_COLUMNS),
        metrics={metric: f"{sides[0]} \N{MINUS SIGN} {sides[1]}, {results.metrics[metric]}"},
    )


def paired(
    more: Mapping[str, str], less: Mapping[str, str], results: StudyFrame
) -> Iterator[tuple[Row, Row]]:
    """Yield the pairs of rows that a claim compares.

    The first row has the labels ``more``, the second has the labels ``less``. A pair has equal
    labels on each axis that ``less`` does not name. Labels chosen on validation data may differ.

    Args:
        more: Labels by axis.
        less: Labels by axis.
        results: The results of the study.
    """
    for row in results.rows:
        if more.items() <= row.labels.items():
            labels = {**row.labels, **less}
            wanted = {axis: label for axis, label in labels.items() if axis not in results.choose}
            yield from [(row, x) for x in results.rows if wanted.items() <= x.labels.items()][:1]


def with_verdicts(results: StudyFrame, claims: Sequence[str], headline: Collection[str] = ()) -> StudyFrame:
    """Return the results with verdicts on all claims whose labels exist at this scale.

    A claim is undecided if a result is missing or a label is not chosen yet. The finished runs
    could then be a biased selection. Otherwise, Student's t-test of the paired differences decides.
    Holm's procedure gives the significance level of each claim. A single pair of runs can only
    agree with a claim or contradict it.

    Args:
        results: Results of the study.
        claims: Texts of the claims.
        headline: Texts of the headline claims.

    Raises:
        ConfigurationError: A claim cannot be read.
    """
    read = {text: read_claim(text, results.known) for text in claims}
    tests = {text: _tests(claim, results) for text, claim in read.items() if _has_labels(claim, results)}
    verdicts = {text: _verdict(text, *tested, FAMILY_ERROR) for text, tested in tests.items()}
    families: dict[bool, dict[str, float]] = {True: {}, False: {}}
    for text, (compared, _) in tests.items():
        if (p := p_of(compared)) is not None:
            first = text in headline and min(test.pairs for test in compared) >= HEADLINE_SEEDS
            families[first][text] = p
    for first, family in families.items():
        what = f"{len(family)} {'headline ' * first}claim{'s' * (len(family) > 1)}"
        for (text, p), (adjusted, level) in zip(family.items(), holm([*family.values()]), strict=True):
            verdict = _verdict(text, *tests[text], level)
            words = f"{verdict.words}; p {_shown(p)}, {_shown(adjusted)} corrected for {what}"
            verdicts[text] = replace(
                verdict, words=words, p=p, adjusted=adjusted, family=len(family), headline=first
            )
    return replace(results, claims=[*verdicts.values()])


def _shown(p: float) -> str:
    return f"{p:.3f}" if p >= 0.0005 else "< 0.001"


def _has_labels(claim: Claim, results: StudyFrame) -> bool:
    named = [*claim.fixed.items(), *(item for side in claim.constraints for item in side.items())]
    return all(label in results.axes[axis] for axis, label in named)


def _verdict(text: str, tests: Sequence[Comparison], reason: str, level: float) -> Verdict:
    if reason:
        return Verdict(text, "undecided", reason)
    kinds = [test.kind(level, len(tests)) for test in tests]
    worst = ("does not hold", CONTRADICTS, "undecided", AGREES, "holds")
    words = tests[0].in_words(level)
    if len(tests) > 1:
        counts = ", ".join(f"{kind} in {kinds.count(kind)}" for kind in dict.fromkeys(kinds))
        words = f"{len(tests)} comparisons: {counts}"
    verdict = Verdict(text, next(x for x in worst if x in kinds), words)
    several = [
        test for test, kind in zip(tests, kinds, strict=True) if kind == "undecided" and test.pairs > 1
    ]
    if verdict.verdict != "undecided" or not several:
        return verdict
    decides = max(test.half_width(level) for test in several)
    what = "a difference" if tests[0].high == inf else "a margin"
    words += f"; these {'folds' if tests[0].of_folds else 'seeds'} can decide {what} of {decides:.3f} or more"
    return replace(verdict, words=words, decides=decides)


def _tests(claim: Claim, results: StudyFrame) -> tuple[list[Comparison], str]:
    """Return the tests of a claim, or no test and the reason why the claim cannot be tested."""
    for choice in results.choices:
        concerned = (
            all({**claim.fixed, **side}.get(axis, label) == label for axis, label in choice.by.items())
            for side in claim.constraints
        )
        if choice.chosen is None and any(concerned):
            words = f"{choice.axis} of {' '.join(f'{axis}={label}' for axis, label in choice.by.items())}"
            return [], f"{words.removesuffix(' of ')} was not chosen"
    tests: list[Comparison] = []
    for number, (more, less) in enumerate(pairwise(claim.constraints)):
        pairs = [*paired({**claim.fixed, **more}, less, results)]
        if not pairs:
            return [], f"no pair of runs of {claim.sides[number]} and {claim.sides[number + 1]}"
        for row, other in pairs:
            values, others = row.of(results.first), other.of(results.first)
            for reason in _reasons(results.first, (row, values), (other, others)):
                return [], reason
            differences = (values - others).dropna()
            if results.folds:  # the folds are the same for every seed
                differences = differences.groupby(level="fold").mean()
            tests.append(Comparison.of([*differences], claim.margin, results.folds))
    return tests, ""


def _run_in_words(run: Hashable) -> str:
    """Return the seed of a run, and its fold if there are folds."""
    return "{} in fold {}".format(*run) if isinstance(run, tuple) else str(run)


def _reasons(first: str, *sides: tuple[Row, pd.Series]) -> Iterator[str]:
    """Yield the reasons why no comparison of two rows with their values by seed is possible.

    Args:
        first: Name of the study's first metric.
        sides: Both rows, with their values by seed.
    """
    for row, _ in sides:
        for run in row.runs if (row.cells["phase"] != "done").any() else ():
            if run["phase"] != "done":
                yield f"{run['directory']} " + ("diverged" if run.get("diverged") else f"is {run['phase']}")
    metrics = [row.metric or first for row, _ in sides]
    if len({*map(on_own_data, metrics)}) > 1:
        yield (
            f"{metrics[0]} and {metrics[1]} are measured on different samples, the clients' own and the server's; let both sides "
            "log the same metric, such as test/own_accuracy by trainer.callbacks+: [ClientEvaluation]"
        )
    for row, values in sides:
        if seeds := [_run_in_words(run) for run, value in values.items() if not isfinite(value)]:
            words = " ".join(f"{axis}={label}" for axis, label in row.labels.items())
            yield f"{words} has no finite number with seed {', '.join(seeds)}"
    (_, values), (_, others) = sides
    if not {*values.index} & {*others.index}:
        yield "no pair of finished runs with numbers"
