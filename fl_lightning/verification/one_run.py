"""Rules of single runs: state is treated as the policy says, what is kept of clients is theirs, the model comes back."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.methods.freezing import Freezing
from fl_lightning.optimizers.milestones import round_at
from fl_lightning.testing.federation import reference_model
from fl_lightning.verification.comparison import (
    TOLERANCE,
    Leaves,
    NotApplicable,
    Violated,
    apart,
    difference,
    distance,
)
from fl_lightning.verification.memory import entries, knows_no_client
from fl_lightning.verification.observation import Run, State
from fl_lightning.verification.trials import WITH_SERVER_MOMENTUM, Trials


def trains(trials: Trials) -> str:
    """Losses and state stay finite, running variances of the server and of all clients not negative; the weights change.

    What attackers send may be anything: they are tried with the median as aggregator.
    """
    run, attacks = trials.attempt(), trials.make().role == "attack"
    for number, seen in enumerate(run.rounds, 1):
        for who, state in (
            ("a client that starts", seen.start),
            ("a client that sends", {} if attacks else seen.sent),
            ("the server", seen.server),
        ):
            for name, value in state.items():
                smallest = float(value.min())
                if not bool(value.isfinite().all()) or (run.kinds[name] == "var" and smallest < 0):
                    raise Violated(f"{name} of {who} reaches {smallest:.3g} in round {number}")
        if seen.loss != seen.loss:
            raise Violated(f"the loss is not a number in round {number}")
    if run.error is None:
        weights = [name for name, kind in run.kinds.items() if kind == "weight"]
        moved, _ = distance(seen.server, run.rounds[0].broadcast, weights)
        if moved <= TOLERANCE:
            raise Violated("no weight of the server changes in any round")
    return f"losses {', '.join(f'{seen.loss:.3g}' for seen in run.rounds)}"


def between_rounds(trials: Trials) -> str:
    """A round broadcasts, bit for bit, what the last one ended with: no hook changes the server in between."""
    for number, (last, seen) in enumerate(pairwise(trials.run().rounds), 2):
        wrong = difference(last.server, seen.broadcast)
        if wrong:
            raise Violated(f"round {number} does not broadcast what round {number - 1} ended with: {wrong}")
    return "each round broadcasts what the last one ended with"


def server_state(trials: Trials) -> str:
    """The server's averaged state, and its copy of local state, is sum p_i x_i of the rows that clients send, p_i = n_i / n.

    With ``SGD(lr=1)``. Counters are the largest of the clients' and stay int64; state that the method pools itself moves
    in every round.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attacks are tried with the median as aggregator")
    run, worst = trials.run(), 0.0
    for number, seen in enumerate(run.rounds, 1):
        for name, kind in run.kinds.items():
            held, sent, treatment = seen.server[name], seen.sent[name], seen.policy[kind]
            if treatment == "pooled" and not apart(seen.broadcast[name], held):
                raise Violated(f"{name} is pooled, and stays as it was in round {number}")
            if treatment not in ("averaged", "local", "max"):
                continue
            if kind == "counter" and apart(held, sent.amax(0)):
                raise Violated(
                    f"{name} is {held:g} ({held.dtype}) after round {number}, not {sent.amax(0)!r}"
                )
            if kind != "counter":
                mean = torch.tensordot(seen.shares, sent, 1)
                worst = max(worst, apart(mean, held))
                if not worst <= TOLERANCE:
                    raise Violated(
                        f"{name} is {worst:.2g} from the weighted mean of the clients' in round {number}"
                    )
    return f"as the policy says (distance of means {worst:.1g})"


def frozen_state(trials: Trials) -> str:
    """Frozen state changes neither at the server nor in the clients' rows, bit for bit; statistics move where nobody froze them.

    Under any server optimizer. A :class:`~fl_lightning.methods.freezing.Freezing` freezes after the T* that it was given or found.
    """
    frozen = set()
    for run in (trials.run(), trials.run(WITH_SERVER_MOMENTUM)):
        freezes, last = _announced(run)
        for number, seen in enumerate(run.rounds, 1):
            for name, kind in run.kinds.items():
                says, before, sent = seen.policy[kind], seen.broadcast[name], seen.sent[name]
                if last is not None and kind in freezes and (says == "frozen") != (number > last):
                    raise Violated(f"{name} is {says} in round {number}, and T* is {last}")
                if says == "frozen":
                    frozen.add(number)
                    if apart(before, seen.server[name]):
                        raise Violated(f"the server's {name} changes in round {number}")
                    if apart(before.expand_as(sent), sent):
                        raise Violated(f"the clients' {name} changes in round {number}")
                if kind in ("mean", "var") and says in ("averaged", "local") and kind not in seen.undecided:
                    still = (seen.start[name] == sent).all(1)
                    if still.any():
                        client = seen.clients[still.tolist().index(True)]
                        raise Violated(
                            f"{name} of client {client} stands still in round {number}, where the policy says {says}"
                        )
    if not frozen:
        raise NotApplicable("nothing is frozen")
    return f"bitwise constant in {len(frozen)} rounds"


