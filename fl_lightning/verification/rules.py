"""Rules for all methods. A rule looks at one recorded run, or compares runs that differ in one respect."""

import pickle
from collections.abc import Callable, Generator, Iterator
from copy import deepcopy
from functools import wraps
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fl_lightning.batch_norm.kinds import STATISTICS
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import cannot_fork
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.methods.freezing import Freezing
from fl_lightning.optimizers.milestones import round_at
from fl_lightning.testing.federation import Disturbance, reference_model
from fl_lightning.verification.comparison import (
    TOLERANCE,
    Leaves,
    NotApplicable,
    Violated,
    apart,
    difference,
    largest_difference,
)
from fl_lightning.verification.memory import entries, large_of_server
from fl_lightning.verification.observation import ObservedRun, State
from fl_lightning.verification.renumbering import (
    knows_no_client,
    memory_apart,
    relabelled,
    renamed_memory_apart,
)
from fl_lightning.verification.trials import RESTING, SCRIPT, WITH_SERVER_MOMENTUM, Trials

Rule = Callable[[Trials], str]
"""Function that checks a rule, and returns what was measured.

Raises:
    Violated: The method breaks the rule.
    NotApplicable: The rule does not apply to the method.
"""

Violations = Generator[str, None, str]
"""Generator that yields how a method breaks a rule, and returns what was measured."""

RULES: dict[str, Rule] = {}
"""Rules for all methods, in the order of a certificate. The keys are the names that it shows."""

REMEDIES: dict[str, str] = {}
"""Advice for each failed rule: how to change the method."""

ROUNDING = 1e-12
"""Largest difference of weights or gradients that is attributed to rounding, in float64."""

_ON_RANKS = (
    "local steps may change only rows of their rank and keep data in cohort.extra, other hooks must do the same on "
    "every rank"
)


def rule(remedy: str, attacks: str = "") -> Callable[[Callable[[Trials], Violations]], Rule]:
    """Return a decorator that adds a generator function to :data:`RULES` under its name.

    Args:
        remedy: How to change a method that breaks the rule.
        attacks: Reason why the rule does not apply to attacks, if it does not.
    """

    def add(violations: Callable[[Trials], Violations]) -> Rule:
        @wraps(violations)
        def check(trials: Trials) -> str:
            if attacks and trials.is_attack:
                raise NotApplicable(attacks)
            found = violations(trials)
            try:
                violation = next(found)
            except StopIteration as end:
                return str(end.value)
            raise Violated(violation)

        name = violations.__name__.replace("_", " ")
        RULES[name], REMEDIES[name] = check, remedy
        return check

    return add


@rule("limit the size of a step, and keep running variances >= 0")
def trains(trials: Trials) -> Violations:
    """Check that state stays finite and that training changes the weights.

    No loss may be NaN, and running variances must be >= 0. Attackers may send any values. Attacks
    are checked with the median as aggregator.
    """
    run = trials.attempt()
    for seen in run.rounds:
        sent = {} if trials.is_attack else seen.sent
        states = {"a client": seen.start, "a client after its local steps": sent, "the server": seen.server}
        for who, state in states.items():
            for name, value in state.items():
                place = f"{name} of {who} in {seen}"
                if not bool(value.isfinite().all()):
                    yield f"state must stay finite: {place} is not"
                if run.kinds.get(name) == "var" and value.min() < 0:
                    yield f"running variances must stay >= 0: {place} is {value.min():.3g}"
        if seen.loss != seen.loss:
            yield f"the training loss must be a number: it is NaN in {seen}"
    if run.error is None:
        moved, _ = largest_difference(run.rounds[-1].server, run.rounds[0].broadcast, run.names("weight"))
        if moved <= TOLERANCE:
            yield "training must change the weights: no weight of the server changed"
    return f"losses {', '.join(f'{seen.loss:.3g}' for seen in run.rounds)}"


@rule("keep state on the callback, not on a class or a module")
def runs_repeat(trials: Trials) -> Violations:
    """Check that a second run in the same process equals the first run bit for bit.

    A run must leave no state in classes or modules.
    """
    yield from _unequal(
        trials.run(), trials.run(repetition=1), "a second run in this process must equal the first"
    )
    return "a second run in this process is equal bit for bit"


