"""Byzantine clients: attackers that change their messages, training data or gradients."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import torch

from fl_lightning import Cohort, ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.attacks import ALittleIsEnough, Attack, Backdoor, Message, Mimic
from fl_lightning.batch_norm import buffer_kinds
from fl_lightning.client_data import BatchStack
from fl_lightning.cohort import treatments
from fl_lightning.errors import check_number
from fl_lightning.round import resolve_policy, sent_statistics_by_kind, sent_vectors

Target = Literal["means", "variances", "statistics", "parameters", "everything"]
_TARGETS = {
    "means": ("means",),
    "variances": ("variances",),
    "statistics": ("means", "variances"),
    "parameters": ("parameters",),
    "everything": ("means", "variances", "parameters"),
}


class Byzantine(FederatedCallback):
    """Byzantine clients: attackers that know what the honest clients of a round send.

    The hooks of an attack run after the hooks of all methods. An attack therefore sees and replaces
    the final messages of a round:

    - Statistics: the attack replaces the statistics that clients send. With FBN, the setting
      ``wire`` decides which statistics are sent. With other methods, clients send moving averages.
    - Parameters: the attack replaces the attacker's update. An update is the difference between the
      client's parameters and the server's parameters. With one local step (E = 1) of SGD, the
      update is the gradient times a step size.
    - Other state: the attack does not change other payload of a method, such as momentum and
      control variates. State that clients keep does not change, either.

    The partition also gives data to attackers, unless the partition is wrapped in ``HonestOnly``.
    The metric ``byzantine/clients`` is the number of attackers in the round's cohort.

    Args:
        attack: The attack, see :mod:`fl_lightning.attacks`.
        clients: Ids of the attackers, the number of attackers, or their fraction of all clients.
            With a number or a fraction, the clients with the highest ids attack.
            All ``Byzantine`` callbacks of a run know each other's attackers: attacks use the numbers
            of honest clients and attackers in the round.
        target: State that an attack on messages replaces: ``"means"``, ``"variances"``,
            ``"statistics"`` (means and variances), ``"parameters"`` or ``"everything"``.
        start_round: First round with attacks.
        per: Scope of the factor, for attacks that search for the strongest factor. ``"model"``
            searches one factor for all replaced state. ``"layer"`` searches one factor for the
            parameters, one for the means of each BN layer, and one for the variances of each BN
            layer.
        stay_valid: Whether attackers send only variances above 0, which the server's setting
            ``statistics_domain`` cannot detect as invalid.

    Raises:
        ConfigurationError: A setting is out of range, or an attacker's id does not exist.

    Example:
        >>> from fl_lightning.attacks import SignFlip
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> attack = Byzantine(SignFlip(), clients=1, target="parameters")
        >>> state = train(small_cnn("gn"), blobs(), rounds=1, callbacks=[attack])
        >>> distance(state, train(small_cnn("gn"), blobs(), rounds=1)) > 0.01
        True
    """

    paper = "Guerraoui et al., arXiv 2405.14670, Section 5 (attacks: see fl_lightning.attacks)"
    role = "attack"
    examples = (
        {"attack": ALittleIsEnough(), "clients": 1},
        {"attack": Mimic(), "clients": [0], "target": "parameters"},
    )

    def __init__(
        self,
        attack: Attack,
        clients: int | float | Sequence[int],
        target: Target = "everything",
        start_round: int = 1,
        per: Literal["model", "layer"] = "model",
        stay_valid: bool = False,
    ) -> None:
        self.attack, self.clients, self.target = attack, clients, target
        self.start_round, self.per, self.stay_valid = start_round, per, stay_valid
        self.attackers: list[int] = []

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Select the attackers."""
        self.attackers = attackers(self.clients, pl_module.data.num_clients)

    def on_train_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Raise an error if clients do not send the attacked state in the first attacked round."""
        first, sent = max(1, self.start_round), ["nothing (the run is centralised)"]
        if not pl_module.centralised:
            policy = resolve_policy(pl_module.federated_callbacks, first, pl_module.planned_rounds)
            sent = [
                "parameters",
                *sent_statistics_by_kind(buffer_kinds(pl_module.model), treatments(pl_module.model, policy)),
            ]
        if self.attackers and self._rewrites and set(sent).isdisjoint(_TARGETS[self.target]):
            raise ConfigurationError(
                f"Byzantine.target: {self.target} are not sent in round {first}, the first attacked round; clients send {', '.join(sent)}"
            )

    @property
    def _rewrites(self) -> bool:
        return type(self.attack).messages is not Attack.messages

    def rows(self, cohort: Cohort) -> list[int]:
        """Return the rows of the attackers in a cohort; an empty list before ``start_round``."""
        active = cohort.round >= self.start_round
        return [row for row, client in enumerate(cohort.client_ids) if active and client in self.attackers]

    def change_batches(
        self, pl_module: FederatedModule, client_ids: Sequence[int], batches: BatchStack
    ) -> BatchStack:
        """Replace the attackers' batches if the attack changes data."""
        active = set(self.attackers) if pl_module.round >= self.start_round else set()
        if type(self.attack).batch is Attack.batch or active.isdisjoint(client_ids):
            return batches
        classes = pl_module.data.num_classes
        pairs = zip(client_ids, batches.batches(), strict=True)
        return type(batches)(batches=[self.attack.batch(b, classes) if i in active else b for i, b in pairs])

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Replace the attackers' gradients if the attack changes gradients."""
        for row in self.rows(cohort) if type(self.attack).gradient is not Attack.gradient else ():
            for block in cohort.grads.blocks.values():
                block[row] = self.attack.gradient(block[row])

    def on_before_aggregate(self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort) -> None:
        """Replace the attackers' messages if the attacks change messages.

        The first ``Byzantine`` replaces the messages of all: an attack knows what the attackers of
        another ``Byzantine`` would send without an attack.
        """
        hook = Byzantine.on_before_aggregate
        alike = [one for one in pl_module.federated_callbacks if type(one).on_before_aggregate is hook]
        if self not in alike:  # a subclass that overrides this hook attacks alone
            alike = [self]
        if alike[0] is not self:
            return
        bad, good = split_rows(pl_module, cohort)
        pl_module.log_numbers({"byzantine/clients": len(bad)})
        weights = cohort.weights[[*good, *bad]]
        all_sent = [(sent, sent.rows()) for sent in (sent_vectors(pl_module, cohort) if bad else ())]
        for one in alike:
            own = one.rows(cohort)
            if not own or not one._rewrites or len(good) < one.attack.least_honest:
                continue
            vectors = [(sent, rows) for sent, rows in all_sent if sent.what in _TARGETS[one.target]]
            for group in [vectors] if one.per == "model" else [[pair] for pair in vectors]:
                for sent, rows in group:
                    rows[own] = sent.rows()[own]  # an earlier attack of the same clients counts
                messages = [Message(rows[good], rows[bad], weights, sent.rule) for sent, rows in group]
                for (sent, _), vector in zip(group, one.attack.messages(messages), strict=True):
                    positive = one.stay_valid and sent.what == "variances"
                    floor = torch.finfo(vector.dtype).tiny if positive else -torch.inf
                    chosen = vector if vector.dim() == 1 else vector[[bad.index(row) for row in own]]
                    sent.write(own, chosen.clamp(min=floor))

    def on_validation_batch_end(  # type: ignore[override]  # narrows pl_module
        self, trainer: L.Trainer, pl_module: FederatedModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Count how often a backdoor's trigger makes the model predict the target class.

        Inputs of the target class are not counted. An output that is not finite is no success.
        """
        if isinstance(self.attack, Backdoor):
            inputs, targets = batch
            others = targets != self.attack.target
            if others.any():
                scores = pl_module(self.attack.triggered(inputs[others]))
                taken = (scores.argmax(1) == self.attack.target) & scores.isfinite().all(1)
                self._success += torch.tensor([int(taken.sum()), len(taken)])

    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]  # narrows pl_module

    def on_validation_epoch_start(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Reset the counts of a backdoor's successes."""
        self._success = torch.zeros(2)

    on_test_epoch_start = on_validation_epoch_start  # type: ignore[assignment]  # narrows pl_module

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: FederatedModule) -> None:  # type: ignore[override]  # narrows pl_module
        """Log the success rate of a backdoor."""
        if isinstance(self.attack, Backdoor) and self._success[1] and not trainer.sanity_checking:
            split = "test" if trainer.testing else pl_module.data.fit_split
            pl_module.log(f"{split}/attack_success", float(self._success[0] / self._success[1]))

    on_test_epoch_end = on_validation_epoch_end  # type: ignore[assignment]  # narrows pl_module


