"""Users' torchmetrics in an evaluation on any number of ranks."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_sum

from fl_lightning.errors import ConfigurationError

MetricSetting = Callable[[], Metric]
"""A torchmetrics class, a function that makes a metric, or a metric object."""

State = dict[str, Any]
"""State of a metric: tensors and lists of tensors by name, and the number of batches."""

_COUNT = "batches"
_INPUTS = "inputs"


def check_names(settings: Mapping[str, MetricSetting], task: Any) -> Mapping[str, MetricSetting]:
    """Check the names of the user's metrics, and return the settings.

    Raises:
        ConfigurationError: The task already has a metric of a name, or a name is no identifier.
    """
    for name in settings:
        if not name.isidentifier() or name in ("loss", *task.shown):
            raise ConfigurationError(
                f"model.metrics: {name!r} is {'taken' if name.isidentifier() else 'no name'}; use letters, digits and _, and neither "
                f"{', '.join(['loss', *task.shown])}"
            )
    return settings


def make_metrics(settings: Mapping[str, MetricSetting], num_classes: int | None) -> dict[str, Metric]:
    """Make the metrics of a run.

    Args:
        settings: The settings by the metric's name.
        num_classes: Number of classes of the data, None if unknown. It is passed to a metric that
            cannot be made without ``num_classes``.

    Raises:
        ConfigurationError: A setting makes no metric.
    """
    return {name: _made(name, setting, num_classes) for name, setting in settings.items()}


def _made(name: str, setting: MetricSetting, num_classes: int | None) -> Metric:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns about memory use
            metric: Any = deepcopy(setting) if isinstance(setting, Metric) else _called(setting, num_classes)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"model.metrics.{name}: {error}") from error
    if not isinstance(metric, Metric):
        raise ConfigurationError(
            f"model.metrics.{name}: {type(metric).__name__} is no metric; give a class of torchmetrics"
        )
    metric.sync_on_compute = metric._to_sync = False  # ServerEvaluation exchanges the states
    metric._dtype_convert = True  # set_dtype would also convert integer counts
    metric._apply(lambda x: x.double() if x.is_floating_point() else x)
    metric._dtype_convert = False
    return metric


def _called(make: Callable[..., Metric], num_classes: int | None) -> Metric:
    try:
        return make()
    except (TypeError, ValueError) as error:
        if num_classes is None:
            raise
        try:
            return make(num_classes=num_classes)
        except (TypeError, ValueError) as second:
            # the second error may only say that the metric has no argument num_classes
            raise (error if "num_classes" in str(second) else second) from None


def measure(metrics: Mapping[str, Metric], outputs: Tensor, targets: Tensor) -> dict[str, State]:
    """Return the state of each metric after one batch; empty for a batch without targets.

    Args:
        metrics: The metrics by name; the states of these objects are overwritten.
        outputs: The outputs that the task evaluates, such as probabilities ``[n, classes]``.
        targets: The targets, such as labels ``[n]``.

    Raises:
        ConfigurationError: A metric cannot be computed from these outputs and targets.
    """
    states: dict[str, State] = {}
    for name, metric in metrics.items() if len(targets) else ():
        given = outputs
        if type(metric).__name__.startswith("Binary") and outputs.dim() == 2 and outputs.shape[1] == 2:
            given = outputs[:, 1]
        if metric.device != given.device:
            metric.to(given.device)
        metric.reset()
        try:
            metric.update(given, targets)
        except (RuntimeError, TypeError, ValueError) as error:
            raise _misfit(name, metric, given, targets, error) from error
        states[name] = (
            _state(metric) if _merges(metric) else {_INPUTS: [(given.cpu(), targets.cpu())], _COUNT: 1}
        )
    return states


def append(
    states: dict[str, list[tuple[int, State]]],
    metrics: Mapping[str, Metric],
    batch: int,
    new: Mapping[str, State],
    merge: bool,
) -> None:
    """Append a batch's states to the states of earlier batches, or merge them.

    Args:
        states: Pairs (batch number, state) by metric. A merged state has the number of its first
            batch.
        metrics: The metrics by name; the states of these objects are overwritten.
        batch: The number of the batch.
        new: The states of the batch.
        merge: Whether to merge the states at once. That is possible if this rank evaluates all
            batches.
    """
    for name, state in new.items():
        entries = states.setdefault(name, [])
        if entries and (merge or _is_exact(metrics[name])):
            first, earlier = entries.pop()
            entries.append((first, _merged(metrics[name], earlier, state)))
        else:
            entries.append((batch, state))


def compute(metric: Metric, name: str, entries: Iterable[tuple[int, State]]) -> dict[str, float | list[Any]]:
    """Compute a metric from the states of all batches, which are merged in order of the batches.

    Returns:
        The value under ``name``. A metric with several values has each value under
        ``<name>_<key>``. Tensors with several elements become nested lists.

    Raises:
        ConfigurationError: The metric cannot be computed.
    """
    states = [state for _, state in sorted(entries, key=lambda entry: entry[0])]
    if metric.device.type != "cpu":
        metric.to("cpu")
    whole = states[0]
    for state in states[1:]:
        whole = _merged(metric, whole, state)
    metric.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchmetrics warns about absent classes
            for outputs, targets in whole.get(_INPUTS, ()):
                metric.update(outputs, targets)
            if _INPUTS not in whole:
                _load(metric, whole)
            value = metric.compute()
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"model.metrics.{name}: {type(metric).__name__} cannot be computed: {error}"
        ) from error
    metric.reset()
    named = {f"{name}_{key}": x for key, x in value.items()} if isinstance(value, Mapping) else {name: value}
    return {key: _plain(x) for key, x in named.items()}


def directions(metrics: Mapping[str, Metric]) -> dict[str, str]:
    """Return ``"max"`` or ``"min"`` for each metric that declares ``higher_is_better``."""
    known = {name: metric.higher_is_better for name, metric in metrics.items()}
    return {name: "max" if higher else "min" for name, higher in known.items() if higher is not None}


def on_cpu(state: State) -> State:
    """Return a state with its tensors on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        return type(value)(map(moved, value)) if isinstance(value, list | tuple) else value

    return {name: moved(value) for name, value in state.items()}


