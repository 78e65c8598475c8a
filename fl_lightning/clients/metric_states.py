"""States of the metric objects of a module: one state for each client, merged in order of the clients."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchmetrics import MaxMetric, Metric, MinMetric
from torchmetrics.utilities import dim_zero_mean
from torchmetrics.wrappers import Running
from torchmetrics.wrappers.abstract import WrapperMetric

from fl_lightning.errors import ConfigurationError

_UPDATES = "number of updates"  # no state has this name

MetricStates = dict[str, dict[str, Any]]
"""State of each metric that has been updated, by the metric's name in the module."""


class MetricObjects:
    """The metric objects of a module.

    Args:
        module: The module.

    Attributes:
        metrics: The metrics by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.metrics = {name: part for name, part in module.named_modules() if isinstance(part, Metric)}

    @property
    def updated(self) -> str | None:
        """Name of a metric that has been updated since the last reset; None if there is none."""
        return next((name for name, metric in self.metrics.items() if metric.update_called), None)

    def reset(self) -> None:
        """Reset all metrics."""
        for metric in self.metrics.values():
            metric.reset()

    def take(self) -> MetricStates:
        """Return the state of each updated metric, and reset all metrics."""
        # copy lists, because reset empties them in place
        states = {
            name: {key: [*x] if isinstance(x, list) else x for key, x in _state(metric).items()}
            | {_UPDATES: metric._update_count}
            for name, metric in self.metrics.items()
            if metric.update_called
        }
        self.reset()
        return states

    def take_best(self, logged: Mapping[str, Any]) -> MetricStates:
        """Return the states of best values, and reset all metrics.

        Metrics that are logged as objects have no state, because Lightning resets them.
        """
        reset = {each.metric for each in logged.values()}
        best = {name for name, x in self.metrics.items() if isinstance(x, MaxMetric | MinMetric)} - reset
        return {name: state for name, state in self.take().items() if name in best}

    def put(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Reset all metrics, and set the given states."""
        self.reset()
        for name, state in states.items():
            metric = self.metrics[name]
            # public ways do not set a state: merge_state combines it, load_state_dict needs persistent states
            metric._update_count, metric._computed = state[_UPDATES], None
            for key, value in state.items():
                if key == _UPDATES:
                    continue
                setattr(metric, key, [*value] if isinstance(value, list) else value.to(metric.device))

    def merged(self, parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> MetricStates:
        """Return the states of several steps or clients together, in their order.

        Raises:
            ConfigurationError: The states of a metric cannot be merged.
        """
        self.reset()
        for part in parts:
            earlier = self.take()
            self.put({**earlier, **part})
            for name in (name for name, state in earlier.items() if len(state) > 1 and name in part):
                metric, state = self.metrics[name], earlier[name]
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore", UserWarning)
                        metric.merge_state({key: value for key, value in state.items() if key != _UPDATES})
                except (RuntimeError, TypeError) as error:
                    kind = type(self.metrics[name]).__name__
                    raise ConfigurationError(
                        f"model: the states of several clients of the metric {name!r} ({kind}) cannot be merged; set "
                        f"full_state_update = False in {kind} if its states add up, or update it in validation_step only"
                    ) from error
                # merge_state counts every state as one update
                counts = state[_UPDATES], part[name][_UPDATES]
                metric._update_count = sum(counts)
                for key, reduction in metric._reductions.items():
                    if reduction is dim_zero_mean:
                        parts_of_mean = state[key] * counts[0] + part[name][key] * counts[1]
                        setattr(metric, key, parts_of_mean / metric._update_count)
        return self.take()

    def refuse_running(self) -> None:
        """Refuse an updated metric of the last few updates, which has no value over several clients."""
        for name, metric in self.metrics.items():
            if isinstance(metric, Running) and metric._num_vals_seen:  # update_called knows no update of it
                raise ConfigurationError(
                    f"model: training_step updates the metric {name!r}, a Running metric of the last steps, which has no value over several "
                    "clients; update it in validation_step only, or use the metric that it wraps"
                )


def _state(metric: Metric) -> dict[str, Any]:
    # a wrapper has the state of the metric that it wraps, which is another metric of the module
    return {} if isinstance(metric, WrapperMetric) else metric.metric_state