def _announced(run: Run) -> tuple[tuple[str, ...], int | None]:
    """The kinds of state that a freezing method freezes, and the T* that its setting or its search gives."""
    if not isinstance(run.method, Freezing):
        return (), None
    milestone = getattr(run.method, "milestone", getattr(run.method, "freeze_round", None))
    return run.method.kinds, None if milestone is None else round_at(milestone, len(run.rounds))


def local_state(trials: Trials) -> str:
    """A client starts from the local state that it ended with, a newcomer from the server's initial."""
    run = trials.run()
    initial: State = {}
    last: dict[int, State] = {}
    for number, seen in enumerate(run.rounds, 1):
        names = [name for name, kind in run.kinds.items() if seen.policy[kind] == "local"]
        if not names:
            continue
        initial = initial or seen.broadcast
        for client in seen.clients:
            held = initial | last.get(client, {})
            wrong = difference(held, seen.row(seen.start, client), names)
            if wrong:
                whose = "what it ended its last round with" if client in last else "the initial state"
                raise Violated(f"client {client} does not start round {number} from {whose}: {wrong}")
            sent = seen.row(seen.sent, client)
            last[client] = last.get(client, {}) | {name: sent[name] for name in names}
    if not last:
        raise NotApplicable("nothing is local")
    return "each client keeps its own, bit for bit"


def payload(trials: Trials) -> str:
    """``extra_payload`` gives two whole numbers, ``extra_exchanges`` one, none negative; optimizer state is received as declared."""
    for number, seen in enumerate(trials.run().rounds, 1):
        up, down = seen.payload
        for count in (up, down, seen.exchanges):
            if type(count) is not int or count < 0:
                raise Violated(
                    f"extra_payload gives {seen.payload} and extra_exchanges {seen.exchanges!r} in round {number}: {count!r} "
                    "is not a whole number >= 0"
                )
        if seen.told > down:
            raise Violated(
                f"all clients start round {number} with the same {seen.told} floats of optimizer state, and extra_payload "
                f"says that they receive {down}"
            )
    return f"{up} floats up and {down} down on top of the averaged state"


def absent_clients(trials: Trials) -> str:
    """What the method keeps of a client does not change in a round without it, unless it forgets all clients at once."""
    rounds = trials.run().rounds
    kept = [entries(seen.memory)[1] for seen in rounds]
    if not any(kept) or knows_no_client(trials):
        raise NotApplicable("it keeps nothing by client")
    for number, (before, after) in enumerate(pairwise(kept), 2):
        absent = (before.keys() | after.keys()) - set(rounds[number - 1].clients)
        for client in absent if before and after else ():
            place = difference(before.get(client, {}), after.get(client, {}))
            if place is not None:
                raise Violated(
                    f"what is kept of client {client} changes in round {number}, without it: {place}"
                )
    return "what is kept of them stays bit for bit"


def model_comes_back(trials: Trials) -> str:
    """After a run the model has the modules, shapes, types, flags and hooks that it came with."""
    kept, came = _form(trials.run().model), _form(reference_model())
    for place in {**came, **kept}:
        if kept.get(place) != came.get(place):
            raise Violated(f"{place}: {kept.get(place, 'gone')}, not {came.get(place, 'there')}")
    return "same keys, shapes, types, modules"


def _form(model: nn.Module) -> Leaves:
    """What a model is like apart from the numbers in it, by place."""
    form: Leaves = {f"{name} in state_dict": "yes" for name in model.state_dict()}
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        form[f"module {name!r}"] = f"{type(module)}({module.extra_repr()})"
        form[f"hooks of module {name!r}"] = sum(map(len, hooks))
        if isinstance(module, _BatchNorm):
            form[f"training of module {name!r}"] = module.training
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        form[name] = f"{tuple(value.shape)} {value.dtype}{' trainable' if value.requires_grad else ''}"
    return form
