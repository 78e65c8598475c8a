"""Rules that compare runs: what changes nothing, and who is reached by what is changed at one client or at the server."""

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
    difference,
    distance,
)
from fl_lightning.verification.memory import memory_apart, relabelled, renamed_memory_apart
from fl_lightning.verification.observation import Run
from fl_lightning.verification.trials import SCRIPT, WITH_SERVER_MOMENTUM, Trials

_ON_RANKS = (
    "local steps change only the rows of their rank and keep what they need in cohort.extra, all other hooks do the "
    "same on every rank"
)


def runs_repeat(trials: Trials) -> str:
    """Two runs in one process are equal bit for bit: nothing is left behind in classes or modules."""
    _equal(trials.run(), trials.run(repetition=1), "a second run")
    return "a second run in this process is equal bit for bit"


def resume(trials: Trials) -> str:
    """A run resumed from any round's checkpoint ends, bit for bit, in the same model, optimizer, memory and metrics.

    With a server optimizer that has momentum.
    """
    whole = trials.run(WITH_SERVER_MOMENTUM)
    for number in range(1, len(SCRIPT)):
        try:
            torch.load(trials.checkpoint(WITH_SERVER_MOMENTUM, number), weights_only=True)
        except pickle.UnpicklingError as error:
            raise Violated("state_dict holds more than tensors and plain numbers") from error
        _equal(whole, trials.run(WITH_SERVER_MOMENTUM, resume=number), f"resumed after round {number}: it")
    return f"bit-exact from each of {len(SCRIPT) - 1} rounds"


def executors(trials: Trials) -> str:
    """Clients one after the other and in vectorised blocks of two give the same rounds."""
    return _close(trials.run(), trials.run(executor=VectorizedExecutor(2)))


def ranks(trials: Trials) -> str:
    """Two processes that share the clients end every round, bit for bit, as one does: server, memory, losses, metrics."""
    if reason := cannot_fork():
        raise NotApplicable(reason)
    usual, shared = trials.run(), trials.attempt(ranks=2)
    finished = shared.rounds[: len(shared.rounds) - (shared.error is not None)]
    for number, (one, two) in enumerate(zip(usual.rounds, finished, strict=False), 1):
        place = difference(*({"server": x.server, "memory": x.memory, "loss": x.loss} for x in (one, two)))
        if place is not None:
            raise Violated(f"{place} is another one after round {number} on two ranks; {_ON_RANKS}")
    if shared.error is not None:
        said = " ".join(f"{shared.error}, {', '.join(getattr(shared.error, '__notes__', []))}".split())
        known = isinstance(shared.error, ConfigurationError)
        raise Violated(f"stops on two ranks: {said}" + ("" if known else f"; {_ON_RANKS}"))
    _equal(usual, shared, "on two ranks it")
    return "bit-exact on two ranks"


def observers(trials: Trials) -> str:
    """Callbacks before and after the method that watch, and draw from any random generator in reach, change nothing."""
    _equal(trials.run(), trials.run(observed=True), "with callbacks around it that watch and draw numbers it")
    return "callbacks that watch and draw random numbers change nothing"


def client_numbers(trials: Trials) -> str:
    """With the clients numbered differently, and the same data each, the server's rounds and each client's memory are equal.

    Attacks are left out: who attacks goes by number.
    """
    if trials.make().role == "attack":
        raise NotApplicable("who attacks goes by number")
    usual = trials.run()
    if difference(_outcome(usual), _outcome(trials.run(seed=1))) is not None:
        raise NotApplicable("what it does depends on the seed, so its draws may depend on client numbers")
    return f"permutes nothing but numbers ({_close(usual, relabelled(trials), renamed_memory_apart)})"


def server_optimizer(trials: Trials) -> str:
    """Learning rate, momentum and decay of the server optimizer do not reach statistics.

    Clients do the same in round 1 under any server optimizer, so statistics after it are equal bit for bit.
    """
    run = trials.run()
    one, two = run.rounds[0], trials.run(WITH_SERVER_MOMENTUM).rounds[0]
    kinds = [kind for kind in STATISTICS if one.policy[kind] != "reset"]
    apart, name = distance(one.server, two.server, [n for n, kind in run.kinds.items() if kind in kinds])
    if apart:
        raise Violated(f"{name} depends on the server optimizer, by {apart:.2g} in round 1")
    return "statistics do not depend on it"


