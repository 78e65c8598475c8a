"""StaticBN: the "static batch normalization" of HeteroFL (Diao, Ding and Tarokh, arXiv 2010.01264)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import lightning as L

from fl_lightning import FederatedCallback
from fl_lightning.aggregation import require_weighted_mean
from fl_lightning.batch_norm import buffer_kinds, parameter_kinds, require_batch_norm
from fl_lightning.errors import check_choice
from fl_lightning.methods import Mode, collect
from fl_lightning.round import resolve_policy

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule


class StaticBN(FederatedCallback):
    """Train with batch statistics only, and measure the server's statistics in a pass over the clients' data (sBN).

    No running statistic is tracked or sent in training. After each round that will be evaluated, and after the last one (also
    where that round is skipped, for the weights of an earlier one),
    all clients pass over their training data once with the server's new weights, without gradients (see
    :func:`~fl_lightning.methods.statistics_pass.collect`). In the rounds between, the server, and so a checkpoint, holds the
    statistics of the last pass. Parameters train as in FedAvg: only evaluation sees the difference.

    Args:
        statistics_pass: ``"pooled"``: averages over batches of all clients' data together, as HeteroFL's code, which a
            federation cannot do (batch k is the union of the clients' k-th batches; theirs are shuffled over all data);
            ``"pooled_total_variance"``: the variance of all values in these batches; ``"per_client"``: averages over each
            client's batches by itself, without the variance between the clients; ``"per_client_total_variance"``: the
            variance of all values in those, from each client's count, mean and variance.

    Raises:
        ConfigurationError: Unknown pass, or a model without running statistics.
    """

    paper = "sBN of HeteroFL: Diao et al., arXiv 2010.01264"
    claims = ("weights_of_fedavg", "statistics_of_its_weights")
    examples = ({}, {"statistics_pass": "per_client"}, {"statistics_pass": "per_client_total_variance"})
    sends_for_evaluations = True

    def __init__(self, statistics_pass: Mode = "pooled") -> None:
        check_choice("StaticBN.statistics_pass", statistics_pass, get_args(Mode))
        self.statistics_pass = statistics_pass
        self.measured_round = self._trained_round = 0
        self._pass: dict[int, tuple[int, int]] = {}
        self._is_last = False

    def policy(self, round_number: int, total_rounds: int) -> Mapping[str, str]:
        """What the layers track in training is thrown away."""
        return dict.fromkeys(("mean", "var", "counter"), "reset")

    def configure_batch_norm(self, pl_module: "FederatedModule") -> None:
        """Check that there is somewhere to put the statistics."""
        require_batch_norm(pl_module.model, "StaticBN")
        require_weighted_mean(
            pl_module,
            "StaticBN",
            "pools the statistics of all clients in a pass of its own",
            ("statistics_aggregator",),
        )

    def on_round_end(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """The pass, where the statistics are about to be used."""
        self._trained_round = cohort.round
        self._measure_if_used(trainer, pl_module, cohort.round)

    def on_round_skipped(
        self, trainer: L.Trainer, pl_module: "FederatedModule"
    ) -> tuple[Mapping[int, tuple[int, int]], int]:
        """The pass for the weights of an earlier round, where this one is evaluated and that one was not."""
        self._measure_if_used(trainer, pl_module, pl_module.round)
        return self._pass, int(self._is_last and bool(self._pass))

    def _measure_if_used(self, trainer: L.Trainer, pl_module: "FederatedModule", round_number: int) -> None:
        """Pass over the data if statistics of older weights are about to be used, and note what is sent."""
        self._pass, self._is_last = {}, round_number == trainer.fit_loop.max_epochs
        used = self._is_last or _is_evaluated(trainer, round_number)
        if not used or self.measured_round == self._trained_round:
            return
        self._measure(pl_module, self._trained_round)
        model = pl_module.model
        sizes = [(kind, model.get_buffer(name).numel()) for name, kind in buffer_kinds(model).items()]
        statistics = sum(size for kind, size in sizes if kind in ("mean", "var"))
        policy = resolve_policy(pl_module.federated_callbacks, round_number, pl_module.planned_rounds)
        sent = [name for name, kind in parameter_kinds(model).items() if policy[kind] == "averaged"]
        weights = sum(model.get_parameter(name).numel() for name in sent)
        following = [] if self._is_last else pl_module.plan.cohort(round_number + 1)
        clients = range(pl_module.data.num_clients)
        self._pass = {client: (statistics, weights * (client not in following)) for client in clients}

    def on_train_end(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # rounds have one
        """The pass, where training ended before its last round."""
        if self.measured_round < self._trained_round:
            self._measure(pl_module, self._trained_round)

    def on_test_start(self, trainer: L.Trainer, pl_module: "FederatedModule") -> None:  # type: ignore[override]  # rounds have one
        """Say so when the checkpoint of a stopped run holds statistics of an earlier round."""
        if self._trained_round != self.measured_round:
            pl_module.print(
                f"StaticBN: the statistics are those of round {self.measured_round}, the weights of round {self._trained_round}: this run was "
                "stopped between two passes; go on with fit --ckpt_path last for numbers that belong together"
            )

    def state_dict(self) -> dict[str, Any]:
        """The round of the last pass, and that of the weights."""
        return {"measured_round": self.measured_round, "trained_round": self._trained_round}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the round of the last pass, and that of the weights."""
        self.measured_round = state_dict["measured_round"]
        self._trained_round = state_dict.get("trained_round", self.measured_round)

    def _measure(self, pl_module: "FederatedModule", round_number: int) -> None:
        self.measured_round = round_number
        buffers = dict(pl_module.model.named_buffers())
        for layer, (mean, variance) in collect(pl_module, self.statistics_pass).items():
            buffers[f"{layer}.running_mean"].copy_(mean)
            buffers[f"{layer}.running_var"].copy_(variance)

    def extra_traffic(self, cohort: "Cohort") -> Mapping[int, tuple[int, int]]:
        """All clients send statistics in a pass; those that the next round does not send the weights get them for it."""
        return self._pass

    def extra_exchanges(self, cohort: "Cohort") -> int:
        """The last pass waits for the server; before, its answer comes while the next round is under way."""
        return int(self._is_last)


def _is_evaluated(trainer: L.Trainer, round_number: int) -> bool:
    return trainer.enable_validation and round_number % (trainer.check_val_every_n_epoch or 1) == 0
