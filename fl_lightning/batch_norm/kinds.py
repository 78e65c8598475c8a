"""The kinds of a model's state.

The type of a module decides the kind of its state; the name of the module has no effect. A method
declares what a round does with each kind. The kinds are:

=========== ==========================================================================
``weight``  trainable parameters outside of BN layers
``affine``  gamma and beta of BN layers
``mean``    running means of BN layers
``var``     running variances of BN layers
``counter`` ``num_batches_tracked`` of BN layers, int64
``buffer``  any other persistent buffer; a parameter without gradient that steps move
``scratch`` non-persistent buffers (such as dropout keys): never sent, never averaged
=========== ==========================================================================
"""

from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers

_BN_BUFFERS = {"running_mean": "mean", "running_var": "var", "num_batches_tracked": "counter"}


def parameter_kinds(model: nn.Module, untrained: bool = False) -> dict[str, str]:
    """Return the kind of each trainable parameter by name, in the order of ``named_parameters``.

    If ``untrained`` is True, parameters without ``requires_grad`` are included.
    """
    affine = {id(p) for layer in batch_norm_layers(model).values() for p in layer.parameters(recurse=False)}
    return {
        name: "affine" if id(parameter) in affine else "weight"
        for name, parameter in model.named_parameters()
        if untrained or parameter.requires_grad
    }


def moved_by_steps(parameter: Tensor, moved: bool = True) -> None:
    """Say whether clients' steps move a parameter without gradient, as a moving average of the weights."""
    parameter.is_moved_by_steps = moved  # type: ignore[attr-defined]  # a mark of our own on a tensor


def model_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that clients change without gradient, by name: buffers, and moved parameters."""
    moved = {n: x for n, x in model.named_parameters() if getattr(x, "is_moved_by_steps", False)}
    return {**dict(model.named_buffers()), **moved}


def buffer_kinds(model: nn.Module) -> dict[str, str]:
    """Return the kind of each tensor of :func:`model_buffers`, in this order."""
    layers = batch_norm_layers(model)
    kinds = {}
    for name in model_buffers(model):
        owner, _, attribute = name.rpartition(".")
        if owner in layers and attribute in _BN_BUFFERS:
            kinds[name] = _BN_BUFFERS[attribute]
        else:
            left_out = model.get_submodule(owner)._non_persistent_buffers_set
            kinds[name] = "scratch" if attribute in left_out else "buffer"
    return kinds


KINDS = ("weight", "affine", "mean", "var", "counter", "buffer")
"""Kinds of state that the server holds, in the order of the policy table."""


TREATMENTS = ("averaged", "max", "local", "frozen", "pooled", "discarded")
"""Treatments: what a round does with a kind of state.

- ``averaged``: The clients send the state, and the server aggregates it.
- ``max``: The clients send the state, and the server takes the maximum. This is the rule for
  counters.
- ``frozen``: The state does not change. Frozen parameters are not trained. BN layers with frozen
  statistics are in eval mode during training.
- ``local``: The clients keep the state and do not send it. The method stores and restores the state
  by ``Cohort.remember`` and ``Cohort.recall``. For evaluation, the server uses the mean of the
  state over the round's cohort.
- ``pooled``: The method aggregates the state itself.
- ``discarded``: The clients start from the server's state, and their changes are discarded after
  the round. Only the method changes the server's state. Each client receives the state in its first
  round, and after each change.
"""


KIND_LABELS = {
    "weight": "weights",
    "affine": "BN gamma, beta",
    "mean": "BN running mean",
    "var": "BN running variance",
    "counter": "BN batch counter",
    "buffer": "other buffers",
}
"""Label of each kind of state in tables and figures."""


def state_label(kind: str) -> str:
    """Return the label of a kind of state, or of a part of the model, in tables and figures."""
    return KIND_LABELS.get(kind, f"part {kind}")


STATISTICS = ("mean", "var", "counter")
"""Kinds of a BN layer's running statistics."""


JOINT_LABELS = KIND_LABELS | dict.fromkeys(STATISTICS, "BN statistics")
"""Labels for tables that show running means, running variances and counters in one row."""
