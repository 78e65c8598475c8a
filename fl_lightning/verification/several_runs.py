"""Rules that compare two runs of a method. The runs differ in one respect, such as the executor."""

import pickle
from typing import Any

import torch

from fl_lightning.batch_norm.kinds import STATISTICS
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import cannot_fork
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.testing.federation import Disturbance
from fl_lightning.verification.comparison import (
    TOLERANCE,
    NotApplicable,
    Violated,
    apart,
    difference,
    distance,
)  # fmt: skip
from fl_lightning.verification.memory import large_of_server
from fl_lightning.verification.observation import Run
from fl_lightning.verification.renumbering import memory_apart, relabelled, renamed_memory_apart
from fl_lightning.verification.trials import SCRIPT, USUAL, WITH_SERVER_MOMENTUM, Trials, rests_from

RESTING = USUAL.but(client_lr_schedule=rests_from(1))
"""Set-up in which the client learning rate is 0 in all rounds."""

ROUNDING = 1e-12
"""Largest difference of weights or gradients that is attributed to rounding, in float64."""

_ON_RANKS = (
    "local steps may change only rows of their rank and keep data in cohort.extra, other hooks must do the same on "
    "every rank"
)


def runs_repeat(trials: Trials) -> str:
    """Check that a second run in the same process equals the first run bit for bit.

    A run must leave no state in classes or modules.
    """
    _equal(trials.run(), trials.run(repetition=1), "a second run in this process must equal the first")
    return "a second run in this process is equal bit for bit"


def resume(trials: Trials) -> str:
    """Check that a resumed run gives the same results as an uninterrupted run, bit for bit.

    The run is resumed after each round. The results are the model, the state of the server
    optimizer, the method's memory and all metrics. The server optimizer has momentum.
    """
    uninterrupted = trials.run(WITH_SERVER_MOMENTUM)
    for number in range(1, len(SCRIPT)):
        try:
            torch.load(trials.checkpoint(WITH_SERVER_MOMENTUM, number), weights_only=True)
        except pickle.UnpicklingError as error:
            raise Violated("state_dict must hold only tensors and numbers: it holds other objects") from error
        resumed = trials.run(WITH_SERVER_MOMENTUM, resume=number)
        _equal(uninterrupted, resumed, f"a run resumed after round {number} must equal the uninterrupted one")
    return f"equal bit for bit from each of {len(SCRIPT) - 1} rounds"


def executors(trials: Trials) -> str:
    """Check that sequential and vectorised execution give the same rounds, up to 1e-10.

    Vectorised execution computes two clients at once.
    """
    return _close(trials.run(), trials.run(executor=VectorizedExecutor(2)), "executors must agree")


def ranks(trials: Trials) -> str:
    """Check that a run on two ranks equals a run on one rank bit for bit.

    The server's state, the method's memory, losses and metrics are compared.
    """
    if reason := cannot_fork():
        raise NotApplicable(reason)
    usual, shared = trials.run(), trials.attempt(ranks=2)
    finished = shared.rounds[: len(shared.rounds) - (shared.error is not None)]
    for number, (one, two) in enumerate(zip(usual.rounds, finished, strict=False), 1):
        place = difference(*({"server": x.server, "memory": x.memory, "loss": x.loss} for x in (one, two)))
        if place is not None:
            raise Violated(f"two ranks must equal one: {place} differs after round {number}; {_ON_RANKS}")
    if shared.error is not None:
        reason = " ".join(f"{shared.error}, {', '.join(getattr(shared.error, '__notes__', []))}".split())
        known = isinstance(shared.error, ConfigurationError)
        raise Violated(f"a run must not stop on two ranks: {reason}" + ("" if known else f"; {_ON_RANKS}"))
    _equal(usual, shared, "two ranks must equal one")
    return "equal bit for bit on two ranks"


