"""Claims of a paper, tested in pairs by seed: they hold, do not hold, or are undecided at this scale.

A claim is an ordering of labels, such as ``"FixBN > GN > BN"``, at labels of other axes where it says so: ``"GN > BN at E=1"``. A side may
name its axis, ``"E=100 > E=1 at method=BN"``. ``"FBN ~ centralised within 0.02"`` says that two are as good as equal. Without ``at`` it is
about every combination of the other axes.
"""

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from scipy.stats import t

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.studies.found import Found, Group, Verdict

ONE_SEED = 0.1
"""How far one pair of runs must be apart to say anything: twice the deviation of a difference between cells that deviate by 0.035 each."""

_CONFIDENCE = 0.9


class Claim(NamedTuple):
    """A claim as its text says it.

    Attributes:
        sides: What is compared, in words.
        constraints: The labels of each side, by axis.
        fixed: The labels at which it is about them, by axis.
        margin: Within what they are as good as equal; None for an ordering.
    """

    sides: list[str]
    constraints: list[dict[str, str]]
    fixed: dict[str, str]
    margin: float | None


def read_claim(claim: str, known: Mapping[str, Sequence[str]]) -> Claim:
    """Read a claim.

    Args:
        claim: The claim.
        known: The labels that there are, by axis.

    Raises:
        ConfigurationError: It cannot be read, or no runs could decide it.
    """
    body, _, at = claim.partition(" at ")
    ordering, _, within = body.partition(" within ")
    sides, signs = [part.strip() for part in re.split(r"[>~]", ordering)], {*re.findall(r"[>~]", ordering)}
    try:
        margin = float(within) if within else None
    except ValueError:
        margin = -1.0
    if len(signs) > 1:
        raise ConfigurationError(f"claims: {claim!r} mixes > and ~; write a claim for each of them")
    if not signs or (signs == {"~"}) != bool(within) or not 0 < (1 if margin is None else margin) < inf:
        raise ConfigurationError(
            f"claims: {claim!r} must be an ordering such as 'A > B at axis=label' or 'A ~ B within 0.02'"
        )
    constraints = [_labels(side, claim, known) for side in sides]
    fixed = _labels(at, claim, known) if at else {}
    _comparable(claim, sides, constraints)
    if twice := fixed.keys() & constraints[0].keys():
        raise ConfigurationError(
            f"claims: {claim!r} compares labels of {twice.pop()} and cannot be at one of them; leave it out after 'at'"
        )
    return Claim(sides, constraints, fixed, margin)


def read_difference(words: str, known: Mapping[str, Sequence[str]]) -> Claim:
    """Read a difference such as ``"GN - BN"``.

    Args:
        words: The difference.
        known: The labels that there are, by axis.

    Raises:
        ConfigurationError: It cannot be read, or has one side twice.
    """
    sides = [side.strip() for side in words.split(" - ")]
    if len(sides) != 2:
        raise ConfigurationError(f"difference: {words!r} must be one label minus another, such as 'GN - BN'")
    constraints = [_labels(side, words, known, "difference") for side in sides]
    _comparable(words, sides, constraints, "difference")
    return Claim(sides, constraints, {}, None)


def _comparable(
    words: str, sides: Sequence[str], constraints: Sequence[Mapping[str, str]], key: str = "claims"
) -> None:
    """Refuse sides that are the same, or labels of different axes."""
    for number, (side, own) in enumerate(zip(sides, constraints, strict=True)):
        if own in constraints[:number]:
            raise ConfigurationError(f"{key}: {words!r} has {side} twice; name different labels")
        if own.keys() != constraints[0].keys():
            raise ConfigurationError(
                f"{key}: {words!r} compares {sides[0]} with {side}, which are labels of different axes; name labels of the same ones"
            )