def split_rows(pl_module: FederatedModule, cohort: Cohort) -> tuple[list[int], list[int]]:
    """Return the rows of the round's attackers, and the rows of its honest clients."""
    attacks = [callback for callback in pl_module.federated_callbacks if isinstance(callback, Byzantine)]
    bad = sorted({row for attack in attacks for row in attack.rows(cohort)})
    return bad, [row for row in range(len(cohort)) if row not in bad]


def attackers(clients: int | float | Sequence[int], num_clients: int) -> list[int]:
    """Return the attackers' ids from the setting ``Byzantine.clients``.

    Args:
        clients: Number of attackers, their fraction of all clients (a float), or their ids.
        num_clients: Number of all clients.

    Raises:
        ConfigurationError: An id does not exist, or all clients attack.
    """
    if isinstance(clients, float):
        check_number("Byzantine.clients", clients, " as a share, or a whole number", least=0, below=1)
        share, clients = clients, math.floor(clients * num_clients + 1e-9)
        if share and not clients:
            raise ConfigurationError(
                f"Byzantine.clients: {share} of {num_clients} clients is less than one; use {1 / num_clients:.2g} or more, or 0"
            )
    first, chosen = (num_clients - clients, []) if isinstance(clients, int) else (num_clients, clients)
    ids = sorted({*range(first, num_clients), *chosen})
    if first > num_clients or len(ids) >= num_clients or not {*ids} <= {*range(num_clients)}:
        raise ConfigurationError(
            f"Byzantine.clients: {clients} of {num_clients} clients: use ids from 0 to {num_clients - 1}, and leave one honest"
        )
    return ids
