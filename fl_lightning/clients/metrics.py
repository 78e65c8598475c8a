"""Evaluation of the torchmetrics in the setting ``model.metrics``."""

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from math import nan
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum
from torchmetrics.utilities.prints import rank_zero_only

from fl_lightning.clients.class_metrics import NAMED
from fl_lightning.errors import ConfigurationError

MetricSetting = Literal[None] | Callable[[], Metric]  # noqa: PYI061 (jsonargparse tries None last, and writes no null)
"""A torchmetrics class, a function that makes a metric, or a metric object.

None is allowed for the names in :data:`~fl_lightning.clients.class_metrics.NAMED`.
"""

MetricState = dict[str, Any] | tuple[Tensor, Tensor]
"""State of a metric: a dict of tensors, or a pair of outputs and targets of a batch."""


_EXACT = {dim_zero_sum, dim_zero_max, dim_zero_min, dim_zero_cat}

_PREFIXES = ("personal_", "own_", "client_", "pooled_")
"""Prefixes of the metrics that callbacks log."""


def check_names(settings: Mapping[str, MetricSetting], task: Any) -> Mapping[str, MetricSetting]:
    """Check the names in the setting ``model.metrics``, and return the setting.

    Raises:
        ConfigurationError: A name is not an identifier, or the task already has a metric of this
            name, or an unknown name has no metric.
    """
    for name, setting in settings.items():
        is_name = isinstance(name, str) and name.isidentifier()
        if not is_name or name in ("loss", *task.shown) or name.startswith(_PREFIXES):
            raise ConfigurationError(
                f"model.metrics: {name!r} is {'taken' if is_name else 'no name'}; use letters, digits and _, and neither "
                f"{', '.join(['loss', *task.shown])} nor a name that begins with {', '.join(_PREFIXES)}"
            )
        if setting is None and name not in NAMED:
            raise ConfigurationError(
                f"model.metrics.{name}: a name without a metric; give a class of torchmetrics, or one of the names {', '.join(NAMED)}"
            )
    return settings


def make_metrics(settings: Mapping[str, MetricSetting], num_classes: int | None) -> dict[str, Metric]:
    """Make the metrics of a run.

    Args:
        settings: The settings by the metric's name.
        num_classes: Number of classes of the data; None if unknown. Metrics that require
            ``num_classes`` get this number.

    Raises:
        ConfigurationError: A setting does not make a metric.
    """
    return {name: _made(name, setting, num_classes) for name, setting in settings.items()}


def _made(name: str, setting: MetricSetting, num_classes: int | None) -> Metric:
    if setting is None:
        if num_classes is None:
            raise ConfigurationError(
                f"model.metrics.{name}: the data have no classes (integer targets); leave {name} out"
            )
        setting = partial(NAMED[name], num_classes)
    with _errors_of(name):
        metric: Any = deepcopy(setting) if isinstance(setting, Metric) else _called(setting, num_classes)
    if not isinstance(metric, Metric):
        raise ConfigurationError(
            f"model.metrics.{name}: {type(metric).__name__} is no metric; give a class of torchmetrics"
        )
    keep_states_apart(metric)  # ServerEvaluation exchanges the states between ranks
    # not set_dtype, which would also convert integer counts
    metric._apply(lambda x: x.double() if x.is_floating_point() else x)
    return metric


def keep_states_apart(module: nn.Module) -> None:
    """Stop the metrics in a module from exchanging their states between ranks."""
    for metric in module.modules():
        if isinstance(metric, Metric):
            metric.distributed_available_fn = bool  # returns False, and can be pickled


def _called(make: Callable[..., Metric], num_classes: int | None) -> Metric:
    try:
        return make()
    except (TypeError, ValueError) as error:
        if num_classes is None and "num_classes" in str(error):
            raise ValueError(f"{error} The data have no classes (integer targets).") from None
        first = error
    try:  # also if the error does not name num_classes, such as torch's error for a size of None
        return make(num_classes=num_classes)
    except (TypeError, ValueError) as second:
        raise (first if num_classes is None or "num_classes" in str(second) else second) from None


