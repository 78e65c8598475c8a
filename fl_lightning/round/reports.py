"""What a round reports: its loss and what it has cost, or that too few clients took part in it."""

from typing import Any

from fl_lightning.aggregation import RobustAggregator
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import doing
from fl_lightning.round.communication import Communication, round_communication, skipped_communication
from fl_lightning.round.failures import RoundSkipped
from fl_lightning.round.local_steps import agree


def log_round(module: Any, cohort: RoundCohort) -> None:
    """Log the clients' mean loss and what the round has cost.

    Args:
        module: The federated module.
        cohort: The clients that were aggregated: others, which were left out, count as absent.
    """
    losses = cohort.losses.tolist()
    mean = sum(weight * loss for weight, loss in zip(cohort.weights.tolist(), losses, strict=True))
    module.log_numbers({"train/loss": mean}, prog_bar=True)
    if not module.statistics.is_mean:
        module.log_numbers(module.statistics.counts())
    module.communication = Communication()
    if not module.centralised:
        module.communication = round_communication(cohort, module.federated_callbacks, module.record.holders)
    costs, times = module.communication.metrics(), module.clock.stop()
    seconds = times["time/round_s"]
    module.record.finish_round(cohort, losses, seconds, costs)
    module.log_numbers({**costs, **times, "time/samples_per_s": sum(cohort.samples) / seconds})
    _log_clients(module, len(module.plan.trained(module.round)[0]) - len(cohort), skipped=False)


def robust_rules(module: Any) -> str:
    """The names of the robust rules that combine the clients, empty where there is none."""
    rules = (
        rule for rule in (module.aggregator, module.statistics.rule) if isinstance(rule, RobustAggregator)
    )
    return " and ".join(dict.fromkeys(type(rule).__name__ for rule in rules))


def too_few(module: Any, reported: int, dropped: int = 0) -> RoundSkipped:
    """What ends a round that too few clients are left of.

    Args:
        module: The federated module.
        reported: The clients whose models can be aggregated.
        dropped: Those that were left out, since theirs cannot.
    """
    plan = module.plan
    own = plan.min_clients == module.min_clients
    asks = "model.min_clients is" if own else f"{robust_rules(module)} needs"
    return RoundSkipped(
        f"round {module.round}: {reported} of {plan.cohort_size} clients can be aggregated, and {asks} {plan.min_clients}: the server "
        "keeps its state",
        dropped,
    )


def skip_round(module: Any, skipped: RoundSkipped) -> None:
    """End a round that too few clients are left of: it counts, and changes nothing at the server."""
    module.print(str(skipped))
    for parameter in module.model.parameters():
        parameter.grad = None  # so the server optimizer passes it over
    module.server_step()
    told = {}
    for method in module.federated_callbacks:
        own = f"{type(method).__name__}.on_round_skipped"
        with module.clock.part("callbacks"), doing(f"{own}, round {module.round}"):
            told[type(method).__name__] = method.on_round_skipped(module.trainer, module)
    agree(module, f"round {module.round}")
    module.communication = skipped_communication(module, told)
    costs, times = module.communication.metrics(), module.clock.stop()
    module.record.spend(times["time/round_s"], costs)
    module.log_numbers({**costs, **times})
    _log_clients(module, skipped.dropped, skipped=True)


def _log_clients(module: Any, dropped: int, *, skipped: bool) -> None:
    """Log how many clients have reported, where some may fail."""
    plan, dropping = module.plan, module.on_divergence == "drop"
    if plan.failures is None and not dropping:
        return
    found = {"clients/reported": len(plan.reporting(module.round)) - dropped, "clients/skipped": skipped}
    module.log_numbers(
        {n: float(x) for n, x in {**found, **({"clients/dropped": dropped} if dropping else {})}.items()}
    )