@rule("correct weights in on_after_aggregate, and set statistics in on_round_end")
def between_rounds(trials: Trials) -> Violations:
    """Check that each round starts from the previous round's final server state, bit for bit."""
    for last, seen in pairwise(trials.run().rounds):
        if wrong := difference(last.server, seen.broadcast):
            yield f"the server must not change between rounds: {wrong} did before {seen}"
    return "each round starts where the last one ended"


@rule(
    'declare state "pooled" if the method combines what clients send, and "reset" if the server finds it without them',
    "attacks are tried with the median as aggregator",
)
def server_state(trials: Trials) -> Violations:
    """Check that the server's averaged and local state is the clients' weighted mean.

    The mean is ``sum p_i x_i`` with ``p_i = n_i / n``; the server optimizer is ``SGD(lr=1)``. Only
    ``on_after_aggregate`` may correct the server's state. A counter at the server must be int64 and
    equal the clients' largest counter. Pooled state must change in every round.
    """
    run, worst, corrections = trials.run(), 0.0, set()
    for seen, (name, kind) in product(run.rounds, run.kinds.items()):
        held, sent, treatment = seen.aggregated[name], seen.sent[name], seen.treatments[name]
        if treatment == "pooled" and not apart(seen.broadcast[name], seen.server[name]):
            yield f"pooled state must change in every round: {name} did not in {seen}"
        if treatment not in ("averaged", "local", "max"):
            continue
        if kind != "counter":
            worst = max(worst, apart(torch.tensordot(seen.shares, sent, 1), held))
            if not worst <= TOLERANCE:
                yield f"state must be the clients' weighted mean: {name} differs by {worst:.2g} in {seen}"
        elif apart(held, sent.amax(0)):
            yield f"a counter must be the clients' largest: {name} is {held:g} ({held.dtype}) after {seen}"
        changed = apart(seen.corrected[name], seen.server[name])
        if not changed <= TOLERANCE:
            trained = kind in ("weight", "affine")
            way = "; change cohort.pseudo_gradient in on_after_aggregate" * trained
            yield (
                f"only on_after_aggregate may correct the server: {name} differs by {changed:.2g} from the clients' "
                f"weighted mean in {seen} after the method's other hooks{way} "
                "(docs/own-method.md#a-correction-at-the-server)"
            )
        if apart(held, seen.corrected[name]):
            corrections.add(seen.number)
    corrected = f", corrected by on_after_aggregate in {len(corrections)} rounds" if corrections else ""
    return f"matches the policy (distance of means {worst:.1g}){corrected}"


@rule('declare constant state "frozen", and do not change frozen state')
def frozen_state(trials: Trials) -> Violations:
    """Check that frozen state is constant bit for bit, and that other statistics change.

    Statistics that are averaged or local must change in each round. The rule must hold for any
    server optimizer. A subclass of :class:`~fl_lightning.methods.freezing.Freezing` must freeze its
    state in round T* + 1. T* may be a setting, or be determined in training.
    """
    frozen = set()
    for run in (trials.run(), trials.run(**WITH_SERVER_MOMENTUM)):
        freezes, last = _announced(run)
        for seen, (name, kind) in product(run.rounds, run.kinds.items()):
            treatment, before, sent = seen.treatments[name], seen.broadcast[name], seen.sent[name]
            if last is not None and kind in freezes and (treatment == "frozen") != (seen.number > last):
                yield f"state must freeze right after T* = {last}: {name} is {treatment} in {seen}"
            if treatment == "frozen":
                frozen.add(seen.number)
                if apart(before, seen.server[name]):
                    yield f"frozen state must not change: {name} of the server did in {seen}"
                if apart(before.expand_as(sent), sent):
                    yield f"frozen state must not change: {name} of a client did in {seen}"
            moves = treatment in ("averaged", "local") and kind not in seen.undecided
            if kind in ("mean", "var") and moves:
                for client, still in zip(seen.clients, (seen.start[name] == sent).all(1), strict=True):
                    if still:
                        yield f"{treatment} statistics must change: {name} of client {client} did not in {seen}"
    if not frozen:
        raise NotApplicable("no state is frozen")
    return f"constant bit for bit in {len(frozen)} rounds"


