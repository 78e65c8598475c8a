"""Rules that are checked in a single run, such as the treatment of state."""

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
from fl_lightning.verification.memory import entries
from fl_lightning.verification.observation import Run, State
from fl_lightning.verification.renumbering import knows_no_client
from fl_lightning.verification.trials import WITH_SERVER_MOMENTUM, Trials


def trains(trials: Trials) -> str:
    """Check that state stays finite and that training changes the weights.

    No loss may be NaN, and running variances must be >= 0. Attackers may send any values. Attacks
    are checked with the median as aggregator.
    """
    run, attacks = trials.attempt(), trials.make().role == "attack"
    for number, seen in enumerate(run.rounds, 1):
        for who, state in (
            ("a client before its local steps", seen.start),
            ("a client after its local steps", {} if attacks else seen.sent),
            ("the server", seen.server),
        ):
            for name, value in state.items():
                place = f"{name} of {who} in round {number}"
                if not bool(value.isfinite().all()):
                    raise Violated(f"state must stay finite: {place} is not")
                if run.kinds.get(name) == "var" and value.min() < 0:
                    raise Violated(f"running variances must stay >= 0: {place} is {value.min():.3g}")
        if seen.loss != seen.loss:
            raise Violated(f"the training loss must be a number: it is NaN in round {number}")
    if run.error is None:
        weights = [name for name, kind in run.kinds.items() if kind == "weight"]
        moved, _ = distance(seen.server, run.rounds[0].broadcast, weights)
        if moved <= TOLERANCE:
            raise Violated("training must change the weights: no weight of the server changed")
    return f"losses {', '.join(f'{seen.loss:.3g}' for seen in run.rounds)}"


def between_rounds(trials: Trials) -> str:
    """Check that each round starts from the previous round's final server state, bit for bit."""
    for number, (last, seen) in enumerate(pairwise(trials.run().rounds), 2):
        wrong = difference(last.server, seen.broadcast)
        if wrong:
            raise Violated(f"the server must not change between rounds: {wrong} did before round {number}")
    return "each round starts where the last one ended"


def server_state(trials: Trials) -> str:
    """Check that the server's averaged and local state is the clients' weighted mean.

    The mean is ``sum p_i x_i`` with ``p_i = n_i / n``; the server optimizer is ``SGD(lr=1)``. Only
    ``on_after_aggregate`` may correct the server's state. A counter at the server must be int64 and
    equal the clients' largest counter. Pooled state must change in every round.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attacks are tried with the median as aggregator")
    run, worst, corrections = trials.run(), 0.0, set()
    for number, seen in enumerate(run.rounds, 1):
        for name, kind in run.kinds.items():
            held, sent, treatment = seen.aggregated[name], seen.sent[name], seen.treatments[name]
            if treatment == "pooled" and not apart(seen.broadcast[name], seen.server[name]):
                raise Violated(f"pooled state must change in every round: {name} did not in round {number}")
            if treatment not in ("averaged", "local", "max"):
                continue
            if kind == "counter" and apart(held, sent.amax(0)):
                raise Violated(
                    f"a counter must be the clients' largest: {name} is {held:g} ({held.dtype}) after round "
                    f"{number}, not {sent.amax(0)!r}"
                )
            if kind != "counter":
                mean = torch.tensordot(seen.shares, sent, 1)
                worst = max(worst, apart(mean, held))
                if not worst <= TOLERANCE:
                    raise Violated(
                        f"state must be the clients' weighted mean: {name} differs by {worst:.2g} in round {number}"
                    )
            changed = apart(seen.corrected[name], seen.server[name])
            if not changed <= TOLERANCE:
                raise Violated(
                    f"only on_after_aggregate may correct the server: {name} differs by {changed:.2g} from the clients' "
                    f"weighted mean in round {number} after the method's other hooks; change cohort.pseudo_gradient in "
                    "on_after_aggregate (docs/own-method.md#a-correction-at-the-server)"
                )
            if apart(held, seen.corrected[name]):
                corrections.add(number)
    corrected = f", corrected by on_after_aggregate in {len(corrections)} rounds" if corrections else ""
    return f"matches the policy (distance of means {worst:.1g}){corrected}"


def frozen_state(trials: Trials) -> str:
    """Check that frozen state is constant bit for bit, and that other statistics change.

    Statistics that are averaged or local must change in each round. The rule must hold for any
    server optimizer. A subclass of :class:`~fl_lightning.methods.freezing.Freezing` must freeze its
    state in round T* + 1. T* may be a setting, or be determined in training.
    """
    frozen = set()
    for run in (trials.run(), trials.run(WITH_SERVER_MOMENTUM)):
        freezes, last = _announced(run)
        for number, seen in enumerate(run.rounds, 1):
            for name, kind in run.kinds.items():
                treatment, before, sent = seen.treatments[name], seen.broadcast[name], seen.sent[name]
                if last is not None and kind in freezes and (treatment == "frozen") != (number > last):
                    raise Violated(
                        f"state must freeze right after T* = {last}: {name} is {treatment} in round {number}"
                    )
                if treatment == "frozen":
                    frozen.add(number)
                    at_server = apart(before, seen.server[name])
                    if at_server or apart(before.expand_as(sent), sent):
                        whose = "the server" if at_server else "a client"
                        raise Violated(
                            f"frozen state must not change: {name} of {whose} did in round {number}"
                        )
                moves = treatment in ("averaged", "local") and kind not in seen.undecided
                if kind in ("mean", "var") and moves:
                    still = (seen.start[name] == sent).all(1)
                    if still.any():
                        client = seen.clients[still.tolist().index(True)]
                        raise Violated(
                            f"{treatment} statistics must change: {name} of client {client} did not in round {number}"
                        )
    if not frozen:
        raise NotApplicable("no state is frozen")
    return f"constant bit for bit in {len(frozen)} rounds"


def _announced(run: Run) -> tuple[tuple[str, ...], int | None]:
    """Return the kinds of state that a method freezes, and the last round before the freeze.

    The round is None if the method determines the round during the run.
    """
    if not isinstance(run.method, Freezing):
        return (), None
    milestone = getattr(run.method, "freeze_round", None)
    return run.method.kinds, None if milestone is None else round_at(milestone, len(run.rounds))


def local_state(trials: Trials) -> str:
    """Check that a client starts a round with the local state from its previous round.

    In its first round, a client starts with the server's initial state.
    """
    run = trials.run()
    initial: State = {}
    last: dict[int, State] = {}
    for number, seen in enumerate(run.rounds, 1):
        names = [name for name in run.kinds if seen.treatments[name] == "local"]
        if not names:
            continue
        initial = initial or seen.broadcast
        for client in seen.clients:
            held = initial | last.get(client, {})
            wrong = difference(held, seen.row(seen.start, client), names)
            if wrong:
                whose = "its last" if client in last else "the server's initial"
                raise Violated(
                    f"a client must start from {whose} local state: {wrong} of client {client} differs in round {number}"
                )
            sent = seen.row(seen.sent, client)
            last[client] = last.get(client, {}) | {name: sent[name] for name in names}
    if not last:
        raise NotApplicable("no state is local")
    return "each client keeps its local state bit for bit"


def one_broadcast(trials: Trials) -> str:
    """Check that all clients start a round from the same averaged, pooled and frozen state.

    A client's BN batch counter must grow by the number of its local steps. If the client's BN
    layers are frozen, the counter must not change.
    """
    for number, seen in enumerate(trials.run().rounds, 1):
        for name, kind in trials.run().kinds.items():
            treatment, start = seen.treatments[name], seen.start[name]
            if treatment in ("local", "reset"):
                continue
            apart_at = [row for row in range(len(start)) if apart(start[0], start[row])]
            if apart_at:
                clients = f"{seen.clients[0]} and {seen.clients[apart_at[0]]}"
                raise Violated(
                    f"clients must start a round from one broadcast: {treatment} {name} of clients {clients} differs "
                    f"at the start of round {number}"
                )
            grown = (seen.trained[name] - start).flatten().tolist() if kind == "counter" else []
            for client, steps, growth in zip(seen.clients, seen.steps, grown, strict=False):
                if growth not in (0, steps):
                    raise Violated(
                        f"a batch counter must grow by the local steps: {name} of client {client} grows by {growth} in "
                        f"{steps} steps of round {number}"
                    )
            if kind == "counter" and difference(seen.trained, seen.sent, [name]):
                raise Violated(f"clients must send their batch counter: {name} is changed in round {number}")
    return "all clients start from the same state"


def done_clients(trials: Trials) -> str:
    """Check that a client's rows in ``cohort.extra`` do not change after its last local step."""
    for number, seen in enumerate(trials.run().rounds, 1):
        if seen.late:
            raise Violated(
                f"a client that has taken its local steps must not change: {seen.late} does in round {number}"
            )
    return "a client's data in cohort.extra ends with its last step"


