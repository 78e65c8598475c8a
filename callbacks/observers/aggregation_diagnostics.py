"""Measures of the attackers' effect on the server's aggregates."""

from collections.abc import Mapping

import lightning as L
import torch
from torch import Tensor

from fl_lightning import Cohort, FederatedModule, Report, Table
from fl_lightning.callbacks.byzantine import split_rows
from fl_lightning.errors import check_number
from fl_lightning.methods import Observer
from fl_lightning.round import sent_vectors


class AggregationDiagnostics(Report, Observer):
    """Observer of aggregation rules under attack: their distance from the honest clients' mean.

    The observer measures round 1 and every ``every_n_rounds``-th round. A measured round takes
    longer, because it aggregates twice. Each metric is logged for three kinds of state. ``KIND`` is
    ``parameters`` (updates), ``means`` or ``variances``:

    - ``byzantine/distance_KIND``: L2 distance between the aggregate and the mean of the honest
      clients. The unit is the average L2 distance between an honest client and this mean. Mean and
      average are weighted if the aggregation rule uses weights.
    - ``byzantine/share_KIND``: The attackers' share in the aggregate. If the rule is a mean with
      equal weights, f attackers among n clients have the share f / n. If the rule trims or filters
      out all attackers, the share is 0.

    Without attackers, the distance is 0 for the mean, and above 0 for robust rules, because robust
    rules are biased. The distance is measured directly after the rule, before the server adds the
    variance between clients and applies ``statistics_domain``. If a kind has several vectors, such
    as the means of each layer, the share is averaged over all coordinates.

    The file ``shares.csv`` has each client's mean share over the measured rounds.

    Args:
        every_n_rounds: Interval of the measured rounds, at least 1.

    Raises:
        ConfigurationError: ``every_n_rounds`` is below 1.
    """

    examples = ({}, {"every_n_rounds": 1})
    saved = ("shares", "attackers")

    def __init__(self, every_n_rounds: int = 10) -> None:
        check_number("AggregationDiagnostics.every_n_rounds", every_n_rounds, least=1)
        self.every_n_rounds = every_n_rounds
        self.newest: dict[str, float] = {}
        self.shares: dict[int, dict[str, list[float]]] = {}
        self.attackers: list[int] = []

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Forget an earlier run's shares."""
        if not pl_module.trainer.current_epoch:
            self.shares, self.attackers = {}, []

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Measure the distances and shares of this round's aggregates."""
        if cohort.round != 1 and cohort.round % self.every_n_rounds:
            return
        bad, good = split_rows(pl_module, cohort)
        self.attackers = sorted({*self.attackers, *(cohort.client_ids[row] for row in bad)})
        self.newest = {}
        totals: dict[str, Tensor] = {}
        for sent in sent_vectors(pl_module, cohort) if good else ():
            rows, alike = sent.rows().double(), getattr(sent.rule, "weighting", "weighted") == "uniform"
            weights = (torch.ones_like(cohort.weights) if alike else cohort.weights)[good].double()
            weights, columns = weights / weights.sum(), rows.shape[1]
            mean = weights @ rows[good]
            moved = (sent.rule(rows, cohort.weights) - mean).square().sum()
            spread = (weights @ (rows[good] - mean).norm(dim=1)).square()
            shares = sent.rule.shares([rows], cohort.weights) * columns
            sums = torch.cat([torch.stack([moved, spread, torch.full_like(moved, columns)]), shares]).cpu()
            totals[sent.what] = totals.get(sent.what, 0) + sums
        for what, total in totals.items():
            moved_, spread_, columns_, *parts = total.tolist()
            self.newest[f"byzantine/distance_{what}"] = (moved_ / spread_) ** 0.5 if spread_ else 0.0
            self.newest[f"byzantine/share_{what}"] = sum(parts[row] for row in bad) / columns_
            for client, share in zip(cohort.client_ids, parts, strict=True):
                seen = self.shares.setdefault(client, {}).setdefault(what, [0.0, 0.0])
                seen[0], seen[1] = seen[0] + 1, seen[1] + share / columns_
        pl_module.log_numbers(self.newest)

    def tables(self) -> Mapping[str, Table]:
        """Return each client's mean share in the measured aggregates."""
        kinds = sorted({what for shares in self.shares.values() for what in shares})
        rows: list[list[float | str]] = []
        for client, shares in sorted(self.shares.items()):
            means = [shares[what][1] / shares[what][0] if what in shares else "" for what in kinds]
            rows.append([client, "yes" if client in self.attackers else "no", *means])
        return {"shares": Table(["client", "attacker", *kinds], rows)} if kinds else {}