@rule("log and change nothing in the rounds that same_until declares")
def first_stage(trials: Trials) -> Violations:
    """Check that the rounds of ``same_until`` equal those of a run without the method, bit for bit.

    The server's state and all metrics are compared. Runs of a study share these rounds. Studies
    ignore a declaration that a class inherits.
    """
    run, plain, method = trials.run(), trials.run(bare=True), trials.make()
    until = method.same_until(len(run.rounds)) if "same_until" in vars(type(method)) else None
    if not until:
        raise NotApplicable("the method declares no such rounds")
    for seen, other in zip(run.rounds[:until], plain.rounds, strict=False):
        if place := difference(*({"server": x.server, "metrics": x.metrics} for x in (seen, other))):
            yield f"a round of same_until must equal FedAvg: {place} differs in {seen}"
    return f"{until} rounds equal FedAvg bit for bit"


def _announced(run: ObservedRun) -> tuple[tuple[str, ...], int | None]:
    """Return the kinds of state that a method freezes, and the last round before the freeze.

    The round is None if the method determines the round during the run.
    """
    if not isinstance(run.method, Freezing):
        return (), None
    milestone = getattr(run.method, "freeze_round", None)
    return run.method.kinds, None if milestone is None else round_at(milestone, len(run.rounds))


@rule("load local state in on_round_start with cohort.recall(self.memory)")
def local_state(trials: Trials) -> Violations:
    """Check that a client starts a round with the local state from its previous round.

    In its first round, a client starts with the server's initial state.
    """
    run = trials.run()
    initial: State = {}
    last: dict[int, State] = {}
    for seen in run.rounds:
        names = [name for name in run.kinds if seen.treatments[name] == "local"]
        for client in seen.clients if names else ():
            initial = initial or seen.broadcast
            held = initial | last.get(client, {})
            if wrong := difference(held, seen.row(seen.start, client), names):
                whose = "its last" if client in last else "the server's initial"
                yield f"a client must start from {whose} local state: {wrong} of client {client} differs in {seen}"
            sent = seen.row(seen.sent, client)
            last[client] = last.get(client, {}) | {name: sent[name] for name in names}
    if not last:
        raise NotApplicable("no state is local")
    return "each client keeps its local state bit for bit"


@rule('declare state "local" if it differs between clients')
def one_broadcast(trials: Trials) -> Violations:
    """Check that all clients start a round from the same averaged, pooled and frozen state.

    A client's BN batch counter must grow by the number of its local steps. If the client's BN
    layers are frozen, the counter must not change.
    """
    run = trials.run()
    for seen, (name, kind) in product(run.rounds, run.kinds.items()):
        treatment, start = seen.treatments[name], seen.start[name]
        if treatment in ("local", "reset"):
            continue
        if apart(start[:1].expand_as(start), start):
            yield f"clients must start {seen} from one broadcast: {treatment} {name} differs between clients"
        if kind == "counter":
            grown = (seen.trained[name] - start).flatten().tolist()
            for steps, growth in zip(seen.steps, grown, strict=True):
                if growth not in (0, steps):
                    yield f"a batch counter must grow by the local steps: {name} grows by {growth}, not {steps}, in {seen}"
            if difference(seen.trained, seen.sent, [name]):
                yield f"clients must send their batch counter: {name} is changed in {seen}"
    return "all clients start from the same state"


@rule("change only rows of clients whose cohort.local_steps exceeds the step")
def done_clients(trials: Trials) -> Violations:
    """Check that a client's rows in ``cohort.extra`` do not change after its last local step."""
    for seen in trials.run().rounds:
        if seen.late:
            yield f"a client that has taken its local steps must not change: {seen.late} does in {seen}"
    return "a client's data in cohort.extra ends with its last step"


