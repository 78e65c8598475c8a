"""AdaBN: Li et al., "Revisiting Batch Normalization For Practical Domain Adaptation", arXiv 1603.04779."""

from collections.abc import Mapping

import lightning as L

from fl_lightning import FederatedModule
from fl_lightning.batch_norm import require_batch_norm
from fl_lightning.methods import Adaptation, Observer, VariantEvaluation, adapt_statistics


class AdaBN(Observer, VariantEvaluation):
    """AdaBN: evaluation with BN statistics of the evaluated data, without labels (Algorithm 1).

    One pass over the data measures the statistics
    (:func:`~fl_lightning.methods.own_data.adapt_statistics`). The evaluation then uses the measured
    statistics as running statistics. Training does not change.

    - ``val/accuracy_adabn``: accuracy with statistics of the server's evaluation data.
    - ``val/own_accuracy_adabn``: mean accuracy of the clients on their own evaluation data, with
      the statistics of these data.

    In ``test`` the names of the metrics begin with ``test/``.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> state = train(small_cnn(), blobs(), rounds=2, callbacks=[AdaBN()])
        >>> distance(state, train(small_cnn(), blobs(), rounds=2))  # training is FedAvg
        0.0
    """

    paper = "Li et al., arXiv 1603.04779 (an observer: evaluation only)"

    def configure_batch_norm(self, pl_module: FederatedModule) -> None:
        """Raise an error if the model has no running statistics."""
        require_batch_norm(pl_module.model, "AdaBN")

    def variants(self, trainer: L.Trainer, pl_module: FederatedModule) -> Mapping[str, Adaptation]:
        """Return the variant ``adabn``: a function that replaces a model's BN statistics."""
        return {"adabn": adapt_statistics}
