"""Equal runs end equally: resumed, under another executor, watched, with noise, with the clients renumbered."""

import pickle
from typing import Any

import torch

from fl_lightning.verification.companions import own_generators
from fl_lightning.verification.comparison import (
    TOLERANCE,
    NotApplicable,
    Violated,
    distance,
    first_difference,
)
from fl_lightning.verification.memory import RELABELLED, by_client, entries_apart, memory_apart, relabelled
from fl_lightning.verification.setups import SCRIPT
from fl_lightning.verification.trials import Run, Trials


def repeats(trials: Trials) -> str:
    """Two runs in one process are equal bit for bit: nothing is left behind in classes or modules."""
    _equal(trials.run(), trials.run(repetition=1), "a second run")
    return "a second run in this process is equal bit for bit"


def resumes(trials: Trials) -> str:
    """A run resumed from any round's checkpoint, under either executor, ends in the same model, optimizer, memory and metrics.

    Bit for bit; a server optimizer with momentum is resumed, too.
    """
    changes: dict[str, Any]
    for changes, numbers in (
        ({}, range(1, len(SCRIPT))),
        ({"executor": "vectorised"}, range(2, 3)),
        ({"server_momentum": 0.9}, range(2, 3)),
    ):
        whole = trials.run(**changes)
        for number in numbers:
            try:
                torch.load(whole.checkpoint(number), weights_only=True)
            except pickle.UnpicklingError as error:
                wanted = next((line for line in str(error).splitlines() if "GLOBAL" in line), "an object")
                raise Violated(
                    f"state_dict holds more than tensors and plain numbers: {wanted.strip()}"
                ) from error
            _equal(whole, trials.run(**changes, resume=number), f"resumed after round {number}: it")
    return f"bit-exact from each of {len(SCRIPT) - 1} rounds"


def executors(trials: Trials) -> str:
    """Clients one after the other and all at once give the same rounds."""
    return _close(trials.run(), trials.run(executor="vectorised"))


def blocks(trials: Trials) -> str:
    """Blocks of two clients give the same rounds as all at once."""
    return _close(trials.run(executor="vectorised"), trials.run(executor="blocks"))


def random_numbers(trials: Trials) -> str:
    """Other draws between the hooks, from any generator in reach, change nothing: randomness does not depend on call order."""
    usual, noisy = trials.run(), trials.run(beside="noise")
    try:
        _equal(usual, noisy, "with other random draws between the hooks it")
    except Violated as violated:
        assert usual.method is not None
        own = "".join(
            f"; it keeps a generator of its own: self.{name}" for name, _ in own_generators(usual.method)
        )
        raise Violated(f"{violated}{own}") from None
    return "draws in between change nothing"


def observers(trials: Trials) -> str:
    """Observing callbacks before and after the method in the list change nothing."""
    _equal(
        trials.run(), trials.run(beside="observers"), "with an observer before and after it in the list it"
    )
    return "observers before and after it change nothing"


def relabelling(trials: Trials) -> str:
    """With the clients numbered differently, and the same data each, the server's rounds and each client's memory are equal."""
    usual = trials.run()
    if first_difference(_outcome(usual), _outcome(trials.run(seed=1))) is not None:
        raise NotApplicable("what it does depends on the seed, so its draws may depend on client numbers")
    other = relabelled(trials)
    worst = 0.0
    for number, (one, two) in enumerate(zip(usual.rounds, other.rounds, strict=True), 1):
        apart, name = distance(one.server, two.server)
        if not apart <= TOLERANCE:
            raise Violated(f"the server's {name} changes by {apart:.2g} in round {number}")
        worst = max(worst, apart)
        if memory_apart(one.memory, two.memory) <= TOLERANCE:
            continue  # whatever its numbers mean, they are not clients
        renamed = by_client(two.memory)
        for client, entries in by_client(one.memory).items():
            theirs = renamed.get(RELABELLED[client], {})
            apart = entries_apart(entries, theirs)
            if not apart <= TOLERANCE:
                raise Violated(f"what client {client} keeps changes by {apart:.2g} in round {number}")
    return f"permutes nothing but numbers (distance {worst:.1g})"


def _close(first: Run, second: Run) -> str:
    worst = 0.0
    for number, (one, two) in enumerate(zip(first.rounds, second.rounds, strict=True), 1):
        apart, name = distance(one.server, two.server)
        if not apart <= TOLERANCE:
            raise Violated(f"{name} is {apart:.2g} apart after round {number}")
        kept = memory_apart(one.memory, two.memory)
        if not kept <= TOLERANCE:
            raise Violated(f"what the method keeps is {kept:.2g} apart after round {number}")
        worst = max(worst, apart)
    return f"distance {worst:.1g}"


def _outcome(run: Run) -> dict[str, object]:
    """What must be equal bit for bit: the server after the last round, its optimizer, what the method keeps, all metrics."""
    last = run.rounds[-1]
    metrics = {name: value for name, value in run.module.metrics.items() if not name.startswith("time/")}
    return {
        "model": last.server,
        "server optimizer": run.optimizer,
        "state_dict": last.memory,
        "metrics": metrics,
    }


def _equal(first: Run, second: Run, what: str) -> None:
    place = first_difference(_outcome(first), _outcome(second))
    if place is None:
        return
    apart, name = distance(first.rounds[-1].server, second.rounds[-1].server)
    model = f"model {name} by {apart:.2g}" if apart else place
    raise Violated(f"{what} ends differently: {model}")
