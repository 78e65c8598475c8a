"""The method does to the server's state what its policy says, and leaves the model as it was given."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.mechanisms.freezing import Freezing
from fl_lightning.milestones import round_at
from fl_lightning.verification.comparison import (
    TOLERANCE,
    NotApplicable,
    Violated,
    distance,
    first_difference,
    same,
)
from fl_lightning.verification.federation import reference_model
from fl_lightning.verification.observation import Round, Run, State
from fl_lightning.verification.trials import Trials


def trains(trials: Trials) -> str:
    """Losses and weights are finite, and the weights change."""
    run = trials.run()
    losses = [seen.loss for seen in run.rounds]
    for number, seen in enumerate(run.rounds, 1):
        for name, value in seen.server.items():
            if not bool(value.isfinite().all()) or seen.loss != seen.loss:
                raise Violated(f"{name} or the loss is not finite after round {number}")
    weights = [name for name, kind in run.kinds.items() if kind == "weight"]
    moved, _ = distance(run.rounds[-1].server, run.rounds[0].broadcast, weights)
    if moved <= TOLERANCE:
        raise Violated("no weight of the server changes in four rounds")
    return f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} rounds"


def between_rounds(trials: Trials) -> str:
    """A round broadcasts, bit for bit, what the last one ended with: no hook changes the server in between."""
    for number, (last, seen) in enumerate(pairwise(trials.run().rounds), 2):
        wrong = first_difference(last.server, seen.broadcast)
        if wrong:
            raise Violated(f"round {number} does not broadcast what round {number - 1} ended with: {wrong}")
    return "each round broadcasts what the last one ended with"


def averaged_state(trials: Trials) -> str:
    """The server's averaged state is sum p_i x_i of the rows that clients send, p_i = n_i / n, with ``SGD(lr=1)``."""
    return _means(trials.run(), "averaged")


def server_optimizer(trials: Trials) -> str:
    """Learning rate, momentum and decay of the server optimizer do not reach statistics.

    Clients do the same in round 1 under any server optimizer, so statistics after it are equal bit for bit.
    """
    usual = trials.run()
    one, two = usual.rounds[0], trials.run(server_momentum=0.9).rounds[0]
    names = [
        name
        for name, kind in usual.kinds.items()
        if kind in ("mean", "var", "counter") and one.policy[kind] != "reset"
    ]
    if not names:
        raise NotApplicable("statistics are not aggregated")
    if first_difference(one.server, two.server, names) is not None:
        apart, name = distance(one.server, two.server, names)
        raise Violated(f"{name} depends on the server optimizer, by {apart:.2g} in round 1")
    return "statistics do not depend on it"


def counters(trials: Trials) -> str:
    """The server's counters are the largest of the clients' and stay int64."""
    run, checked = trials.run(), False
    for number, seen, names in _with_treatment(run, "max", "averaged", "local"):
        for name in (name for name in names if run.kinds[name] == "counter"):
            held, largest = seen.server[name], seen.sent[name].amax(0)
            if not same(held, largest):
                raise Violated(
                    f"{name} is {held:g} ({held.dtype}) after round {number}; the clients' largest is {largest} "
                    f"({largest.dtype})"
                )
            checked = True
    if not checked:
        raise NotApplicable("no counter is aggregated")
    return "largest of the clients', int64"


def frozen_state(trials: Trials) -> str:
    """Frozen state changes neither at the server nor in the clients' rows, bit for bit; statistics move where nobody froze them.

    Under any server optimizer. A :class:`~fl_lightning.mechanisms.freezing.Freezing` freezes after the T* that it was given or found.
    """
    _frozen_when_said(trials.run())
    rounds = 0
    for run in (trials.run(), trials.run(server_momentum=0.9)):
        for number, seen, names in _with_treatment(run, "frozen"):
            rounds += 1
            for name in names:
                before = seen.broadcast[name]
                if not same(before, seen.server[name]):
                    raise Violated(f"the server's {name} changes in round {number}")
                if not same(before.expand_as(seen.sent[name]), seen.sent[name]):
                    raise Violated(f"the clients' {name} changes in round {number}")
    if not rounds:
        raise NotApplicable("nothing is frozen")
    return f"bitwise constant in {rounds // 2} rounds"


def _frozen_when_said(run: Run) -> None:
    """Demand that statistics move where the policy averages them or leaves them to the clients, and T* of a freezing method."""
    freezes = run.method.kinds if isinstance(run.method, Freezing) else ()
    milestone = (
        getattr(run.method, "milestone", getattr(run.method, "freeze_round", None)) if freezes else None
    )
    last = None if milestone is None else round_at(milestone, len(run.rounds))
    for number, seen in enumerate(run.rounds, 1):
        for name, kind in run.kinds.items():
            says = seen.policy[kind]
            if kind in ("mean", "var") and says in ("averaged", "local") and kind not in seen.undecided:
                still = (seen.start[name] == seen.sent[name]).all(1).tolist()
                if any(still):
                    whose = f"{name} of client {seen.clients[still.index(True)]}"
                    raise Violated(f"{whose} stands still in round {number}, where the policy says {says}")
            if last is not None and kind in freezes and (says == "frozen") != (number > last):
                raise Violated(f"{name} is {says} in round {number}, and T* is {last}")


