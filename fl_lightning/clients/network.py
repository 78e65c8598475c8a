"""A network whose loss and client optimizer are settings of the federated module."""

from typing import Any

from torch import Tensor

from fl_lightning.clients.evaluation import ServerEvaluation
from fl_lightning.clients.label_weights import ignored_label, label_weights, weights_of
from fl_lightning.clients.outputs import check_before_training, check_outputs
from fl_lightning.clients.task import ClientSettings, ClientTask
from fl_lightning.clients.tasks import Classification
from fl_lightning.errors import ConfigurationError
from fl_lightning.optimizers.checks import check_elementwise, check_overrides


class NetworkTask(ClientTask):
    """A network that clients train by a loss of its outputs.

    Batches are pairs (inputs, targets). For other batches, override :meth:`client_loss` and
    :meth:`evaluate_batch` in a subclass, and give ``FederatedModule`` an object of the subclass.

    Args:
        model: The network.

    Example:
        >>> class TwoViews(NetworkTask):
        ...     def client_loss(self, batch):
        ...         first, second, targets = batch
        ...         return self.loss(self.model(first), targets) + self.loss(self.model(second), targets)
    """

    def take_settings(self, given: ClientSettings) -> None:
        """Take the client optimizer, the loss and the task.

        Raises:
            ConfigurationError: The client optimizer is missing, or cannot train stacked clients.
        """
        if given.client_optimizer is None:
            raise ConfigurationError(
                "model.client_optimizer: required, as the model has no training_step of its own; use SGD with lr: 0.1, or another"
            )
        check_elementwise(given.client_optimizer)
        check_overrides(given.client_optimizer, given.parameter_groups)
        self.optimizer, self.parameter_groups = given.client_optimizer, given.parameter_groups
        ignored = ignored_label(given.loss)
        self.task = given.task or Classification(-100 if ignored is None else ignored)
        self.loss = given.loss or self.task.loss
        usual = (NetworkTask.client_loss, NetworkTask.evaluate_batch)
        self._has_scores = (type(self).client_loss, type(self).evaluate_batch) == usual

    def client_loss(self, batch: Any) -> Tensor:
        """Return a client's loss, a scalar."""
        inputs, targets = batch
        return self.loss(self.model(inputs), targets)

    def evaluate_batch(self, batch: Any, evaluation: ServerEvaluation) -> None:
        """Add the model's outputs on a batch to an evaluation.

        Each batch is evaluated on only one rank, and the ranks share only ``evaluation``. Update your
        own metrics in ``validation_step``, which every rank calls for every batch.
        """
        inputs, targets = batch
        outputs = self.model(inputs)
        if self._has_scores:
            check_outputs(self.run, outputs, targets)
        loss = self.loss(outputs, targets)
        weights = weights_of(label_weights(self.loss), outputs, targets, self.task.ignored)
        evaluation.update(outputs, targets, loss, self.task, weights)

    def start_training(self) -> None:
        """Check the number of outputs, and that the metrics can be computed."""
        if self._has_scores:
            check_before_training(self.run)