def payload(trials: Trials) -> str:
    """Check that ``extra_payload`` and ``extra_exchanges`` return integers >= 0.

    ``extra_payload`` must count the optimizer state that clients receive.
    """
    for number, seen in enumerate(trials.run().rounds, 1):
        up, down = seen.payload
        for count in (up, down, seen.exchanges):
            if type(count) is not int or count < 0:
                raise Violated(
                    f"payload and exchanges must be whole numbers >= 0: extra_payload returns {seen.payload}, extra_exchanges "
                    f"{seen.exchanges!r} in round {number}"
                )
        if seen.received > down:
            raise Violated(
                f"extra_payload must count received optimizer state: all clients start round {number} with the same "
                f"{seen.received} floats of it, and {down} are declared"
            )
    return f"{up} floats up and {down} down beside the averaged state"


def absent_clients(trials: Trials) -> str:
    """Check that a round does not change the memory of absent clients.

    A method may discard the memory of all clients at once.
    """
    rounds = trials.run().rounds
    memories = [entries(seen.memory)[1] for seen in rounds]
    if not any(memories) or knows_no_client(trials):
        raise NotApplicable("the method has no memory by client")
    for number, (before, after) in enumerate(pairwise(memories), 2):
        absent = (before.keys() | after.keys()) - set(rounds[number - 1].clients)
        for client in absent if before and after else ():
            place = difference(before.get(client, {}), after.get(client, {}))
            if place is not None:
                raise Violated(
                    f"an absent client's memory must not change: {place} of client {client} did in round {number}"
                )
    return "their memory is constant bit for bit"


def model_comes_back(trials: Trials) -> str:
    """Check that a run restores the model's original modules, shapes, dtypes, flags and hooks.

    Layers that ``extend_model`` adds must stay.
    """
    model = reference_model()
    trials.make().extend_model(model)
    after, before = _form(trials.run().model), _form(model.double())
    for place in {**before, **after}:
        if after.get(place) != before.get(place):
            change = f"{place} is {after.get(place, 'missing')}, was {before.get(place, 'missing')}"
            raise Violated(f"a run must restore the model: {change}")
    return "keys, shapes, types and modules are restored"


def _form(model: nn.Module) -> Leaves:
    """Return the structure of a model (types, shapes, flags and hooks) without its values.

    The keys are the names of modules and tensors.
    """
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
