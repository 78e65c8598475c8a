"""Clipping of clients' gradients.

Pascanu et al., "On the difficulty of training recurrent neural networks", arXiv 1211.5063, and Brock et
al., "High-Performance Large-Scale Image Recognition Without Normalization", arXiv 2102.06171.
"""

import math

import lightning as L
import torch

from fl_lightning import Cohort, ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.cohort import LAST_LAYER, match_parts
from fl_lightning.errors import check_number


class ClientGradientClipping(FederatedCallback):
    """Clipping of each client's gradient to a norm of at most ``max_norm``.

    The norm is computed over all parameters of a client, as in ``torch.nn.utils.clip_grad_norm_``.
    Parameters that a method lets rest in a local step are left out, such as the body in FedRep's
    steps of the head.

    The order of the callbacks matters. After FedProx or SCAFFOLD in the list, this callback clips
    the corrected gradient. Before FedProx or SCAFFOLD, it clips the gradient of the loss.

    Adaptive gradient clipping (Brock et al., arXiv 2102.06171, eq. 3) limits the gradient G_i of each
    output unit in relation to the unit's weights W_i: ``|G_i| <= max_norm max(|W_i|, 1e-3)``. The
    units of a parameter are the slices of its first dimension. A parameter with one dimension is a
    single unit. The last layer is not clipped. Adaptive clipping is for networks without norm layers,
    such as those with ``norm: scaled_ws``.

    Args:
        max_norm: Largest norm, above 0. With infinity, no gradient changes. The adaptive clipping of
            Brock et al. uses 0.01.
        norm: Order p of the norm, above 0. ``.inf`` means the largest absolute entry.
        adaptive: Whether to use adaptive gradient clipping.

    Raises:
        ConfigurationError: A setting is out of range, or a later callback lets parameters rest.

    Example:
        >>> from fl_lightning.testing import blobs, distance, small_cnn, train
        >>> start = {name: value.double() for name, value in small_cnn().state_dict().items()}
        >>> state = train(small_cnn(), blobs(), rounds=1, callbacks=[ClientGradientClipping(max_norm=1e-6)])
        >>> distance({"weight": state["8.weight"]}, {"weight": start["8.weight"]}) < 1e-7
        True
    """

    paper = "Pascanu et al., arXiv 1211.5063"
    examples = ({"max_norm": 1.0}, {"max_norm": 0.05, "adaptive": True})

    def __init__(self, max_norm: float, norm: float = 2.0, adaptive: bool = False) -> None:
        check_number("ClientGradientClipping.max_norm", max_norm, " (.inf is possible)", above=0)
        check_number("ClientGradientClipping.norm", norm, " (.inf is possible)", above=0)
        self.max_norm, self.norm, self.adaptive = max_norm, norm, adaptive
        self._clipped: set[str] = set()

    def on_after_local_backward(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Clip the gradients of the clients that take this local step."""
        if math.isinf(self.max_norm):
            return
        if self.adaptive:
            self._clip_units(pl_module, cohort)
            return
        rows = cohort.index(cohort.active_rows())
        trained = [name for name in cohort.grads.blocks if cohort.is_trained(name)]
        self._clipped = {name for name in trained if name not in cohort.resting}
        blocks = [block for name, block in cohort.grads.blocks.items() if name in self._clipped]
        norms = torch.stack([torch.linalg.vector_norm(block[rows], self.norm, dim=1) for block in blocks])
        # torch's clip_grad_norm_ also adds 1e-6
        scales = self.max_norm / (torch.linalg.vector_norm(norms, self.norm, dim=0) + 1e-6)
        for block in blocks:
            block[rows] *= scales.clamp(max=1.0).to(block.dtype).unsqueeze(1)

    def _clip_units(self, pl_module: FederatedModule, cohort: Cohort) -> None:
        head = match_parts(pl_module.model, [LAST_LAYER])
        for name, gradients in cohort.grads.items():
            if name not in head:
                gradients = gradients.unsqueeze(-1)  # a parameter without dimensions is a unit too
                units = [*range(2 if gradients.dim() > 3 else 1, gradients.dim())]
                weights = cohort.params[name].unsqueeze(-1)
                limit = torch.linalg.vector_norm(weights, self.norm, units, True).clamp(min=1e-3)
                found = torch.linalg.vector_norm(gradients, self.norm, units, True) / self.max_norm
                gradients *= (limit / found).clamp(max=1.0)

    def on_local_step_end(
        self, trainer: L.Trainer, pl_module: FederatedModule, cohort: Cohort, step: int
    ) -> None:
        """Raise an error if the norm includes parameters that rest."""
        if self._clipped & cohort.resting:
            raise ConfigurationError(
                "ClientGradientClipping: its norm includes parameters that a later callback lets rest; put that callback, such "
                "as FedRep, before ClientGradientClipping in trainer.callbacks"
            )