@rule(
    "change gradients, not weights; send weights, not updates", "attackers move weights at any learning rate"
)
def learning_rate_0(trials: Trials) -> Violations:
    """Check that a client learning rate of 0 changes no weights, at clients or at the server.

    A correction in ``on_after_aggregate`` may change the server's weights. The rule does not apply
    to attacks, nor to methods that draw random numbers. Noise may change weights at any learning
    rate.
    """
    run = trials.run(**RESTING)
    if difference(_outcome(run), _outcome(trials.run(**RESTING, seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so noise may move weights")
    names = run.names("weight", "affine")
    for seen in run.rounds:
        at_server = largest_difference(seen.broadcast, seen.aggregated, names)
        moves = {"the server": at_server, "a client": largest_difference(seen.start, seen.sent, names)}
        for whose, (moved, name) in moves.items():
            if moved > ROUNDING:
                yield f"weights must not move at a learning rate of 0: {name} of {whose} moves by {moved:.2g} in {seen}"
    return "no weight moves at a learning rate of 0"


@rule("pool with cohort.mean, or promise union_statistics")
def pooled_weights(trials: Trials) -> Violations:
    """Check that pooled statistics weight each client by ``n_i / n``, its share of the samples.

    If a client is replaced by two clients, each with the same data and half the weight, the
    statistics must be the same. The rule does not apply to a method that promises
    ``union_statistics`` or ``equal_passes``.
    """
    first = trials.run().rounds[0]
    pooled = [n for n in trials.run().names("mean", "var") if first.treatments[n] == "pooled"]
    if not pooled:
        raise NotApplicable("no statistics are pooled")
    for promised in {"union_statistics", "equal_passes"}.intersection(trials.make().equalities):
        raise NotApplicable(f"{promised} is promised")
    identities = (0, 1, 1)  # client 2 has the same data as client 1
    two = trials.run(identities=identities, script=((0, 1, 2),) * 4, weighting="uniform")
    one = trials.run(identities=identities[:2], script=((0, 1),) * 4)
    gap, name = largest_difference(one.rounds[0].server, two.rounds[0].server, pooled)
    if not gap <= TOLERANCE:
        yield f"pooled statistics must weigh clients by n_i / n: {name} differs by {gap:.2g} if a client is split in two"
    return f"clients weigh n_i / n (distance {gap:.1g})"


@rule("draw in each local step from cohort.generators")
def fresh_noise(trials: Trials) -> Violations:
    """Check that the noise in the gradients differs between clients, and between local steps."""
    run, other, bare = trials.run(**RESTING), trials.run(**RESTING, seed=1), trials.run(**RESTING, bare=True)
    if run.kinds != bare.kinds:
        raise NotApplicable("the method adds parameters to the model")
    drawn = 0
    for seen, again, plain in zip(run.rounds, other.rounds, bare.rounds, strict=True):
        of_others: dict[str, list[torch.Tensor]] = {}
        for (row, steps), (name, gradient) in product(enumerate(seen.steps), seen.grads[0].items()):
            if apart(gradient[row], again.grads[0][name][row]) <= ROUNDING:
                continue
            drawn += 1
            grads = [
                (seen.grads[step][name][row], plain.grads[step][name][row]) for step in range(min(steps, 2))
            ]
            first, *second = (noisy - clean for noisy, clean in grads)
            others = of_others.setdefault(name, [])
            for between, noises in {"local steps": second, "clients": others}.items():
                if first.abs().max() > ROUNDING and any(apart(first, noise) <= ROUNDING for noise in noises):
                    yield f"noise must differ between {between}: that of client {seen.clients[row]} repeats in {seen}"
            others.append(first)
    if not drawn:
        raise NotApplicable("no gradient depends on the seed")
    return "no noise in the gradients repeats at another client or in the next local step"


@rule(
    "set statistics in on_round_end, after the server's step; declare statistics that follow from the server's weights "
    '"reset"'
)
def server_optimizer(trials: Trials) -> Violations:
    """Check that the server optimizer does not affect statistics.

    Two runs differ in learning rate, momentum and weight decay of the server optimizer. After round
    1, the server must have the same statistics in both runs.
    """
    run = trials.run()
    first, second = run.rounds[0], trials.run(**WITH_SERVER_MOMENTUM).rounds[0]
    names = [name for name in run.names(*STATISTICS) if first.treatments[name] != "reset"]
    gap, name = largest_difference(first.server, second.server, names)
    if gap:
        yield f"statistics must not depend on the server optimizer: {name} differs by {gap:.2g} in round 1"
    return "statistics do not depend on the server optimizer"


@rule("swap layers by swap_batch_norm, which is undone after the run, and add layers in extend_model")
def model_comes_back(trials: Trials) -> Violations:
    """Check that a run restores the model's original modules, shapes, dtypes, flags and hooks.

    Layers that ``extend_model`` adds must stay.
    """
    model = deepcopy(trials.settings.get("model", reference_model()))
    trials.make().extend_model(model)
    after, before = _form(trials.run().model), _form(model.double())
    for place in {**before, **after}:
        now, once = after.get(place, "missing"), before.get(place, "missing")
        if now != once:
            yield f"a run must restore the model: {place} is {now}, was {once}"
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


@rule("return how many floats a client sends and receives")
def payload(trials: Trials) -> Violations:
    """Check that ``extra_payload`` and ``extra_exchanges`` return integers >= 0.

    ``extra_payload`` must count the optimizer state that clients receive.
    """
    for seen in trials.run().rounds:
        up, down = seen.payload
        for count in (up, down, seen.exchanges):
            if type(count) is not int or count < 0:
                yield f"extra_payload and extra_exchanges must return whole numbers >= 0: {count!r} in {seen}"
        if seen.received > down:
            yield f"extra_payload must count received optimizer state: {seen.received} floats, not {down}, in {seen}"
    return f"{up} floats up and {down} down beside the averaged state"


@rule("count all sent and received floats in extra_payload", "attackers know what all clients send")
def traffic(trials: Trials) -> Violations:
    """Check that ``extra_payload`` counts all traffic except weights, statistics and losses.

    - Upload: a client gets different data, but sends unchanged weights, statistics and loss. The
      server must not change.
    - Download: the rule changes a tensor of at least 8 floats in the server's memory, and parameters
      that are not trained but changed at the server. If the clients start from the same state, their
      local steps must be the same.
    - Frozen and reset state: a client starts from new values only if its round counts them.
    """
    usual, number = trials.run(), 3
    yield from _uncounted(usual)
    seen = usual.rounds[number - 1]
    up, down = seen.payload
    if (up and down) or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares {up} floats up and {down} down")
    client = seen.clients[1]
    if not up:
        other = trials.run(disturbance=Disturbance(client, number, ("data",), replayed=True))
        names = [name for name in usual.kinds if seen.treatments[name] != "local"]
        memories = [large_of_server(run.rounds[number - 1].memory) for run in (usual, other)]
        place = difference(seen.server, other.rounds[number - 1].server, names) or difference(*memories)
        if place is not None:
            yield f"data that reach the server must be declared: those of client {client} change {place} in {seen}"
    if not down:
        changed = trials.run(disturbance=Disturbance(client, number, ("memory",))).rounds[number - 1]
        place = None if difference(seen.start, changed.start) else difference(seen.trained, changed.trained)
        if place is not None:
            yield f"memory that the server sends must be declared: it changes {place} of clients that start {seen} alike"
    return "nothing undeclared crosses the network"


def _uncounted(run: ObservedRun) -> Iterator[str]:
    """Yield a client that starts a round from more new floats than the round counts as download."""
    known: dict[int, State] = {}
    for seen, client in ((one, client) for one in run.rounds for client in one.clients):
        start, last = seen.row(seen.start, client), known.get(client, run.rounds[0].broadcast)
        new = {
            name: value.numel() if seen.treatments[name] in ("averaged", "pooled") else int((value != last[name]).sum())
            for name, value in start.items()
            if value.is_floating_point() and seen.treatments[name] != "local"
        }  # fmt: skip
        if (floats := sum(new.values())) > (counted := seen.downloads[client] // 8):
            yield f"what clients receive must be counted: client {client} starts {seen} from {floats} new floats, not {counted}"
        known[client] = start


@rule("change only the memory of clients in cohort.client_ids")
def absent_clients(trials: Trials) -> Violations:
    """Check that a round does not change the memory of absent clients.

    A method may discard the memory of all clients at once.
    """
    memories = [(seen, entries(seen.memory)[1]) for seen in trials.run().rounds]
    if not any(memory for _, memory in memories) or knows_no_client(trials):
        raise NotApplicable("the method has no memory by client")
    for (_, before), (seen, after) in pairwise(memories):
        for client in (before.keys() | after.keys()) - {*seen.clients} if before and after else ():
            if place := difference(before.get(client, {}), after.get(client, {})):
                yield f"an absent client's memory must not change: {place} of client {client} did in {seen}"
    return "their memory is constant bit for bit"


@rule(
    "correct the server in on_after_aggregate, or declare extra_exchanges or needs_joint_forward",
    "attackers know the honest clients' messages",
)
def exchange_in_a_round(trials: Trials) -> Violations:
    """Check that a client's message does not depend on other clients' data in the same round.

    The rule does not apply if a method declares exchanges inside a round. The rule does not apply
    to attacks, because attackers know the honest clients' messages.
    """
    usual = trials.run()
    undeclared = [seen for seen in usual.rounds[1:] if not seen.exchanges]
    if not undeclared or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares exchanges inside a round: {usual.rounds[1].exchanges}")
    for seen in (undeclared[0], undeclared[-1]):
        yield from _reached(trials, Disturbance(seen.clients[1], seen.number, ("data",)), seen.number)
    return "a client's message depends on the broadcast, its data and its memory"


@rule("count sent optimizer state in extra_payload; keep all other state at the client")
def clients_own_state(trials: Trials) -> Violations:
    """Check that state which a client does not send affects neither the server nor other clients.

    A client does not send local, frozen and reset state. If ``extra_payload`` counts the optimizer
    state, the rule takes this state as sent.
    """
    usual, number = trials.run(), 3
    seen = usual.rounds[number - 1]
    sends_optimizer = seen.payload[0] >= max(seen.received, 1)
    what = ("local", "frozen", "reset", *([] if sends_optimizer else ["optimizer"]))
    disturbance = Disturbance(seen.clients[-1], number, what)
    other = trials.run(disturbance=disturbance)
    names = [name for name in usual.kinds if seen.treatments[name] != "local"]
    if wrong := difference(seen.server, other.rounds[number - 1].server, names):
        yield f"state that a client keeps must not reach the server: that of client {disturbance.client} changes {wrong}"
    yield from _reached(trials, disturbance, number + 1)
    return "state that a client keeps affects no other client"


@rule("name every attribute that holds state in saved")
def resume(trials: Trials) -> Violations:
    """Check that a resumed run gives the same results as an uninterrupted run, bit for bit.

    The run is resumed after each round. The results are the model, the state of the server
    optimizer, the method's memory and all metrics. The server optimizer has momentum.
    """
    uninterrupted = trials.run(**WITH_SERVER_MOMENTUM)
    for number in range(1, len(SCRIPT)):
        saved = trials.checkpoint(WITH_SERVER_MOMENTUM, number)
        try:
            torch.load(saved, weights_only=True)
        except pickle.UnpicklingError:
            yield "state_dict must hold only tensors and numbers: it holds other objects"
        resumed = trials.run(**WITH_SERVER_MOMENTUM, resume=saved)
        yield from _unequal(
            uninterrupted, resumed, f"a run resumed after round {number} must equal the uninterrupted one"
        )
    return f"equal bit for bit from each of {len(SCRIPT) - 1} rounds"


@rule("write each operation for all rows at once")
def executors(trials: Trials) -> Violations:
    """Check that sequential and vectorised execution give the same rounds, up to 1e-10.

    Vectorised execution computes two clients at once.
    """
    return (
        yield from _differing(
            trials.run(), trials.run(executor=VectorizedExecutor(2)), "executors must agree"
        )
    )


@rule("draw from cohort.generators in local steps, and obey docs/own-method.md#on-several-ranks")
def ranks(trials: Trials) -> Violations:
    """Check that a run on two ranks equals a run on one rank bit for bit.

    The server's state, the method's memory, losses and metrics are compared.
    """
    if reason := cannot_fork():
        raise NotApplicable(reason)
    usual, shared = trials.run(), trials.attempt(ranks=2)
    finished = shared.rounds[: len(shared.rounds) - (shared.error is not None)]
    for seen, other in zip(usual.rounds, finished, strict=False):
        place = difference(*({"server": x.server, "memory": x.memory, "loss": x.loss} for x in (seen, other)))
        if place is not None:
            yield f"two ranks must equal one: {place} differs after {seen}; {_ON_RANKS}"
    if shared.error is not None:
        reason = " ".join(f"{shared.error}, {', '.join(getattr(shared.error, '__notes__', []))}".split())
        known = isinstance(shared.error, ConfigurationError)
        yield f"a run must not stop on two ranks: {reason}" + ("" if known else f"; {_ON_RANKS}")
    yield from _unequal(usual, shared, "two ranks must equal one")
    return "equal bit for bit on two ranks"


@rule("draw from cohort.generators or the global generator of the hook")
def observers(trials: Trials) -> Violations:
    """Check that a callback that only reads state and draws random numbers does not change the run.

    The callback draws from the global generators and from the method's generators.
    """
    watched = trials.run(observed=True)
    yield from _unequal(trials.run(), watched, "callbacks that watch and draw must not change the run")
    return "callbacks that watch and draw random numbers do not change the run"


@rule("identify a client by cohort.client_ids, not by its row", "attackers are chosen by client number")
def client_numbers(trials: Trials) -> Violations:
    """Check that renumbering clients changes neither the server nor a client's memory.

    The rule does not apply to attacks, because attackers are chosen by number.
    """
    usual = trials.run()
    if difference(_outcome(usual), _outcome(trials.run(seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so its draws may depend on client numbers")
    demand = "renumbered clients must give the same run"
    gap = yield from _differing(usual, relabelled(trials), demand, renamed_memory_apart)
    return f"renumbering changes only numbers ({gap})"


def beside_fedavg(trials: Trials) -> str:
    """Compare the method's default run with FedAvg, and return the result as text.

    If the runs differ, the text gives the distance that clients move in round 1, divided by the
    distance in FedAvg.
    """
    run, plain = trials.run(), trials.run(bare=True)
    first, second = ([(x.treatments, x.start, x.sent, x.server) for x in one.rounds] for one in (run, plain))
    if difference(first, second) is None:
        return "training equals FedAvg bit for bit: the method changes no state"
    squares = [
        sum(
            float((one.rounds[0].sent[name] - one.rounds[0].start[name]).square().sum())
            for name in one.names("weight", "affine")
        )
        for one in (run, plain)
    ]
    return f"clients move {(squares[0] / squares[1]) ** 0.5:.4g} times as far from the server in round 1"


def _reached(trials: Trials, disturbance: Disturbance, number: int) -> Iterator[str]:
    """Yield what a disturbance of one client changes at the other clients in a given round."""
    first, second = (run.rounds[number - 1] for run in (trials.run(), trials.run(disturbance=disturbance)))
    kind = " or ".join(disturbance.what) + (" state" if disturbance.what != ("data",) else "")
    for client in (client for client in first.clients if client != disturbance.client):
        for verb, rows, others in (
            ("starts from", first.start, second.start),
            ("sends", first.sent, second.sent),
        ):
            if wrong := difference(first.row(rows, client), second.row(others, client)):
                yield (
                    f"a client's {kind} must not affect other clients: that of client {disturbance.client} in round "
                    f"{disturbance.round} changes {wrong}, which client {client} {verb} in {first}"
                )


def _differing(
    first: ObservedRun, second: ObservedRun, demand: str, compare_memory: Any = memory_apart
) -> Violations:
    worst = 0.0
    for one, two in zip(first.rounds, second.rounds, strict=True):
        gaps = {
            "the server": largest_difference(one.server, two.server),
            "the method's memory": compare_memory(one, two),
        }
        for whose, (gap, place) in gaps.items():
            if not gap <= TOLERANCE:
                yield f"{demand}: {place} of {whose} differs by {gap:.2g} after {one}"
            worst = max(worst, gap)
    return f"distance {worst:.1g}"


def _outcome(run: ObservedRun) -> dict[str, object]:
    last = run.rounds[-1]
    return {
        "model": last.server,
        "server optimizer": run.trainer.optimizers[0].state_dict(),
        "state_dict": last.memory,
        "metrics": last.metrics,
    }


def _unequal(first: ObservedRun, second: ObservedRun, demand: str) -> Iterator[str]:
    if place := difference(_outcome(first), _outcome(second)):
        gap, name = largest_difference(first.rounds[-1].server, second.rounds[-1].server)
        yield f"{demand}: " + (f"model {name} differs by {gap:.2g}" if gap else f"{place} differs")