def observers(trials: Trials) -> str:
    """Check that a callback that only reads state and draws random numbers does not change the run.

    The callback draws from the global generators and from the method's generators.
    """
    _equal(trials.run(), trials.run(observed=True), "callbacks that watch and draw must not change the run")
    return "callbacks that watch and draw random numbers do not change the run"


def client_numbers(trials: Trials) -> str:
    """Check that renumbering clients changes neither the server nor a client's memory.

    The rule does not apply to attacks, because attackers are chosen by number.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attackers are chosen by client number")
    usual = trials.run()
    if difference(_outcome(usual), _outcome(trials.run(seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so its draws may depend on client numbers")
    demand = "renumbered clients must give the same run"
    return f"renumbering changes only numbers ({_close(usual, relabelled(trials), demand, renamed_memory_apart)})"


def server_optimizer(trials: Trials) -> str:
    """Check that the server optimizer does not affect statistics.

    Two runs differ in learning rate, momentum and weight decay of the server optimizer. After round
    1, the server must have the same statistics in both runs.
    """
    run = trials.run()
    first, second = run.rounds[0], trials.run(WITH_SERVER_MOMENTUM).rounds[0]
    names = [n for n, kind in run.kinds.items() if kind in STATISTICS and first.treatments[n] != "reset"]
    gap, name = distance(first.server, second.server, names)
    if gap:
        demand = "statistics must not depend on the server optimizer"
        raise Violated(f"{demand}: {name} differs by {gap:.2g} in round 1")
    return "statistics do not depend on the server optimizer"


def learning_rate_0(trials: Trials) -> str:
    """Check that a client learning rate of 0 changes no weights, at clients or at the server.

    A correction in ``on_after_aggregate`` may change the server's weights. The rule does not apply
    to attacks, nor to methods that draw random numbers. Noise may change weights at any learning
    rate.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attackers move weights at any learning rate")
    run = trials.run(RESTING)
    if difference(_outcome(run), _outcome(trials.run(RESTING, seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so noise may move weights")
    names = [name for name, kind in run.kinds.items() if kind in ("weight", "affine")]
    for number, seen in enumerate(run.rounds, 1):
        moves = [distance(seen.broadcast, seen.aggregated, names)]
        moves += [distance(seen.row(seen.start, x), seen.row(seen.sent, x), names) for x in seen.clients]
        for whose, (moved, name) in zip(
            ("the server", *map("client {}".format, seen.clients)), moves, strict=True
        ):
            if moved > ROUNDING:
                raise Violated(
                    f"weights must not move at a learning rate of 0: {name} of {whose} moves by {moved:.2g} in round "
                    f"{number}"
                )
    return "no weight moves at a learning rate of 0"


def pooled_weights(trials: Trials) -> str:
    """Check that pooled statistics weight each client by ``n_i / n``, its share of the samples.

    If a client is replaced by two clients, each with the same data and half the weight, the
    statistics must be the same. The rule does not apply to a method that claims
    ``union_statistics``.
    """
    first = trials.run().rounds[0]
    pooled = [
        n for n, k in trials.run().kinds.items() if k in ("mean", "var") and first.treatments[n] == "pooled"
    ]
    if not pooled or "union_statistics" in trials.make().claims:
        raise NotApplicable("no statistics are pooled" if not pooled else "union_statistics is claimed")
    identities = (0, 1, 1)  # client 2 has the same data as client 1
    two = trials.run(identities=identities, script=((0, 1, 2),) * 4, weighting="uniform")
    one = trials.run(identities=identities[:2], script=((0, 1),) * 4)
    gap, name = distance(one.rounds[0].server, two.rounds[0].server, pooled)
    if not gap <= TOLERANCE:
        raise Violated(
            f"pooled statistics must weigh clients by n_i / n: {name} differs by {gap:.2g} if a client is split in two "
            "of half its weight"
        )
    return f"clients weigh n_i / n (distance {gap:.1g})"


def traffic(trials: Trials) -> str:
    """Check that ``extra_payload`` counts all traffic except weights, statistics and losses.

    - Upload: a client gets different data, but sends unchanged weights, statistics and loss. The
      server must not change.
    - Download: a tensor of at least 8 floats in the server's memory is changed. Local steps that
      start from the same state must not change.
    """
    usual, number = trials.run(), 3
    seen = usual.rounds[number - 1]
    up, down = seen.payload
    if trials.make().role == "attack" or (up and down) or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares {up} floats up and {down} down")
    client = seen.clients[1]
    if not up:
        other = trials.run(disturbance=Disturbance(client, number, ("data",)), forced=True)
        names = [name for name in usual.kinds if seen.treatments[name] != "local"]
        memories = [large_of_server(run.rounds[number - 1].memory) for run in (usual, other)]
        place = difference(seen.server, other.rounds[number - 1].server, names) or difference(*memories)
        if place is not None:
            raise Violated(
                f"data that reach the server must be declared: those of client {client} change {place} in round "
                f"{number}, although it sends the same weights, statistics and loss"
            )
    if not down:
        changed = trials.run(memory_of_server=number).rounds[number - 1]
        place = None if difference(seen.start, changed.start) else difference(seen.trained, changed.trained)
        if place is not None:
            raise Violated(
                f"memory that the server sends must be declared: it changes {place} of clients that start from the "
                f"same state in round {number}"
            )
    return "nothing undeclared crosses the network"


def fresh_noise(trials: Trials) -> str:
    """Check that the noise in the gradients differs between clients, and between local steps."""
    run, other, bare = trials.run(RESTING), trials.run(RESTING, seed=1), trials.run(RESTING, bare=True)
    if run.kinds != bare.kinds:
        raise NotApplicable("the method adds parameters to the model")
    drawn = 0
    for number, (seen, again, plain) in enumerate(zip(run.rounds, other.rounds, bare.rounds, strict=True), 1):
        of_others: dict[str, list[torch.Tensor]] = {}
        for row, steps in enumerate(seen.steps):
            for name, gradient in seen.grads[0].items():
                if apart(gradient[row], again.grads[0][name][row]) <= ROUNDING:
                    continue
                drawn += 1
                first, *second = (
                    seen.grads[step][name][row] - plain.grads[step][name][row]
                    for step in range(min(steps, 2))
                )
                is_noise = float(first.abs().max()) > ROUNDING
                if is_noise and any(apart(first, noise) <= ROUNDING for noise in second):
                    raise Violated(
                        f"noise must differ between local steps: client {seen.clients[row]} gets the same in steps 1 and "
                        f"2 of round {number}"
                    )
                others = of_others.setdefault(name, [])
                if is_noise and any(apart(first, noise) <= ROUNDING for noise in others):
                    raise Violated(
                        f"noise must differ between clients: client {seen.clients[row]} gets that of another in round {number}"
                    )
                others.append(first)
    if not drawn:
        raise NotApplicable("no gradient depends on the seed")
    return "no noise in the gradients repeats at another client or in the next local step"


def exchange_in_a_round(trials: Trials) -> str:
    """Check that a client's message does not depend on other clients' data in the same round.

    The rule does not apply if a method declares exchanges inside a round. The rule does not apply
    to attacks, because attackers know the honest clients' messages.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attackers know the honest clients' messages")
    usual = trials.run()
    undeclared = [number for number, seen in enumerate(usual.rounds, 1) if number > 1 and not seen.exchanges]
    if not undeclared or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares exchanges inside a round: {usual.rounds[1].exchanges}")
    for number in (undeclared[0], undeclared[-1]):
        _reaches_no_other(trials, Disturbance(usual.rounds[number - 1].clients[1], number, ("data",)), number)
    return "a client's message depends on the broadcast, its data and its memory"


def clients_own_state(trials: Trials) -> str:
    """Check that state which a client does not send affects neither the server nor other clients.

    A client does not send local, frozen and reset state. A client sends optimizer state only if
    ``extra_payload`` counts this state.
    """
    usual, number = trials.run(), 3
    seen = usual.rounds[number - 1]
    sends_optimizer = seen.payload[0] >= max(seen.received, 1)
    what = ("local", "frozen", "reset", *([] if sends_optimizer else ["optimizer"]))
    disturbance = Disturbance(seen.clients[-1], number, what)
    other = trials.run(disturbance=disturbance)
    names = [name for name in usual.kinds if seen.treatments[name] != "local"]
    wrong = difference(seen.server, other.rounds[number - 1].server, names)
    if wrong:
        raise Violated(
            f"state that a client keeps must not reach the server: that of client {disturbance.client} in round {number} "
            f"changes {wrong}"
        )
    _reaches_no_other(trials, disturbance, number + 1)
    return "state that a client keeps affects no other client"


def beside_fedavg(trials: Trials) -> str:
    """Compare the method's default run with FedAvg, and return the result as text.

    If the runs differ, the text gives the distance that clients move in round 1, divided by the
    distance in FedAvg.
    """
    run, plain = trials.run(), trials.run(bare=True)
    first, second = ([(x.policy, x.start, x.sent, x.server) for x in one.rounds] for one in (run, plain))
    if difference(first, second) is None:
        return "training equals FedAvg bit for bit: the method changes no state"
    squares = [
        sum(
            float((one.rounds[0].sent[name] - one.rounds[0].start[name]).square().sum())
            for name, kind in one.kinds.items()
            if kind in ("weight", "affine")
        )
        for one in (run, plain)
    ]
    return f"clients move {(squares[0] / squares[1]) ** 0.5:.4g} times as far from the server in round 1"


def _reaches_no_other(trials: Trials, disturbance: Disturbance, number: int) -> None:
    """Check that a disturbance of one client does not affect the other clients in a given round."""
    first, second = (run.rounds[number - 1] for run in (trials.run(), trials.run(disturbance=disturbance)))
    kind = " or ".join(disturbance.what) + (" state" if disturbance.what != ("data",) else "")
    for client in (client for client in first.clients if client != disturbance.client):
        for verb, rows, others in (
            ("starts from", first.start, second.start),
            ("sends", first.sent, second.sent),
        ):
            wrong = difference(first.row(rows, client), second.row(others, client))
            if wrong:
                raise Violated(
                    f"a client's {kind} must not affect other clients: that of client {disturbance.client} in round "
                    f"{disturbance.round} changes {wrong}, which client {client} {verb} in round {number}"
                )


def _close(first: Run, second: Run, demand: str, compare_memory: Any = memory_apart) -> str:
    worst = 0.0
    for number, (one, two) in enumerate(zip(first.rounds, second.rounds, strict=True), 1):
        for whose, (gap, place) in (
            ("the server", distance(one.server, two.server)),
            ("the method's memory", compare_memory(one, two)),
        ):
            if not gap <= TOLERANCE:
                raise Violated(f"{demand}: {place} of {whose} differs by {gap:.2g} after round {number}")
            worst = max(worst, gap)
    return f"distance {worst:.1g}"


def _outcome(run: Run) -> dict[str, object]:
    last = run.rounds[-1]
    return {
        "model": last.server,
        "server optimizer": run.trainer.optimizers[0].state_dict(),
        "state_dict": last.memory,
        "metrics": {name: value for name, value in run.metrics.items() if not name.startswith("time/")},
    }


def _equal(first: Run, second: Run, demand: str) -> None:
    place = difference(_outcome(first), _outcome(second))
    if place is not None:
        gap, name = distance(first.rounds[-1].server, second.rounds[-1].server)
        size = f"model {name} differs by {gap:.2g}" if gap else f"{place} differs"
        raise Violated(f"{demand}: {size}")
