"""Rules that compare runs: changes without effect, and the reach of a change at a client or the server."""

import pickle
from typing import Any

import torch

from fl_lightning.batch_norm.kinds import STATISTICS
from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import cannot_fork
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.testing.federation import Disturbance
from fl_lightning.verification.comparison import TOLERANCE, NotApplicable, Violated, difference, distance
from fl_lightning.verification.memory import memory_apart, relabelled, renamed_memory_apart
from fl_lightning.verification.observation import Run
from fl_lightning.verification.trials import SCRIPT, WITH_SERVER_MOMENTUM, Trials

_ON_RANKS = (
    "local steps may change only rows of their rank and keep data in cohort.extra, other hooks must do the same on "
    "every rank"
)


def runs_repeat(trials: Trials) -> str:
    """Check that two runs in one process are equal bit for bit: no state is left in classes or modules."""
    _equal(trials.run(), trials.run(repetition=1), "a second run in this process must equal the first")
    return "a second run in this process is equal bit for bit"


def resume(trials: Trials) -> str:
    """Check that a run resumed from any round ends in the same model, optimizer, memory and metrics.

    The comparison is bit for bit, with a server optimizer that has momentum.
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
    """Check that sequential and vectorised execution (in blocks of two clients) give the same rounds."""
    return _close(trials.run(), trials.run(executor=VectorizedExecutor(2)), "executors must agree")


def ranks(trials: Trials) -> str:
    """Check that two processes give, bit for bit, the server state, memory, losses and metrics of one."""
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
    """Check that callbacks which watch, and draw from every reachable random generator, change no result."""
    _equal(trials.run(), trials.run(observed=True), "callbacks that watch and draw must not change the run")
    return "callbacks that watch and draw random numbers do not change the run"


def client_numbers(trials: Trials) -> str:
    """Check that renumbering the clients changes neither the server's rounds nor each client's memory.

    Attacks are skipped, since attackers are chosen by number.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attackers are chosen by client number")
    usual = trials.run()
    if difference(_outcome(usual), _outcome(trials.run(seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so its draws may depend on client numbers")
    demand = "renumbered clients must give the same run"
    return f"renumbering changes only numbers ({_close(usual, relabelled(trials), demand, renamed_memory_apart)})"


def server_optimizer(trials: Trials) -> str:
    """Check that learning rate, momentum and decay of the server optimizer do not affect statistics.

    Clients do the same in round 1 under any server optimizer, so they end it with equal statistics.
    """
    run = trials.run()
    first, second = run.rounds[0], trials.run(WITH_SERVER_MOMENTUM).rounds[0]
    kinds = [kind for kind in STATISTICS if first.policy[kind] != "reset"]
    apart, name = distance(first.server, second.server, [n for n, kind in run.kinds.items() if kind in kinds])
    if apart:
        demand = "statistics must not depend on the server optimizer"
        raise Violated(f"{demand}: {name} differs by {apart:.2g} in round 1")
    return "statistics do not depend on the server optimizer"


def exchange_in_a_round(trials: Trials) -> str:
    """Check that a client's message depends on no other client's data of the round, unless declared.

    Attacks are skipped, since attackers know the honest clients' messages.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attackers know the honest clients' messages")
    usual = trials.run()
    apart = [number for number, seen in enumerate(usual.rounds, 1) if number > 1 and not seen.exchanges]
    if not apart or trials.make().needs_joint_forward:
        raise NotApplicable(f"the method declares exchanges inside a round: {usual.rounds[1].exchanges}")
    for number in (apart[0], apart[-1]):
        _reaches_no_other(trials, Disturbance(usual.rounds[number - 1].clients[1], number, ("data",)), number)
    return "a client's message depends on the broadcast, its data and its memory"


def clients_own_state(trials: Trials) -> str:
    """Check that local, frozen, reset and unsent optimizer state of a client affects no other client."""
    usual, number = trials.run(), 3
    seen = usual.rounds[number - 1]
    sends_optimizer = seen.payload[0] >= max(seen.received, 1)
    what = ("local", "frozen", "reset", *([] if sends_optimizer else ["optimizer"]))
    disturbance = Disturbance(seen.clients[-1], number, what)
    other = trials.run(disturbance=disturbance)
    names = [name for name, kind in usual.kinds.items() if seen.policy[kind] != "local"]
    wrong = difference(seen.server, other.rounds[number - 1].server, names)
    if wrong:
        raise Violated(
            f"state that a client keeps must not reach the server: that of client {disturbance.client} in round {number} "
            f"changes {wrong}"
        )
    _reaches_no_other(trials, disturbance, number + 1)
    return "state that a client keeps affects no other client"


def _reaches_no_other(trials: Trials, disturbance: Disturbance, number: int) -> None:
    """Raise Violated if a disturbance changes what another client starts from or sends in a round."""
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
        for whose, (apart, place) in (
            ("the server", distance(one.server, two.server)),
            ("the method's memory", compare_memory(one, two)),
        ):
            if not apart <= TOLERANCE:
                raise Violated(f"{demand}: {place} of {whose} differs by {apart:.2g} after round {number}")
            worst = max(worst, apart)
    return f"distance {worst:.1g}"


def _outcome(run: Run) -> dict[str, object]:
    """Return the outcome of a run: final model, server optimizer, memory and all metrics."""
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
        apart, name = distance(first.rounds[-1].server, second.rounds[-1].server)
        size = f"model {name} differs by {apart:.2g}" if apart else f"{place} differs"
        raise Violated(f"{demand}: {size}")
