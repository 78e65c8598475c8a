"""StaticBN: the "static batch normalization" of HeteroFL (Diao, Ding and Tarokh, arXiv 2010.01264)."""

from collections.abc import Mapping

import lightning as L

from fl_lightning import Cohort, FederatedCallback, FederatedModule
from fl_lightning.aggregation import require_weighted_mean
from fl_lightning.batch_norm import buffer_kinds, parameter_kinds, require_batch_norm
from fl_lightning.cohort import treatments
from fl_lightning.methods import Mode, measured_statistics
from fl_lightning.round import resolve_policy


class StaticBN(FederatedCallback):
    """Static BN (sBN): a pass over the training data measures the running statistics.

    In training, clients do not send running statistics. Instead, all clients make a pass
    over their training data with the server's new weights, without gradients (see
    :func:`~fl_lightning.methods.statistics_pass.measured_statistics`). A pass takes place after each evaluated
    round and after the last round. After a skipped round, a pass takes place only if no earlier
    pass used the current weights. Between two passes, the server and its checkpoints hold the
    statistics of the earlier pass, which clients receive with the weights. Parameters train as in
    FedAvg; only evaluation differs.

    Args:
        statistics_pass: Data and formula of the statistics.

            - ``"pooled"``: means and variances of the union batches, averaged over the union
              batches. Union batch k is the union of all clients' k-th batches. HeteroFL's code
              averages in the same way, but divides the shuffled data of all clients into batches. A
              real federation cannot pool data.
            - ``"pooled_total_variance"``: mean and variance of all values in the union batches.
            - ``"per_client"``: means and variances of the clients' batches, averaged over all
              batches of all clients. The variance between clients is left out.
            - ``"per_client_total_variance"``: mean and variance of all values in the clients'
              batches, computed from each client's count, mean and variance.

    Raises:
        ConfigurationError: The pass is unknown, or the model has no running statistics.

    Example:
        >>> from fl_lightning.testing import blobs, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[StaticBN()])
        >>> averaged = train(small_cnn(), blobs(), rounds=2)
        >>> bool((state["8.weight"] == averaged["8.weight"]).all())  # only the statistics differ
        True
    """

    paper = "sBN of HeteroFL: Diao et al., arXiv 2010.01264"
    equalities = ("weights_of_fedavg", "statistics_of_its_weights")
    examples = ({}, {"statistics_pass": "per_client"}, {"statistics_pass": "per_client_total_variance"})
    saved = ("measured_round", "trained_round")
    sends_for_evaluations = True

    def __init__(self, statistics_pass: Mode = "pooled") -> None:
        self.statistics_pass = statistics_pass
        self.measured_round = self.trained_round = 0
        self._pass: dict[int, tuple[int, int]] = {}
        self._is_last = False

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """Declare that the clients' running statistics are discarded after each round."""
        return dict.fromkeys(("mean", "var", "counter"), "discarded")

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Check that running statistics exist and that the aggregator is the weighted mean."""
        require_batch_norm(pl_module.model, "StaticBN")
        does = "pools the statistics of all clients in a separate pass"
        require_weighted_mean(pl_module, "StaticBN", does, ["statistics_aggregator"])

    def on_round_end(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Measure the statistics if this round is evaluated or is the last round."""
        self.trained_round = cohort.round
        self._measure_if_used(trainer, pl_module, cohort.round)

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: FederatedModule
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """Measure the statistics if they are needed after a skipped round.

        Returns:
            The traffic of the pass by client id, and the number of exchanges.
        """
        self._measure_if_used(trainer, pl_module, pl_module.round)
        return self._pass, int(self._is_last and bool(self._pass))

    def _measure_if_used(self, trainer: L.Trainer, pl_module: FederatedModule, round_number: int) -> None:
        """Measure the statistics if they are needed, and record the traffic of the pass.

        Evaluated rounds and the last round need statistics. If an earlier pass used the current
        weights, its statistics are still valid.
        """
        self._pass, self._is_last = {}, round_number == trainer.fit_loop.max_epochs
        used = self._is_last or _is_evaluated(trainer, round_number)
        if not used or self.measured_round == self.trained_round:
            return
        self._measure(pl_module, self.trained_round)
        model = pl_module.model
        sizes = [(kind, model.get_buffer(name).numel()) for name, kind in buffer_kinds(model).items()]
        statistics = sum(size for kind, size in sizes if kind in ("mean", "var"))
        policy = resolve_policy(pl_module.federated_callbacks, round_number, pl_module.planned_rounds)
        treated = treatments(model, policy)
        sent = [name for name in parameter_kinds(model) if treated[name] == "averaged"]
        weights = sum(model.get_parameter(name).numel() for name in sent)
        following = [] if self._is_last else pl_module.plan.cohort(round_number + 1)
        clients = range(pl_module.data.num_clients)
        self._pass = {client: (statistics, weights * (client not in following)) for client in clients}

    def on_train_end(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Measure the statistics if training ended before its last planned round."""
        if self.measured_round < self.trained_round:
            self._measure(pl_module, self.trained_round)

    def on_test_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Warn if statistics and weights of a checkpoint are from different rounds."""
        if self.trained_round != self.measured_round:
            pl_module.print(
                f"StaticBN: statistics are of round {self.measured_round}, weights of round {self.trained_round}: the run stopped "
                "between two passes. Resume it with fit --ckpt_path last to measure statistics of these weights"
            )

    def _measure(self, pl_module: FederatedModule, round_number: int) -> None:
        self.measured_round = round_number
        statistics = measured_statistics(pl_module.trainer, pl_module, self.statistics_pass)
        for name, value in statistics.items():
            pl_module.model.get_buffer(name).copy_(value)

    def extra_traffic(self, cohort: Cohort) -> Mapping[int, tuple[int, int]]:
        """Return the numbers of floats that each client sends and receives in a pass.

        Clients send statistics and receive weights. Weights for clients of the next cohort are not
        counted here, because the broadcast of the next round counts them.
        """
        return self._pass

    def extra_exchanges(self, cohort: Cohort) -> int:
        """Return the number of exchanges: 1 for the last pass, and 0 for earlier passes.

        The server waits only for the last pass. An earlier pass overlaps with the next round.
        """
        return int(self._is_last)


def _is_evaluated(trainer: L.Trainer, round_number: int) -> bool:
    return trainer.enable_validation and round_number % (trainer.check_val_every_n_epoch or 1) == 0