def exchange_in_a_round(trials: Trials) -> str:
    """Within a round, what a client sends does not depend on another client's data, unless exchanges are declared.

    Attacks are left out: attackers know what the honest clients send.
    """
    if trials.make().role == "attack":
        raise NotApplicable("attackers know what the honest clients send")
    usual = trials.run()
    apart = [number for number, seen in enumerate(usual.rounds, 1) if number > 1 and not seen.exchanges]
    if not apart or trials.make().needs_joint_forward:
        raise NotApplicable(f"it declares exchanges inside a round: {usual.rounds[1].exchanges}")
    for number in (apart[0], apart[-1]):
        _reaches_nobody(trials, Disturbance(usual.rounds[number - 1].clients[1], number, ("data",)), number)
    return "what a client sends depends on the broadcast, its own data and memory"


def clients_own_state(trials: Trials) -> str:
    """What clients keep (local, frozen, reset state, optimizer state that is not sent) reaches nobody else."""
    usual, number = trials.run(), 3
    seen = usual.rounds[number - 1]
    sends_optimizer = seen.payload[0] >= max(seen.told, 1)
    what = ("local", "frozen", "reset", *([] if sends_optimizer else ["optimizer"]))
    disturbance = Disturbance(seen.clients[-1], number, what)
    other = trials.run(disturbance=disturbance)
    names = [name for name, kind in usual.kinds.items() if seen.policy[kind] != "local"]
    wrong = difference(seen.server, other.rounds[number - 1].server, names)
    if wrong:
        raise Violated(
            f"state that client {disturbance.client} keeps for itself in round {number} reaches the server: {wrong}"
        )
    _reaches_nobody(trials, disturbance, number + 1)
    return "a client's own state reaches nobody else"


def _reaches_nobody(trials: Trials, disturbance: Disturbance, number: int) -> None:
    """Demand that the other clients of a round start from and send the same, bit for bit, whatever one is disturbed in."""
    one, two = (run.rounds[number - 1] for run in (trials.run(), trials.run(disturbance=disturbance)))
    for client in (client for client in one.clients if client != disturbance.client):
        for verb, rows, others in (
            ("starts from", one.start, two.start),
            ("sends", one.sent, two.sent),
        ):
            wrong = difference(one.row(rows, client), two.row(others, client))
            if wrong:
                raise Violated(
                    f"other {' or '.join(disturbance.what)} state of client {disturbance.client} in round {disturbance.round} "
                    f"changes what client {client} {verb} in round {number}: {wrong}"
                )


def _close(first: Run, second: Run, compare_memory: Any = memory_apart) -> str:
    worst = 0.0
    for number, (one, two) in enumerate(zip(first.rounds, second.rounds, strict=True), 1):
        for whose, (apart, place) in (
            ("the server's", distance(one.server, two.server)),
            ("the method's", compare_memory(one, two)),
        ):
            if not apart <= TOLERANCE:
                raise Violated(f"{whose} {place} is {apart:.2g} apart after round {number}")
            worst = max(worst, apart)
    return f"distance {worst:.1g}"


def _outcome(run: Run) -> dict[str, object]:
    """What must be equal bit for bit: the server after the last round, its optimizer, what the method keeps, all metrics."""
    last = run.rounds[-1]
    return {
        "model": last.server,
        "server optimizer": run.trainer.optimizers[0].state_dict(),
        "state_dict": last.memory,
        "metrics": {name: value for name, value in run.metrics.items() if not name.startswith("time/")},
    }


def _equal(first: Run, second: Run, what: str) -> None:
    place = difference(_outcome(first), _outcome(second))
    if place is not None:
        apart, name = distance(first.rounds[-1].server, second.rounds[-1].server)
        model = f"model {name} by {apart:.2g}" if apart else place
        raise Violated(f"{what} ends differently: {model}")
