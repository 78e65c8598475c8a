"""What the server's rules make of what clients send: how far from the honest mean, and whose part in it is how large."""

from typing import TYPE_CHECKING

import lightning as L
import torch

from callbacks.byzantine import Byzantine
from fl_lightning import ConfigurationError, FederatedCallback
from fl_lightning.round.messages import sent_vectors

if TYPE_CHECKING:
    from fl_lightning import Cohort, FederatedModule


class AggregationDiagnostics(FederatedCallback):
    """Measure what the server's rules do with attackers (an observer: training is the same).

    For the parameters (as updates), the means and the variances that are sent, in round 1 and every ``every_n_rounds``-th:

    - ``byzantine/distance_parameters`` (``_means``, ``_variances``): the L2 distance of the aggregate to the mean of the honest
      clients, in units of their mean distance to it. 0 where nobody attacks and the rule is the mean; a robust rule is biased.
    - ``byzantine/share_parameters`` and so on: the part that the attackers have in the aggregate. Under a mean it is f / n; 0 where
      all of them are trimmed or filtered out.

    Several vectors of one kind (each layer's means) count by their number of coordinates. Each measured round takes the time of a
    second aggregation.

    Args:
        every_n_rounds: How often rounds are measured, at least 1.

    Raises:
        ConfigurationError: ``every_n_rounds`` is below 1.
    """

    paper = "(an observer: measurement only)"
    role = "observer"
    claims = ("weights_of_fedavg", "one_client_is_plain_training")
    examples = ({}, {"every_n_rounds": 1})

    def __init__(self, every_n_rounds: int = 10) -> None:
        if every_n_rounds < 1:
            raise ConfigurationError(
                f"AggregationDiagnostics.every_n_rounds: {every_n_rounds} must be at least 1"
            )
        self.every_n_rounds = every_n_rounds
        self.newest: dict[str, float] = {}

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: "FederatedModule", cohort: "Cohort") -> None:
        """Aggregate what is sent, as the server will."""
        if cohort.round != 1 and cohort.round % self.every_n_rounds:
            return
        attacks = [callback for callback in pl_module.federated_callbacks if isinstance(callback, Byzantine)]
        bad = sorted({row for attack in attacks for row in attack.rows(cohort)})
        good = [row for row in range(len(cohort)) if row not in bad]
        found: dict[str, list[torch.Tensor]] = {}
        for sent in sent_vectors(pl_module, cohort) if good else ():
            rows = sent.rows().double()
            mean = rows[good].mean(0)
            moved = (sent.rule(rows, cohort.weights) - mean).square().sum()
            spread = (rows[good] - mean).norm(dim=1).mean().square()
            share = sent.rule.shares([rows], cohort.weights)[bad].sum() * rows.shape[1]
            measured = torch.stack([moved, spread, share, torch.tensor(float(rows.shape[1]))])
            found.setdefault(sent.what, []).append(measured.cpu())
        for what, measured_ in found.items():
            moved, spread, share, columns = torch.stack(measured_).sum(0).tolist()
            self.newest[f"byzantine/distance_{what}"] = (moved / spread) ** 0.5 if spread else 0.0
            self.newest[f"byzantine/share_{what}"] = share / columns
        pl_module.log_numbers(self.newest)
