"""The policy of a round: the treatment of each kind of state, merged from declarations."""

from collections.abc import Iterable, Mapping
from itertools import groupby

from torch import nn

from fl_lightning.batch_norm.kinds import KINDS, TREATMENTS, buffer_kinds, parameter_kinds
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.declarations import Declarations

Stage = tuple[int | str, str]
"""First round of a treatment (or the method that finds it in training), and the treatment."""

_EXCLUSIVE = ("local", "pooled", "reset")
"""Treatments that a callback implements itself; two callbacks cannot share them."""

_DEFAULT = dict.fromkeys(KINDS, "averaged") | {"counter": "max"}


def resolve_policy(callbacks: Iterable[Declarations], round_number: int, total_rounds: int) -> dict[str, str]:
    """Return the treatment of each kind of state in a round, merged from all declarations.

    Args:
        callbacks: The run's federated callbacks.
        round_number: The communication round, from 1.
        total_rounds: Number of planned rounds.

    Returns:
        The treatment of each kind of :data:`~fl_lightning.batch_norm.kinds.KINDS`.

    Raises:
        ConfigurationError: Treatments conflict, or a kind or treatment is unknown.
    """
    callbacks = list(callbacks)
    now, later = f"in round {round_number}", "from some round on"
    wishes = []
    for callback in callbacks:
        declared = callback.policy(round_number, total_rounds)
        if not isinstance(declared, Mapping):
            raise ConfigurationError(
                f"{type(callback).__name__}.policy() returns {declared!r}; return a treatment by kind, {{}} for the defaults"
            )
        wishes += [(callback, now, *wish) for wish in declared.items()]
    wishes += [(cb, later, *wish) for cb in callbacks for wish in cb.undecided().items()]
    for index, (callback, when, kind, treatment) in enumerate(wishes):
        name = type(callback).__name__
        if kind not in KINDS or treatment not in TREATMENTS:
            raise ConfigurationError(
                f"{name}.policy() declares {kind!r}: {treatment!r}; kinds are {', '.join(KINDS)} and treatments "
                f"{', '.join(TREATMENTS)}"
            )
        for other, _, its_kind, its in wishes[:index]:
            if other is not callback and its_kind == kind and (its != treatment or its in _EXCLUSIVE):
                raise ConfigurationError(
                    f"callbacks {type(other).__name__} and {name} cannot be combined: one wants {kind} {its}, the other "
                    f"{treatment}, {when}"
                )
    policy = _DEFAULT | {kind: treatment for _, when, kind, treatment in wishes if when == now}
    if (policy["mean"] == "frozen") != (policy["var"] == "frozen"):
        raise ConfigurationError(
            "running means and variances can only be frozen together (policy of mean and var)"
        )
    return policy


def check_together(callbacks: Iterable[Declarations]) -> None:
    """Raise ``ConfigurationError`` if two methods take one resource (``Declarations.takes``)."""
    taken: dict[str, Declarations] = {}
    for callback in callbacks:
        for resource, remedy in callback.takes.items():
            other = taken.setdefault(resource, callback)
            if other is not callback:
                instead = remedy or other.takes[resource] or "use one of them"
                raise ConfigurationError(
                    f"callbacks {type(other).__name__} and {type(callback).__name__} cannot be combined: both decide over "
                    f"{resource}; {instead}"
                )


def policy_table(
    model: nn.Module, callbacks: Iterable[Declarations], total_rounds: int
) -> dict[str, list[Stage]]:
    """Return the policy over a whole run for each kind of state that the model has.

    Args:
        model: The model.
        callbacks: The run's federated callbacks.
        total_rounds: Number of planned rounds.

    Returns:
        The stages of each kind, such as ``[(1, "averaged"), (51, "frozen")]``. A method that finds
        the round in training stands in place of the round: ``("SlidingWindowFixBN", "frozen")``.
    """
    callbacks = list(callbacks)
    present = {*parameter_kinds(model).values(), *buffer_kinds(model).values()}
    policies = [resolve_policy(callbacks, r, total_rounds) for r in range(1, max(total_rounds, 1) + 1)]
    table: dict[str, list[Stage]] = {}
    for kind in (kind for kind in KINDS if kind in present):
        table[kind], start = [], 1
        for treatment, rounds in groupby(policies, key=lambda policy: policy[kind]):
            table[kind].append((start, treatment))
            start += len(list(rounds))
        table[kind] += [
            (type(callback).__name__, callback.undecided()[kind])
            for callback in callbacks
            if kind in callback.undecided()
        ]
    return table


def stages_in_words(stages: Iterable[Stage]) -> str:
    """Return a kind's stages in words, such as ``"averaged; frozen from round 51"``."""
    return "; ".join(
        treatment
        if start == 1
        else f"{treatment} from round {start}"
        if isinstance(start, int)
        else f"{treatment} from the round that {start} finds"
        for start, treatment in stages
    )