def local_state(trials: Trials) -> str:
    """A client starts from the local state that it ended with, a newcomer from the server's initial; the server's is the mean."""
    run = trials.run()
    last: dict[int, State] = {}
    initial: State = {}
    for number, seen, names in _with_treatment(run, "local"):
        for name in names:
            initial.setdefault(name, seen.broadcast[name])
        for client in seen.clients:
            held = {**initial, **last.get(client, {})}
            wrong = first_difference(held, seen.row(seen.start, client), names)
            if wrong:
                whose = "what it ended its last round with" if client in last else "the initial state"
                raise Violated(f"client {client} does not start round {number} from {whose}: {wrong}")
            sent = seen.row(seen.sent, client)
            last[client] = held | {name: sent[name] for name in names}
    if not last:
        raise NotApplicable("nothing is local")
    _means(run, "local")
    return "each client keeps its own, bit for bit; the server's copy is the mean over the cohort"


def pooled_state(trials: Trials) -> str:
    """State that the method aggregates itself reaches the server in every round."""
    rounds = 0
    for number, seen, names in _with_treatment(trials.run(), "pooled"):
        rounds += 1
        for name in names:
            if same(seen.broadcast[name], seen.server[name]):
                raise Violated(f"the server's {name} stays as it was in round {number}")
    if not rounds:
        raise NotApplicable("nothing is pooled")
    return f"set by the method in each of {rounds} rounds"


def variances(trials: Trials) -> str:
    """Running variances of the server and of what clients start from and send are never negative."""
    run = trials.attempt()
    lowest = float("inf")
    for number, seen in enumerate(run.rounds, 1):
        for who, state in (
            ("a client that starts", seen.start),
            ("a client that sends", seen.sent),
            ("the server", seen.server),
        ):
            for name in (name for name in state if run.kinds[name] == "var"):
                smallest = float(state[name].min())
                lowest = min(lowest, smallest)
                if not smallest >= 0:
                    raise Violated(f"{name} of {who} reaches {smallest:.3g} in round {number}")
    return f"smallest {lowest:.3g}"


def model_comes_back(trials: Trials) -> str:
    """After a run the model has the modules, shapes, types, flags and hooks that it came with."""
    kept, came = _form(trials.run().model), _form(reference_model())
    for place in {**came, **kept}:
        if kept.get(place) != came.get(place):
            raise Violated(f"{place}: {kept.get(place, 'gone')}, not {came.get(place, 'there')}")
    return "same keys, shapes, types, modules"


def _means(run: Run, treatment: str) -> str:
    """Compare the server's floats that have a treatment with the weighted mean of the clients' rows."""
    worst, checked = 0.0, False
    for number, seen, names in _with_treatment(run, treatment):
        for name in (name for name in names if seen.server[name].is_floating_point()):
            mean = torch.tensordot(seen.shares.to(seen.sent[name].dtype), seen.sent[name], 1)
            apart, _ = distance({name: mean}, seen.server, [name])
            if not apart <= TOLERANCE:
                raise Violated(
                    f"{name} is {apart:.2g} from the weighted mean of the clients' in round {number}"
                )
            worst, checked = max(worst, apart), True
    if not checked:
        raise NotApplicable(f"no state of these kinds is {treatment}")
    return f"weighted mean of what clients send (distance {worst:.1g})"


def _with_treatment(run: Run, *treatments: str) -> Iterator[tuple[int, Round, list[str]]]:
    """Rounds, by number, with the tensors that have one of some treatments in them."""
    for number, seen in enumerate(run.rounds, 1):
        names = [name for name, kind in run.kinds.items() if seen.policy[kind] in treatments]
        if names:
            yield number, seen, names


def _form(model: nn.Module) -> dict[str, Any]:
    """What a model is like apart from the numbers in it, by place."""
    form: dict[str, Any] = {f"{name} in state_dict": "yes" for name in model.state_dict()}
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        form |= {f"module {name!r}": type(module), f"hooks of module {name!r}": sum(map(len, hooks))}
        if isinstance(module, _BatchNorm):
            for setting in ("training", "momentum", "eps", "track_running_stats"):
                form[f"{setting} of BN layer {name!r}"] = getattr(module, setting)
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        form[name] = f"{tuple(value.shape)} {value.dtype}{' trainable' if value.requires_grad else ''}"
    return form
