"""Communication round: FedAvg (McMahan et al. 2017) with FedOpt (Reddi et al. 2021)."""

from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.errors import doing
from fl_lightning.randomness import derive_seed, isolated, seed_global
from fl_lightning.round.communication import Communication, round_communication
from fl_lightning.round.context import RunContext
from fl_lightning.round.hooks import end_round
from fl_lightning.round.server_update import converge_spectral_norm, update_server
from fl_lightning.round.survivors import RoundSkipped, check_aggregate, check_updates, survivors, too_few
from fl_lightning.round.trained import mark_trained


def communication_round(run: RunContext) -> None:
    """Run a round: broadcast, local steps, aggregation, server step."""
    run.clock.start()
    if not run.plan.cohort(run.round):
        raise too_few(run, len(run.plan.reporting(run.round)))
    cohort = run.start_round()
    run.call_hook("on_round_start", cohort)
    part = cohort.part()  # the clients that this rank computes
    of_ranks = run.ranks.exchange(
        lambda: (take_local_steps(run, cohort, part), run.client.logged_by_clients())
    )
    with run.clock.part("gather"):
        samples = [number for counts, _ in of_ranks for number in counts]
        cohort.finish_steps(part, samples, weigh_samples=run.weighting == "samples")
        cohort = survivors(run, cohort)
    run.call_hook("on_before_aggregate", cohort)
    with run.clock.part("aggregation"):
        seed_global(derive_seed(run.seed, "aggregation", cohort.round), run.device)
        cohort, failed = check_updates(run, cohort)
        run.client.merge_logged(cohort.client_ids, [logged for _, logged in of_ranks])
        update_server(cohort, run.aggregator, run.statistics, strict=run.on_divergence == "error")
        mark_trained([run.model, *run.federated_callbacks])
    with isolated():  # random numbers of hooks must not affect the server optimizer
        run.call_hook("on_after_aggregate", cohort)
    with run.clock.part("aggregation"):
        run.server_step()
        converge_spectral_norm(cohort, run.model)
    run.call_hook("on_round_end", cohort)
    check_aggregate(run, cohort, failed)
    end_round(run)
    _log_round(run, cohort)


def take_local_steps(run: RunContext, cohort: RoundCohort, part: RoundCohort) -> list[int]:
    """Take the local steps of the clients that this rank computes.

    Every rank runs the loop until all clients of the cohort have finished.

    Args:
        run: The run.
        cohort: The round's cohort.
        part: The cohort's clients on this rank.

    Returns:
        Number of samples that each client of ``part`` has processed.
    """
    last = max(cohort.local_steps) - 1
    for step in range(last + 1):
        # all ranks take part in a joint forward pass: a rank without clients computes row 0
        joint = step == 0 and run.joint_method is not None
        compute_gradients(run, cohort.part(slice(0, 1)) if joint and not part else part, step)
        run.call_hook("on_after_local_backward", part, step)
        with run.clock.part("optimizer"):
            part.take_step()
        run.client.end_steps(part)
        run.call_hook("on_local_step_end", part, step)
        part.finish_step(step, last)
        # Lightning's own progress bars have no method local_step
        show = getattr(run.trainer.progress_bar_callback, "local_step", None)
        if show is not None:
            show(step + 1, last + 1)
    return part.samples


def compute_gradients(run: RunContext, cohort: RoundCohort, step: int) -> None:
    """Compute gradients and new buffers of the clients that still take local steps."""
    if not (rows := cohort.begin_step(step)):
        return
    run.client.begin_steps(cohort)
    place = f"round {cohort.round}, local step {step + 1}"
    with run.clock.part("data"), doing(place):
        batches = run.client_batches(cohort, rows, step)
    with run.clock.part("forward_backward"), doing(place):
        losses = run.step_executor(step).backward(run.client, cohort, batches, rows)
        cohort.add_losses(rows, losses, batches.sizes())


def skip_round(run: RunContext, skipped: RoundSkipped) -> None:
    """End a round that has too few clients to aggregate. The server model does not change."""
    run.print(str(skipped))
    for parameter in run.model.parameters():
        parameter.grad = None  # without gradients, the server optimizer changes no parameter
    run.server_step()
    run.communication = Communication()
    size = next(p for p in run.model.parameters() if p.requires_grad).element_size()
    for method in run.federated_callbacks:
        name = type(method).__name__
        with run.clock.part("callbacks"), doing(f"{name}.on_round_skipped, round {run.round}"):
            traffic, exchanges = method.on_round_skipped(run.trainer, run)
        run.communication.count(name, traffic, size)
        run.communication.exchanges += exchanges
    end_round(run)
    costs, times = run.communication.metrics(), run.clock.stop()
    run.record.spend(times["time/round_s"], costs)
    run.log_numbers({**costs, **times})
    _log_clients(run, skipped.dropped, skipped=True)


def _log_round(run: RunContext, cohort: RoundCohort) -> None:
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
    rates = _learning_rates(run, cohort)
    run.log_numbers({**rates, **costs, **times, "time/samples_per_s": sum(cohort.samples) / seconds})
    _log_clients(run, len(run.plan.trained(run.round)[0]) - len(cohort), skipped=False)


def _learning_rates(run: RunContext, cohort: RoundCohort) -> dict[str, float]:
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
