"""Policy of a round: how each kind of state and each part of the model is treated."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from torch import nn

from fl_lightning.batch_norm.kinds import KINDS, STATISTICS, TREATMENTS, buffer_kinds, parameter_kinds
from fl_lightning.cohort.parts import match_parts, treatments
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.declarations import Declarations

UNNAMED = "as its kinds"
"""Table entry of a model part for which no method declares a treatment."""

Stage = tuple[int | str, str]
"""Pair (first round, treatment).

If the first round is determined during training, the method's class name replaces the round.
"""

_EXCLUSIVE = ("local", "pooled", "discarded")
"""Treatments that only one method can declare for the same kind of state."""

_DEFAULT = dict.fromkeys(KINDS, "averaged") | {"counter": "max"}


def resolve_policy(callbacks: Iterable[Declarations], round_number: int, total_rounds: int) -> dict[str, str]:
    """Merge the declarations of all methods into one policy for a round.

    A policy may name kinds of state and parts of the model, such as ``"fc"`` or
    ``"layer1.*.conv1"``. A part takes precedence over a kind of state. A more specific part takes
    precedence over a less specific part (:func:`~fl_lightning.cohort.parts.match_parts`).

    Args:
        callbacks: The run's federated callbacks.
        round_number: The communication round, from 1.
        total_rounds: Number of planned rounds.

    Returns:
        The treatment of each kind of state, followed by the treatment of each part.

    Raises:
        ConfigurationError: Treatments conflict, or a treatment is unknown.
    """
    callbacks = list(callbacks)
    now, later = f"in round {round_number}", "from some round on"
    wishes = []
    for callback in callbacks:
        declared = callback.policy(round_number, total_rounds)
        if not isinstance(declared, Mapping):
            raise ConfigurationError(
                f"{type(callback).__name__}.policy() returns {declared!r}; return a treatment by kind or part, {{}} for the defaults"
            )
        wishes += [(callback, now, *wish) for wish in declared.items()]
    wishes += [(cb, later, *wish) for cb in callbacks for wish in cb.undecided().items()]
    for index, (callback, when, kind, treatment) in enumerate(wishes):
        name = type(callback).__name__
        if treatment not in TREATMENTS:
            raise ConfigurationError(
                f"{name}.policy() declares {kind!r}: {treatment!r}; treatments are {', '.join(TREATMENTS)}"
            )
        for other, _, its_kind, its in wishes[:index]:
            if other is not callback and its_kind == kind and (its != treatment or its in _EXCLUSIVE):
                raise ConfigurationError(
                    f"callbacks {type(other).__name__} and {name} cannot be combined: one wants {kind} {its}, the other "
                    f"{treatment}, {when}"
                )
    return _DEFAULT | {kind: treatment for _, when, kind, treatment in wishes if when == now}


def policy_stages(
    callbacks: Sequence[Declarations], total_rounds: int
) -> list[tuple[int | str, dict[str, str]]]:
    """Return each policy of a run, with the first round of the policy.

    If the first round is determined during training, the method's class name replaces the round.

    Args:
        callbacks: The run's federated callbacks.
        total_rounds: Number of planned rounds.

    Raises:
        ConfigurationError: Treatments conflict, or a treatment is unknown.
    """
    policies = [resolve_policy(callbacks, r, total_rounds) for r in range(1, max(total_rounds, 1) + 1)]
    stages: list[tuple[int | str, dict[str, str]]] = [(1, policies[0])]
    stages += [(r, new) for r, (old, new) in enumerate(pairwise(policies), 2) if new != old]
    for callback in callbacks:
        stages.append((type(callback).__name__, {**stages[-1][1], **callback.undecided()}))
    return stages


def declared_parts(model: nn.Module, callbacks: Iterable[Declarations], total_rounds: int) -> tuple[str, ...]:
    """Check the policies of all rounds, and return the model parts that appear in policies.

    Args:
        model: The model.
        callbacks: The run's federated callbacks.
        total_rounds: Number of planned rounds.

    Raises:
        ConfigurationError: Treatments conflict, or the model lacks a part.
    """
    callbacks = list(callbacks)
    stages = policy_stages(callbacks, total_rounds)
    owners: dict[str, str] = {}
    for callback in callbacks:
        declared = [callback.policy(start, total_rounds) for start, _ in stages if isinstance(start, int)]
        for key in (key for keys in (*declared, callback.undecided()) for key in keys if key not in KINDS):
            owners.setdefault(key, f"{type(callback).__name__}.policy()")
    for part, owner in owners.items():
        match_parts(model, [part], owner)
    match_parts(model, owners)
    for _, policy in stages:
        treated = treatments(model, policy)
        for name in treated:
            other = name.removesuffix("running_mean") + "running_var"
            if other in treated and (treated[name] == "frozen") != (treated[other] == "frozen"):
                raise ConfigurationError(
                    f"running means and variances can only be frozen together (policy of {name} and {other})"
                )
    return tuple(owners)


def policy_table(
    model: nn.Module, callbacks: Iterable[Declarations], total_rounds: int
) -> dict[str, list[Stage]]:
    """Return the treatments of each kind of state, and of each part, over a run.

    Args:
        model: The model.
        callbacks: The run's federated callbacks.
        total_rounds: Number of planned rounds.

    Returns:
        Lists of pairs (first round, treatment), such as ``[(1, "averaged"), (51, "frozen")]``. The
        keys are kinds of state and model parts. If the first round is determined during training,
        the method's class name replaces the round. If a method treats BN layers differently, the
        treatment of BN statistics is a text such as ``"frozen in some layers, averaged"``.
    """
    present = {*parameter_kinds(model).values(), *buffer_kinds(model).values()}
    kinds, stages = buffer_kinds(model), policy_stages([*callbacks], total_rounds)
    for _, policy in stages:
        treated = treatments(model, policy)
        for kind in STATISTICS:
            every = dict.fromkeys(treated[name] for name in kinds if kinds[name] == kind)
            policy[kind] = " in some layers, ".join(every)
    keys = dict.fromkeys(key for _, policy in stages for key in policy if key in present or key not in KINDS)
    return _by_name([(start, {key: policy.get(key, UNNAMED) for key in keys}) for start, policy in stages])


def treatment_table(
    model: nn.Module, callbacks: Iterable[Declarations], total_rounds: int
) -> dict[str, list[Stage]]:
    """Return the treatments of each tensor over a run.

    Args:
        model: The model.
        callbacks: The run's federated callbacks.
        total_rounds: Number of planned rounds.

    Returns:
        Lists as in :func:`policy_table`. The keys are names of trainable parameters and buffers.
    """
    stages = policy_stages([*callbacks], total_rounds)
    return _by_name([(start, treatments(model, policy)) for start, policy in stages])


def _by_name(stages: Iterable[tuple[int | str, Mapping[str, str]]]) -> dict[str, list[Stage]]:
    table: dict[str, list[Stage]] = {}
    for start, policy in stages:
        for name, treatment in policy.items():
            entries = table.setdefault(name, [])
            if not entries or entries[-1][1] != treatment:
                entries.append((start, treatment))
    return table


def stages_in_words(stages: Iterable[Stage]) -> str:
    """Return a list from :func:`policy_table` as text: ``"averaged; frozen from round 51"``."""
    return "; ".join(
        treatment
        if start == 1
        else f"{treatment} from round {start}"
        if isinstance(start, int)
        else f"{treatment} from the round that {start} finds"
        for start, treatment in stages
    )
