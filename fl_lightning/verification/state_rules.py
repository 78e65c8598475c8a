"""The method does to the server's state what its policy says, and leaves the model as it was given."""

from collections.abc import Iterator

from torch import nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.verification.comparison import (
    TOLERANCE,
    NotApplicable,
    Violated,
    distance,
    first_difference,
    pick,
    same,
    weighted_mean,
)
from fl_lightning.verification.observation import Round, State
from fl_lightning.verification.trials import Run, Trials

_FLOATS = ("weight", "affine", "mean", "var", "buffer")


def trains(trials: Trials) -> str:
    """Losses and weights are finite, and the weights change."""
    run = trials.run()
    losses = [seen.loss for seen in run.rounds]
    for number, seen in enumerate(run.rounds, 1):
        for name, value in seen.server.items():
            if not bool(value.isfinite().all()) or seen.loss != seen.loss:
                raise Violated(f"{name} or the loss is not finite after round {number}")
    weights = [name for name, kind in run.module.kinds.items() if kind == "weight"]
    moved, _ = distance(run.rounds[-1].server, run.rounds[0].broadcast, weights)
    if moved <= TOLERANCE:
        raise Violated("no weight of the server changes in four rounds")
    return f"loss {losses[0]:.3g} to {losses[-1]:.3g} in {len(losses)} rounds"


def averaged_state(trials: Trials) -> str:
    """The server's averaged state is sum p_i x_i of the rows that clients send, p_i = n_i / n, with ``SGD(lr=1)``."""
    return _means(trials.run(), _FLOATS)


def server_optimizer(trials: Trials) -> str:
    """Learning rate, momentum and decay of the server optimizer do not reach statistics.

    Clients do the same in round 1 under any server optimizer, so statistics after it are equal bit for bit.
    """
    usual, other = trials.run(), trials.run(server_momentum=0.9)
    one, two = usual.rounds[0], other.rounds[0]
    names = [
        name
        for name, kind in usual.module.kinds.items()
        if kind in ("mean", "var", "counter") and one.policy[kind] != "reset"
    ]
    if not names:
        raise NotApplicable("statistics are not aggregated")
    if first_difference(pick(one.server, names), pick(two.server, names)) is not None:
        apart, name = distance(one.server, two.server, names)
        raise Violated(f"{name} depends on the server optimizer, by {apart:.2g} in round 1")
    return "statistics do not depend on it"


def counters(trials: Trials) -> str:
    """The server's counters are the largest of the clients' and stay int64."""
    checked = 0
    run = trials.run()
    for treatment in ("max", "averaged", "local"):
        for number, seen, names in _with_treatment(run, treatment):
            for name in (name for name in names if run.module.kinds[name] == "counter"):
                largest = seen.sent[name].amax(0)
                if seen.server[name].dtype != largest.dtype:
                    raise Violated(
                        f"{name} is {seen.server[name].dtype} after round {number}, not {largest.dtype}"
                    )
                if seen.server[name] != largest:
                    raise Violated(
                        f"{name} is {seen.server[name]:g} after round {number}; the clients' largest is {largest}"
                    )
                checked += 1
    if not checked:
        raise NotApplicable("no counter is aggregated")
    return "largest of the clients', int64"


def frozen_state(trials: Trials) -> str:
    """Frozen state changes neither at the server nor in the clients' rows, bit for bit, under any server optimizer."""
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
            wrong = first_difference(pick(held, names), pick(seen.row(seen.start, client), names))
            if wrong:
                whose = "what it ended its last round with" if client in last else "the initial state"
                raise Violated(f"client {client} does not start round {number} from {whose}: {wrong}")
            last[client] = {**held, **pick(seen.row(seen.sent, client), names)}
    if not last:
        raise NotApplicable("nothing is local")
    _means(run, _FLOATS, "local")
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
            for name in (name for name in state if run.module.kinds[name] == "var"):
                smallest = float(state[name].min())
                lowest = min(lowest, smallest)
                if not smallest >= 0:
                    raise Violated(f"{name} of {who} reaches {smallest:.3g} in round {number}")
    return f"smallest {lowest:.3g}"


def model_comes_back(trials: Trials) -> str:
    """After a run the model has the modules, shapes, types, flags and hooks that it came with."""
    run = trials.run()
    before, after = dict(run.before.named_modules()), dict(run.module.model.named_modules())
    if before.keys() != after.keys():
        raise Violated(f"modules {sorted(before.keys() ^ after.keys())} came or went")
    for name, module in after.items():
        if type(module) is not type(before[name]):
            raise Violated(
                f"module {name!r} is a {type(module).__name__}, not a {type(before[name]).__name__}"
            )
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise Violated(f"module {name!r} keeps a hook")
    for name, layer in batch_norm_layers(run.module.model).items():
        for setting in ("training", "momentum", "eps", "track_running_stats"):
            if getattr(layer, setting) != getattr(before[name], setting):
                raise Violated(f"{setting} of BN layer {name!r} is {getattr(layer, setting)}, not as it came")
    if (kept := _form(run.module.model)) != (came := _form(run.before)):
        places = sorted(name for name in kept.keys() | came.keys() if kept.get(name) != came.get(name))
        raise Violated(f"{places[0]}: {kept.get(places[0], 'gone')}, not {came.get(places[0], 'there')}")
    return "same keys, shapes, types, modules"


def _means(run: Run, kinds: tuple[str, ...], treatment: str = "averaged") -> str:
    """Compare the server's state of some kinds with the weighted mean of the clients' rows."""
    worst, checked = 0.0, False
    for number, seen, names in _with_treatment(run, treatment):
        for name in (name for name in names if run.module.kinds[name] in kinds):
            if not seen.server[name].is_floating_point():
                continue
            mean = weighted_mean(seen.sent[name], seen.shares)
            apart, _ = distance({name: mean}, seen.server)
            if not apart <= TOLERANCE:
                raise Violated(
                    f"{name} is {apart:.2g} from the weighted mean of the clients' in round {number}"
                )
            worst, checked = max(worst, apart), True
    if not checked:
        raise NotApplicable(f"no state of these kinds is {treatment}")
    return f"weighted mean of what clients send (distance {worst:.1g})"


def _with_treatment(run: Run, treatment: str) -> Iterator[tuple[int, Round, list[str]]]:
    """Rounds, by number, with the tensors that have a treatment in them."""
    for number, seen in enumerate(run.rounds, 1):
        names = [name for name, kind in run.module.kinds.items() if seen.policy[kind] == treatment]
        if names:
            yield number, seen, names


def _form(model: nn.Module) -> dict[str, str]:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    form = {f"{name} in state_dict": "yes" for name in model.state_dict()}
    return form | {
        name: f"{tuple(value.shape)} {value.dtype}{' trainable' if value.requires_grad else ''}"
        for name, value in tensors.items()
    }