def measure_batch(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> dict[str, MetricState]:
    """Return the state of each metric after one batch.

    For a batch without targets, the dict is empty. If the states of a metric cannot be merged, the
    state is the pair (outputs, targets).

    Args:
        metrics: The metrics by name. The states of these metrics are overwritten.
        outputs: The outputs that the task evaluates, such as probabilities ``[n, classes]``.
        targets: The targets, such as labels ``[n]``.

    Raises:
        ConfigurationError: A metric cannot be computed from these outputs and targets.
    """
    # sums of squares in float32 have too few digits for an R2 of targets far from 0, such as years
    outputs, targets = (x.double() if x.is_floating_point() else x for x in (outputs, targets))
    states: dict[str, MetricState] = {}
    for name, metric in metrics.items() if len(targets) else ():
        given = outputs
        if type(metric).__name__.startswith("Binary") and outputs.dim() == 2 and outputs.shape[1] == 2:
            given = outputs[:, 1]
        metric.to(given.device).reset()
        shapes = f"outputs {[*given.shape]} and targets {[*targets.shape]}"
        with _errors_of(name, f"{type(metric).__name__} cannot be computed from {shapes}: "):
            metric.update(given, targets)
        # copy lists, because reset would empty the lists in place
        state = {key: [*x] if isinstance(x, list) else x for key, x in metric.metric_state.items()}
        states[name] = state if _merges(metric) else (given, targets)
    return states


def sums_integers(metric: Metric) -> bool:
    """Return whether all states of a metric are integer sums.

    Such sums do not depend on the order of the batches.
    """
    if not _merges(metric) or any(reduction is not dim_zero_sum for reduction in metric._reductions.values()):
        return False
    return not any(isinstance(x, list) or x.is_floating_point() for x in metric.metric_state.values())


def _merges(metric: Metric) -> bool:
    """Return whether ``merge_state`` combines the states of batches.

    A mean of states would need the number of their batches. A metric that wraps a metric has no
    states.
    """
    reductions = [*metric._reductions.values()]  # private: torchmetrics has no other way to read them
    return metric.full_state_update is False and bool(reductions) and _EXACT.issuperset(reductions)


def compute(metric: Metric, name: str, states: Sequence[MetricState]) -> dict[str, float | list[Any]]:
    """Compute a metric on the CPU from the states of all batches.

    The states are merged in the order of the batches.

    Returns:
        A dict with the value under the key ``name``. If the metric has several values, the keys are
        ``<name>_<key>``. Tensors with several elements become nested lists. Undefined values are
        NaN, see :func:`defined_value`.

    Raises:
        ConfigurationError: The metric cannot be computed.
    """
    metric.to("cpu").reset()
    with _errors_of(name, f"{type(metric).__name__} cannot be computed: "):
        for state in states:
            if isinstance(state, tuple):
                metric.update(*state)
                continue
            earlier = metric.metric_state
            for key, value in state.items():
                setattr(metric, key, value)
            metric.merge_state(earlier)
        value = defined_value(metric)
    metric.reset()
    named = {f"{name}_{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {name: value}
    return {key: _plain(x) for key, x in named.items()}


def defined_value(
    metric: Metric, compute: Callable[[], Any] | None = None, undefined: list[Metric] | None = None
) -> Any:
    """Compute a metric, with NaN in place of an undefined value.

    A metric such as AUROC is undefined if the targets lack a class that counts. torchmetrics warns,
    and computes the metric with 0.

    Args:
        metric: The metric.
        compute: The metric's method ``compute``. Default: ``metric.compute``.
        undefined: List to which the metric is added if its value is undefined.
    """
    # a weighted mean gives an absent class the weight 0
    absent = "negative" if getattr(metric, "average", None) == "weighted" else "(positive|negative)"
    state = vars(rank_zero_only)
    rank, state["rank"] = state["rank"], 0  # torchmetrics warns on rank 0 only
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            value = (compute or metric.compute)()
    finally:
        state["rank"] = rank
    if not any(re.match(f"No {absent} samples", str(x.message)) for x in caught):
        for x in caught:
            warnings.warn_explicit(x.message, x.category, x.filename, x.lineno)
        return value
    if undefined is not None:
        undefined.append(metric)
    for part in metric.modules():
        if isinstance(part, Metric):
            part._computed = None  # a kept value would be returned without a warning
    return tree_map_only(Tensor, lambda x: x * nan, value)


@contextmanager
def undefined_is_nan(metrics: Iterable[Metric]) -> Iterator[list[Metric]]:
    """Let ``compute`` of the metrics return the :func:`defined_value` in the ``with`` block.

    Yields:
        A list, to which each metric with an undefined value is added.
    """
    undefined: list[Metric] = []
    usual = [(metric, metric.compute) for metric in metrics]
    try:
        for metric, compute in usual:
            vars(metric)["compute"] = partial(defined_value, metric, compute, undefined)
        yield undefined
    finally:
        for metric, compute in usual:
            vars(metric)["compute"] = compute


def _plain(value: Any) -> float | list[Any]:
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    value = torch.as_tensor(value)
    return float(value) if value.numel() == 1 else value.tolist()


@contextmanager
def _errors_of(name: str, words: str = "") -> Iterator[None]:
    """Add the name of the metric to errors of torchmetrics in the ``with`` block.

    Warnings about memory use and absent classes are hidden.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    except (RuntimeError, TypeError, ValueError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise ConfigurationError(f"model.metrics.{name}: {words}{reason}") from error
