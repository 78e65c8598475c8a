"""Client optimizer and schedule from a LightningModule's ``configure_optimizers``."""

import inspect
import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt
from torch.optim import Optimizer

from fl_lightning.cohort.rows import parameter_groups
from fl_lightning.errors import ConfigurationError


class ConfiguredOptimizer:
    """The client optimizer that ``configure_optimizers`` describes.

    The optimizer's class, defaults and groups are used for the clients' stacked parameters. The
    optimizer of the module itself takes no step: its schedulers change its settings, which the
    clients' optimizer copies before each local step.

    Args:
        module: The module.

    Attributes:
        groups: Name of the parameter group of each parameter. Parameters that are in no group of
            the optimizer are missing.
        has_hooks: Whether the optimizer has hooks after its step.
        needs_closure: Whether its step needs a function that computes the loss again.
        settings: Settings by name of the parameter group that differ from those of the first group.

    Raises:
        ConfigurationError: The optimizer or a scheduler is not supported.
    """

    def __init__(self, module: L.LightningModule) -> None:
        place = f"{type(module).__name__}.configure_optimizers"
        try:
            optimizers, schedulers, monitor = _configure_optimizers(module.configure_optimizers())  # type: ignore[arg-type]  # None is refused
            self._schedulers = _configure_schedulers_automatic_opt(schedulers, monitor)
        except MisconfigurationException as error:
            reason = str(error).splitlines()[0].partition(" Output from")[0]
            raise ConfigurationError(
                f"{place}: {reason} Return an optimizer, alone or with schedulers."
            ) from error
        if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
            raise ConfigurationError(
                f"{place}: {len(optimizers)} optimizers; a client has one optimizer of torch"
            )
        self._optimizer: Optimizer = optimizers[0]
        if any(config.reduce_on_plateau for config in self._schedulers):
            raise ConfigurationError(
                f"{place}: ReduceLROnPlateau reads metrics, which clients do not share; use a schedule over steps or epochs"
            )
        closure = inspect.signature(type(self._optimizer).step).parameters.get("closure")
        self.needs_closure = closure is not None and closure.default is inspect.Parameter.empty
        self.has_hooks = bool(self._optimizer._optimizer_step_post_hooks)
        if self._optimizer._optimizer_step_pre_hooks:
            raise ConfigurationError(
                f"{place}: hooks of the optimizer's step that come before it would be called after the backward pass, unlike in Lightning; use on_train_batch_start"
            )
        self.template = self._optimizer
        self._taken = [0 for _ in self._schedulers]
        self._changed = {"lr"} if self._schedulers else set[str]()
        self._known = [dict(group) for group in self._optimizer.param_groups]
        names = {parameter: name for name, parameter in module.named_parameters()}
        kinds = parameter_groups(module, {})
        self.groups: dict[str, str] = {}
        self._group_of: dict[str, dict[str, Any]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in names:
                    raise ConfigurationError(
                        f"{place}: a parameter {[*parameter.shape]} of the optimizer would not be trained, as it belongs to no "
                        "part of the module; make its layer an attribute, or use nn.ModuleList in place of a list"
                    )
                if (name := names.get(parameter)) in kinds:
                    label = kinds[name] + (f"_{number}" if number else "")
                    self.groups[name], self._group_of[label] = label, group
        self._first = {key: self._optimizer.param_groups[0][key] for key in self._optimizer.defaults}
        self.settings = {
            label: {key: group[key] for key, value in self._first.items() if group[key] != value}
            for label, group in self._group_of.items()
        }

    def group(self, label: str) -> dict[str, Any]:
        """Return the settings of a parameter group of this name."""
        return self._group_of[label]

    def make(self, parameters: Iterable[Any]) -> Optimizer:
        """Return a new optimizer of the same class, with the settings of the first group."""
        kind = type(self._optimizer)
        accepted = inspect.signature(kind).parameters
        return kind(parameters, **{key: value for key, value in self._first.items() if key in accepted})

    def scheduled(self, rounds: int, local_steps: int, step: int) -> dict[str, dict[str, Any]]:
        """Return the settings that schedulers change, by name of the parameter group.

        Args:
            rounds: Number of complete rounds.
            local_steps: Local steps of the client with the most local steps in a round.
            step: The current local step, from 0.
        """
        if changed := self._changes():
            raise ConfigurationError(
                f"configure_optimizers: a hook or step changed {min(changed)!r} of the optimizer, which no checkpoint contains; change it by "
                "a scheduler, such as LambdaLR"
            )
        for number, config in enumerate(self._schedulers):
            every = config.frequency
            # as Lightning, which counts steps from the start of each epoch
            by_step = rounds * (local_steps // every) + min(step, local_steps) // every
            due = by_step if config.interval == "step" else rounds // every
            with warnings.catch_warnings():
                # the module's own optimizer takes no steps
                warnings.filterwarnings("ignore", ".*lr_scheduler.step.*before.*optimizer.step")
                try:
                    for _ in range(due - self._taken[number]):
                        config.scheduler.step()  # type: ignore[call-arg]  # only ReduceLROnPlateau takes a metric
                except ValueError as error:
                    name = type(config.scheduler).__name__
                    raise ConfigurationError(
                        f"configure_optimizers: {name} ends before the run: {error}"
                    ) from error
            self._taken[number] = due
        if changed := self._changes():
            self._changed |= changed
            self._known = [dict(group) for group in self._optimizer.param_groups]
        keys = self._changed & self._optimizer.defaults.keys()
        return {label: {key: group[key] for key in keys} for label, group in self._group_of.items() if keys}

    def _changes(self) -> set[str]:
        pairs = zip(self._known, self._optimizer.param_groups, strict=True)
        return {key for old, new in pairs for key in old if key != "params" and old[key] != new[key]}


def configured(module: L.LightningModule) -> Optimizer:
    """Return the optimizer that a copy of the module configures."""
    optimizers, _, _ = _configure_optimizers(module.configure_optimizers())  # type: ignore[arg-type]  # checked before
    optimizer: Optimizer = optimizers[0]
    return optimizer
