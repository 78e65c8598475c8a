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
from fl_lightning.verification.memory import memory_apart, relabelled, renamed_memory_apart
from fl_lightning.verification.observation import Run
from fl_lightning.verification.trials import SCRIPT, Trials


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
                torch.load(whole.folder / f"{number}.ckpt", weights_only=True)
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
    usual = trials.run()
    own = "".join(f", from self.{name} too," for name in own_generators(usual.method))
    _equal(usual, trials.run(beside="noise"), f"with other random draws between the hooks{own} it")
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
    return f"permutes nothing but numbers ({_close(usual, relabelled(trials), renamed_memory_apart)})"


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
    place = first_difference(_outcome(first), _outcome(second))
    if place is None:
        return
    apart, name = distance(first.rounds[-1].server, second.rounds[-1].server)
    model = f"model {name} by {apart:.2g}" if apart else place
    raise Violated(f"{what} ends differently: {model}")
