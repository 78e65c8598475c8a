"""Rules for runs that must not differ: resumed, by other executors, on several ranks, observed, renumbered."""

import pickle

import torch

from fl_lightning.errors import ConfigurationError
from fl_lightning.execution.fork import cannot_fork
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.verification.differences import (
    NotApplicable,
    difference,
)
from fl_lightning.verification.renumbering import (
    relabelled,
    renamed_memory_apart,
)
from fl_lightning.verification.rules.compare_runs import differing_rounds, outcome, unequal_runs
from fl_lightning.verification.rules.registry import Violations, rule
from fl_lightning.verification.trials import SCRIPT, WITH_SERVER_MOMENTUM, Trials

_ON_RANKS = (
    "local steps may change only rows of their rank and keep data in cohort.extra, other hooks must do the same on "
    "every rank"
)


@rule("name every attribute that holds state in saved")
def resume(trials: Trials) -> Violations:
    """Check that a resumed run gives the same results as an uninterrupted run, bit for bit.

    The run is resumed after each round. The model, the server optimizer's momentum, the method's
    memory and all metrics are compared.
    """
    uninterrupted = trials.run(**WITH_SERVER_MOMENTUM)
    for number in range(1, len(SCRIPT)):
        saved = trials.checkpoint(WITH_SERVER_MOMENTUM, number)
        try:
            torch.load(saved, weights_only=True)
        except pickle.UnpicklingError:
            yield "state_dict must hold only tensors and numbers: it holds other objects"
        resumed = trials.run(**WITH_SERVER_MOMENTUM, resume=saved)
        yield from unequal_runs(
            uninterrupted, resumed, f"a run resumed after round {number} must equal the uninterrupted one"
        )
    return f"equal bit for bit from each of {len(SCRIPT) - 1} rounds"


@rule("write each operation for all rows at once")
def executors(trials: Trials) -> Violations:
    """Check that sequential and vectorised execution give the same rounds, up to 1e-10.

    Vectorised execution computes two clients at once.
    """
    return (
        yield from differing_rounds(
            trials.run(), trials.run(executor=VectorizedExecutor(2)), "executors must agree"
        )
    )


@rule("draw from cohort.generators in local steps, and obey docs/method-ranks.md")
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
    yield from unequal_runs(usual, shared, "two ranks must equal one")
    return "equal bit for bit on two ranks"


@rule("draw from cohort.generators or the global generator of the hook")
def observers(trials: Trials) -> Violations:
    """Check that a callback that only reads state and draws random numbers does not change the run.

    The callback draws from the global generators and from the method's generators.
    """
    watched = trials.run(observed=True)
    yield from unequal_runs(trials.run(), watched, "callbacks that watch and draw must not change the run")
    return "callbacks that watch and draw random numbers do not change the run"


@rule("identify a client by cohort.client_ids, not by its row", "attackers are chosen by client number")
def client_numbers(trials: Trials) -> Violations:
    """Check that renumbering clients changes neither the server nor a client's memory.

    The rule does not apply to attacks, because attackers are chosen by number.
    """
    usual = trials.run()
    if difference(outcome(usual), outcome(trials.run(seed=1))) is not None:
        raise NotApplicable("the method depends on the seed, so its draws may depend on client numbers")
    demand = "renumbered clients must give the same run"
    gap = yield from differing_rounds(usual, relabelled(trials), demand, renamed_memory_apart)
    return f"renumbering changes only numbers ({gap})"
