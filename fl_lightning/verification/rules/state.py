"""Rules for the server's state and for each kind of state: averaged, frozen, local."""

from itertools import pairwise, product

import torch

from fl_lightning.methods.freezing import Freezing
from fl_lightning.optimizers.milestones import round_at
from fl_lightning.verification.differences import (
    TOLERANCE,
    NotApplicable,
    apart,
    difference,
    largest_difference,
)
from fl_lightning.verification.observation import ObservedRun, State
from fl_lightning.verification.rules.compare_runs import unequal_runs
from fl_lightning.verification.rules.registry import Violations, rule
from fl_lightning.verification.trials import WITH_SERVER_MOMENTUM, Trials


@rule("limit the size of a step, and keep running variances >= 0")
def trains(trials: Trials) -> Violations:
    """Check that state stays finite and that training changes the weights.

    No loss may be NaN, and running variances must be >= 0. Attackers may send any values. For
    attacks, the aggregator is the median.
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
    yield from unequal_runs(
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
    'declare state "pooled" if the method combines the clients\' state, and "discarded" if the server computes it alone',
    "attacks are tried with the median as aggregator",
)
def server_state(trials: Trials) -> Violations:
    """Check that the server's averaged and local state is the clients' weighted mean.

    The mean is ``sum p_i x_i`` with ``p_i = n_i / n``. The server optimizer is ``SGD(lr=1)``.

    - Only ``on_after_aggregate`` may correct the server's state.
    - A counter at the server must be int64, and equal the clients' largest counter.
    - Pooled state must change in every round.
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
                "(docs/method-server.md#a-correction-at-the-server)"
            )
        if apart(held, seen.corrected[name]):
            corrections.add(seen.number)
    corrected = f", corrected by on_after_aggregate in {len(corrections)} rounds" if corrections else ""
    return f"matches the policy (distance of means {worst:.1g}){corrected}"


@rule('declare constant state "frozen", and do not change frozen state')
def frozen_state(trials: Trials) -> Violations:
    """Check that frozen state is constant bit for bit, and that other statistics change.

    Averaged and local statistics must change in each round. The rule must hold for any server
    optimizer. A subclass of :class:`~fl_lightning.methods.freezing.Freezing` must freeze its state
    in round T* + 1.
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
    """Check that the first rounds of a run equal a run without the method, bit for bit.

    ``same_until`` returns the number of these rounds, which runs of a study share. The server's
    state and all metrics are compared. A ``same_until`` that the class inherits is ignored.
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


@rule(
    "call cohort.recall(self.memory) in on_round_start and cohort.remember(self.memory) in on_before_aggregate; a subclass of "
    "LocalState that defines these hooks calls super()"
)
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

    The batch counter of a client's BN layer must grow by the client's number of local steps. If the
    layer is frozen, the counter must not change.
    """
    run = trials.run()
    for seen, (name, kind) in product(run.rounds, run.kinds.items()):
        treatment, start = seen.treatments[name], seen.start[name]
        if treatment in ("local", "discarded"):
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
