"""Logging of finished and skipped rounds: loss, learning rates, traffic and time."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fl_lightning.batch_norm.kinds import JOINT_LABELS
from fl_lightning.cohort.cohort import Cohort
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.round.communication import Communication, UpDown, add
from fl_lightning.round.context import RunContext
from fl_lightning.round.declarations import Declarations


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
    beside = {
        method: {client: (size * up, size * down) for client, (up, down) in traffic.items()}
        for method, (traffic, _) in sent.items()
        if traffic
    }
    exchanges = sum(number for _, number in sent.values())
    run.communication = Communication(beside=beside, exchanges=exchanges)
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
    rates = {}
    for group, rate in cohort.learning_rates().items():
        differs = {"lr", "lr_scale"} & cohort.parameter_groups.get(group, {}).keys()
        rates[f"client/lr_{group}" if differs else "client/lr"] = rate
    for number, settings in enumerate(run.trainer.optimizers[0].param_groups):
        rates[f"server/lr_{number}" if number else "server/lr"] = float(settings["lr"])
    return rates


def _log_clients(run: RunContext, dropped: int, *, skipped: bool) -> None:
    """Log the numbers of reporting and dropped clients, if clients can fail or be dropped."""
    dropping = run.on_divergence == "drop"
    if run.plan.failures is None and not dropping:
        return
    counts = {"clients/reported": len(run.plan.reporting(run.round)) - dropped, "clients/skipped": skipped}
    counts |= {"clients/dropped": dropped} if dropping else {}
    run.log_numbers({name: float(count) for name, count in counts.items()})


def round_communication(
    cohort: Cohort,
    callbacks: Sequence[Declarations],
    holding: Callable[[str], Collection[int]] = lambda _: (),
) -> Communication:
    """Return the traffic of a round: the model's state, and additional traffic of methods.

    Averaged and pooled state is sent in both directions. Local state, reset state and counters are
    not sent. Frozen state is sent to each client once, in its first round after the freeze.

    Args:
        cohort: The round's clients, after their local steps.
        callbacks: The run's methods.
        holding: Function that takes the name of a frozen block and returns the clients that already
            have this block. Default: no clients.
    """
    each: dict[str, UpDown] = {}
    beside: dict[str, dict[int, UpDown]] = {}
    for rows in (cohort.params, cohort.buffers):
        for name, block in rows.blocks.items():
            if not block.is_floating_point():
                continue
            label, sent = JOINT_LABELS.get(rows.layout[name].kind, ""), block.shape[1] * block.element_size()
            if cohort.treatment(name) in ("averaged", "pooled"):
                add(each, label, (sent, sent))
            elif cohort.treatment(name) == "frozen":
                for client in set(cohort.client_ids) - set(holding(name)):
                    add(beside.setdefault(label, {}), client, (0, sent))
    size = next(iter(cohort.params.blocks.values())).element_size()
    exchanges = 1
    for callback in callbacks:
        method, (up, down) = type(callback).__name__, callback.extra_payload(cohort)
        if up or down:
            add(each, method, (size * up, size * down))
        for client, (up, down) in callback.extra_traffic(cohort).items():
            add(beside.setdefault(method, {}), client, (size * up, size * down))
        exchanges += callback.extra_exchanges(cohort)
    return Communication(cohort.client_ids, cohort.local_steps, each, beside, exchanges)