def _plain(value: Any) -> float | list[Any]:
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    value = torch.as_tensor(value)
    return float(value) if value.numel() == 1 else value.tolist()


def _merges(metric: Metric) -> bool:
    """Return whether the states of batches can be merged.

    If not, the outputs and targets of all batches are kept, and the metric is computed from these.
    """
    reductions = [*metric._reductions.values()]  # empty for a wrapper of another metric
    return metric.full_state_update is False and bool(reductions) and all(map(callable, reductions))


def _is_exact(metric: Metric) -> bool:
    """Return whether all states are sums of integers, which do not depend on the batches' order."""
    return _merges(metric) and all(
        reduction is dim_zero_sum and isinstance(default, Tensor) and not default.is_floating_point()
        for reduction, default in zip(metric._reductions.values(), metric._defaults.values(), strict=True)
    )


def _state(metric: Metric) -> State:
    copied = {name: list(x) if isinstance(x, list) else x for name, x in metric.metric_state.items()}
    return {**copied, _COUNT: metric._update_count}


def _load(metric: Metric, state: State) -> None:
    for name, value in state.items():
        if name != _COUNT:
            setattr(metric, name, list(value) if isinstance(value, list) else value)
    metric._update_count = state[_COUNT]
    metric._computed = None


def _merged(metric: Metric, earlier: State, later: State) -> State:
    if _INPUTS in later:
        return {
            _INPUTS: [*earlier[_INPUTS], *later[_INPUTS]],
            _COUNT: earlier[_COUNT] + later[_COUNT],
        }
    metric.reset()
    _load(metric, {**later, _COUNT: earlier[_COUNT] + later[_COUNT]})
    metric.merge_state({name: value for name, value in earlier.items() if name != _COUNT})
    return _state(metric)


def _misfit(
    name: str, metric: Metric, outputs: Tensor, targets: Tensor, error: Exception
) -> ConfigurationError:
    return ConfigurationError(
        f"model.metrics.{name}: {type(metric).__name__} cannot be computed from outputs {[*outputs.shape]} and targets "
        f"{[*targets.shape]}: {str(error).splitlines()[0]}"
    )