def judge(claim: str, found: Found) -> Verdict | None:
    """A claim's verdict, None where it is about labels that this scale does not have.

    A run without a result, or a label that was not chosen, leaves it undecided: what is there may be the better part. Otherwise, for two seeds or more, the 90 % interval of the mean paired difference (Student's t) decides: above 0 the ordering holds, below it does
    not; for one seed the difference must exceed :data:`ONE_SEED`.

    Args:
        claim: The claim.
        found: What the study has found.

    Returns:
        ``claim``, ``verdict`` and ``words``.

    Raises:
        ConfigurationError: The claim cannot be read.
    """
    sides, constraints, fixed, margin = read_claim(claim, found["known"])
    if any(label not in found["axes"][axis] for own in (*constraints, fixed) for axis, label in own.items()):
        return None
    for one in found["choices"]:
        own = one["for"].items()
        concerned = (
            all({**fixed, **side}.get(axis, label) == label for axis, label in own) for side in constraints
        )
        if one["chosen"] is None and any(concerned):
            words = f"{one['axis']} of {' '.join(f'{axis}={label}' for axis, label in own)}".removesuffix(
                " of "
            )
            return {"claim": claim, "verdict": "undecided", "words": f"{words} was not chosen"}
    metric = next(iter(found["metrics"]))
    links = [[*_paired({**fixed, **more}, less, found)] for more, less in pairwise(constraints)]
    if not all(links):
        number = links.index([])
        return {
            "claim": claim,
            "verdict": "undecided",
            "words": f"no pair of runs of {sides[number]} and {sides[number + 1]}",
        }
    verdicts = [_judge_pair(one, two, metric, margin) for link in links for one, two in link]
    kinds = [kind for kind, _ in verdicts]
    verdict = (
        "does not hold" if "does not hold" in kinds else "undecided" if "undecided" in kinds else "holds"
    )
    words = (
        verdicts[0][1]
        if len(verdicts) == 1
        else "; ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    )
    return {"claim": claim, "verdict": verdict, "words": words}


def difference(found: Found) -> Found:
    """A study of differences in pairs by seed, such as ``"GN - BN"``, as if it had found them itself.

    Args:
        found: What a study has found, ``difference`` among it.

    Raises:
        ConfigurationError: The difference cannot be read.
    """
    metric, words = next(iter(found["metrics"])), found["difference"]
    assert words is not None
    sides, (one, other), *_ = read_difference(words, found["known"])
    groups: list[Group] = []
    for group, against in _paired(one, other, found):
        (values, less) = (own["values"][metric] for own in (group, against))
        pairs = {seed: values[seed] - less[seed] for seed in values if seed in less}
        groups.append({**group, "values": {metric: pairs}, "published": None})
    name = f"{sides[0]} \N{MINUS SIGN} {sides[1]}, {found['metrics'][metric]}"
    return {**found, "groups": groups, "metrics": {metric: name}}


def _paired(more: Mapping[str, str], less: Mapping[str, str], found: Found) -> Iterator[tuple[Group, Group]]:
    """The combinations with some labels, each with the one that has others in their place and else the same, but for chosen ones."""
    for group in found["groups"]:
        if more.items() <= group["labels"].items():
            wanted = {
                axis: x for axis, x in {**group["labels"], **less}.items() if axis not in found["choose"]
            }
            yield from [(group, g) for g in found["groups"] if wanted.items() <= g["labels"].items()][:1]


def _judge_pair(group: Group, other: Group, metric: str, margin: float | None) -> tuple[str, str]:
    for run in (*group["runs"], *other["runs"]):
        if run["phase"] != "done":
            return (
                "undecided",
                f"{run['directory']} {'diverged' if run.get('diverged') else 'is ' + run['phase']}",
            )
    one, two = group["values"][metric], other["values"][metric]
    for own in (group, other):
        if seeds := [seed for seed, value in own["values"][metric].items() if not isfinite(value)]:
            words = " ".join(f"{axis}={label}" for axis, label in own["labels"].items())
            return "undecided", f"{words} has no finite number with seed {', '.join(seeds)}"
    seeds = [seed for seed in one if seed in two]
    differences = [one[seed] - two[seed] for seed in seeds]
    if not differences:
        return "undecided", "no pair of finished runs with numbers"
    mean = statistics.mean(differences)
    low, high = interval(differences)
    if margin is None:
        verdict = "holds" if low > 0 else "does not hold" if high < 0 else "undecided"
    else:
        verdict = (
            "holds"
            if -margin < low <= high < margin
            else "does not hold"
            if low > margin or high < -margin
            else "undecided"
        )
    small = ", which says nothing of so small a margin" if margin is not None and margin <= ONE_SEED else ""
    words = (
        f"{mean:+.3f} in one pair{small}"
        if len(seeds) == 1
        else f"{mean:+.3f}, {low:+.3f} to {high:+.3f} by {len(seeds)} pairs"
    )
    return verdict, words


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """The 90 % interval of the mean of paired differences; :data:`ONE_SEED` around a single one."""
    mean, n = statistics.mean(differences), len(differences)
    half = (
        ONE_SEED
        if n == 1
        else statistics.stdev(differences) / n**0.5 * float(t.ppf((1 + _CONFIDENCE) / 2, n - 1))
    )
    return mean - half, mean + half


def _labels(text: str, claim: str, known: Mapping[str, Sequence[str]], key: str = "claims") -> dict[str, str]:
    """The labels that a side or the place of a claim names, by axis."""
    labels: dict[str, str] = {}
    for part in (part.strip() for part in text.split(",")):
        axis, _, label = part.rpartition("=")
        axes = [axis] if axis else [name for name, own in known.items() if label in own]
        if len(axes) != 1 or label not in known.get(axes[0], ()):
            raise ConfigurationError(
                f"{key}: {claim!r}: {part!r} is no label of one axis; there are "
                + ", ".join(f"{name}: {', '.join(own)}" for name, own in known.items())
            )
        if axes[0] in labels:
            raise ConfigurationError(
                f"{key}: {claim!r}: {text.strip()!r} names {axes[0]} twice; name it once"
            )
        labels[axes[0]] = label
    return labels
