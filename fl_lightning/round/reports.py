"""Logging of finished and skipped rounds: loss, learning rates, traffic and time."""

from collections.abc import Mapping

from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.round.communication import (
    Communication,
    UpDown,
    round_communication,
    skipped_communication,
)
from fl_lightning.round.context import RunContext


def log_round(run: RunContext, cohort: RoundCohort) -> None:
    """Log the clients' mean loss, the learning rates, the traffic and the times of a round.

    Args:
        run: The run.
        cohort: The aggregated clients.
    """
    losses = cohort.losses.tolist()
    mean = sum(weight * loss for weight, loss in zip(cohort.weights.tolist(), losses, strict=True))
    run.log_numbers({"train/loss": mean}, prog_bar=True)
    if not run.statistics.is_mean:
        run.log_numbers(run.statistics.counts())
    run.communication = Communication()
    if not run.centralised:
        run.communication = round_communication(cohort, run.federated_callbacks, run.record.holding)
    costs, times = run.communication.metrics(), run.clock.stop()
    seconds = times["time/round_s"]
    run.record.finish_round(cohort, losses, seconds, costs)
    rates = learning_rates(run, cohort)
    run.log_numbers({**rates, **costs, **times, "time/samples_per_s": sum(cohort.samples) / seconds})
    _log_clients(run, len(run.plan.trained(run.round)[0]) - len(cohort), skipped=False)


def log_skipped_round(
    run: RunContext, dropped: int, sent: Mapping[str, tuple[Mapping[int, UpDown], int]]
) -> None:
    """Log the traffic and the times of a skipped round.

    Args:
        run: The run.
        dropped: Number of clients that were left out because of a non-finite update.
        sent: Results of ``on_round_skipped`` by method name.
    """
    size = next(p for p in run.model.parameters() if p.requires_grad).element_size()
    run.communication = skipped_communication(size, sent)
    costs, times = run.communication.metrics(), run.clock.stop()
    run.record.spend(times["time/round_s"], costs)
    run.log_numbers({**costs, **times})
    _log_clients(run, dropped, skipped=True)


def learning_rates(run: RunContext, cohort: RoundCohort) -> dict[str, float]:
    """Return the learning rates of a round by metric name.

    The names are ``client/lr`` and ``server/lr``. A parameter group with a different client rate
    adds ``client/lr_<group>``. A further group of the server optimizer adds ``server/lr_<number>``.
    Client rates include the schedule's factor.
    """
    rates: dict[str, float] = {}
    for group, rate in cohort.learning_rates().items():
        differs = not {"lr", "lr_scale"}.isdisjoint(cohort.parameter_groups.get(group, {}))
        differs |= rates.get("client/lr", rate) != rate  # by a schedule for each group
        rates[f"client/lr_{group}" if differs else "client/lr"] = rate
    for number, settings in enumerate(run.trainer.optimizers[0].param_groups):
        rates[f"server/lr_{number}" if number else "server/lr"] = float(settings["lr"])
    return rates


def _log_clients(run: RunContext, dropped: int, *, skipped: bool) -> None:
    dropping = run.on_divergence == "drop"
    if run.plan.failures is None and not dropping:
        return
    counts = {"clients/reported": len(run.plan.reporting(run.round)) - dropped, "clients/skipped": skipped}
    counts |= {"clients/dropped": dropped} if dropping else {}
    run.log_numbers({name: float(count) for name, count in counts.items()})
