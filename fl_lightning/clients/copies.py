"""The copies of a LightningModule that are the clients of a round."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from fl_lightning.client_data.fingerprint import digest
from fl_lightning.clients.changes import APART, HOOKS, additions, changed, same_values
from fl_lightning.clients.configured_optimizer import configured
from fl_lightning.clients.metric_states import MetricObjects
from fl_lightning.clients.template import Template
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.slots import StateSlots
from fl_lightning.errors import ConfigurationError


class ClientCopy:
    """A client's copy of a LightningModule in one round.

    Args:
        module: The copy, whose parameters and buffers are views of the client's row.
        tensors: The copy's parameters and buffers by name.
        views: The views of the row by name.
        trained: Names of the trained parameters.
    """

    def __init__(
        self, module: Any, tensors: Mapping[str, Tensor], views: Mapping[str, Tensor], trained: Sequence[str]
    ) -> None:
        self.module, self.metrics = module, MetricObjects(module)
        self.trained = {name: tensors[name] for name in trained}
        self.own_attributes: set[str] = set()
        self.optimizer: Optimizer | None = None
        self._slots = StateSlots(module, tensors)
        self._places = [(name, tensors[name], view, view.data_ptr()) for name, view in views.items()]
        self._every = [tensor for tensor in tensors.values() if isinstance(tensor, nn.Parameter)]
        self.metrics.reset()

    def configure(self) -> Optimizer:
        """Return the copy's own optimizer. Attributes that ``configure_optimizers`` sets are its own."""
        before = dict(vars(self.module))
        optimizer = self.optimizer = configured(self.module)
        after = vars(self.module).items()
        self.own_attributes = {f".{name}" for name, value in after if before.get(name) is not value}
        return optimizer

    def clear_gradients(self) -> None:
        """Set all gradients to None, as Lightning does between a step's loss and its backward pass."""
        for parameter in self._every:
            parameter.grad = None

    def release(self) -> None:
        """Let go of the client's row, as a copy that holds itself lives until Python collects garbage."""
        for _, tensor, view, _ in self._places:
            tensor.data = view.new_empty(0)
        self._places = []

    def take_up(self) -> None:
        """Write tensors that a step has replaced into the row, and put the copy's tensors back.

        Raises:
            ConfigurationError: The shape of a tensor has changed.
        """
        for name, own, view, address in self._places:
            tensor = self._slots.get(name)
            if tensor is None:
                raise ConfigurationError(f"model: a step sets {name!r} to None; keep it a tensor")
            if tensor is own and tensor.data_ptr() == address and tensor.shape == view.shape:
                continue
            if tensor.shape != view.shape and tensor.numel() != 1:
                raise ConfigurationError(
                    f"model: the forward pass changes the shape of {name!r} from {list(view.shape)} to {list(tensor.shape)}; "
                    "make the model with the final shape"
                )
            view.copy_(tensor.detach())
            own.data = view
            self._slots.put(name, own)


def whole_copy(task: Any, tensors: Mapping[int, Tensor], dtype: torch.dtype | None = None) -> ClientCopy:
    """Return a copy of a module with tensors of its own.

    Args:
        task: What a client computes.
        tensors: Tensors of the copy by ``id`` of the module's tensor. Other tensors are copied.
        dtype: Type of the other floating-point tensors. Default: that of the module's tensors.
    """
    module = Template(task.module, task.shared_by_copies(), task.hooks_of_methods()).copy(tensors, dtype)
    module.trainer = task.module.trainer
    return ClientCopy(module, dict(module.named_parameters()), {}, ())


class SharedTensors:
    """Parameters and buffers that all clients share, as no step changes them.

    Args:
        module: The server's module.
        cohort: The clients.
    """

    def __init__(self, module: nn.Module, cohort: RoundCohort) -> None:
        own = {*cohort.params, *cohort.buffers}
        named = (*module.named_parameters(), *module.named_buffers())
        self.tensors = {name: tensor for name, tensor in named if name not in own}
        self._digests = {name: digest(tensor) for name, tensor in self.tensors.items()}

    def refuse_changed(self, place: str) -> None:
        """Refuse a change of a shared tensor.

        Args:
            place: Words for the round.

        Raises:
            ConfigurationError: A tensor has changed.
        """
        for name in (name for name, tensor in self.tensors.items() if digest(tensor) != self._digests[name]):
            raise ConfigurationError(
                f"model: {place}: a client's step changes {name!r} of the server's model, as a parameter without gradient is shared; "
                "make it a buffer (register_buffer), which every client has a copy of"
            )


class Traces:
    """Finds what steps of several clients at once change in the module that the clients share.

    Args:
        task: What a client computes.
        cohort: The clients.
        place: Words for the round.
        together: What computes the clients.
    """

    def __init__(self, task: Any, cohort: RoundCohort, place: str, together: str) -> None:
        self._place, self._together = place, together
        own = {id(x): x for x in (*task.module.parameters(), *task.module.buffers())}
        self._module, self._before = task.module, whole_copy(task, own).module
        self._layers = _layers(self._module)
        self._shared = SharedTensors(task.module, cohort)
        self._caches: dict[tuple[str, str], dict[Any, Any]] = {}

    @contextmanager
    def step(self, shapes: Any) -> Iterator[None]:
        """Watch the steps in this block. Changes by methods outside of it are no traces.

        If the block fails, the attributes are as before.

        Args:
            shapes: Shapes of the batch. For each, a cache must keep its values.
        """
        self._follow()
        held = [(x, shallow_copy(x)) for layer in self._layers.values() for x in layer.containers()]
        held += [(vars(layer.module), layer.attributes) for layer in self._layers.values()]
        try:
            yield
        except BaseException:
            for store, entries in held:
                store.clear()
                (store.update if isinstance(store, dict | set) else store.extend)(entries)
            raise
        before, self._layers = self._layers, _layers(self._module)
        for name, now in self._layers.items():
            for key, value in now.attributes.items():
                known = before[name].attributes if name in before else {}
                if isinstance(value, Tensor) and value is not known.get(key):
                    self._caches.setdefault((name, key), {})
        for (name, key), of_shapes in self._caches.items():
            value = self._layers[name].attributes.get(key)
            if shapes in of_shapes and not same_values(value, of_shapes[shapes]):
                raise changed(self._module, f"{name}.{key}", self._place, self._together)
            of_shapes[shapes] = value if value is None or is_batchedtensor(value) else value.detach().clone()

    def _follow(self) -> None:
        before, self._layers = self._layers, _layers(self._module)
        for name, now in self._layers.items():
            if not now.is_as(before[name]):
                _follow(self._before.get_submodule(name), before[name], now)

    def refuse(self) -> None:
        """Check that the steps have changed no attribute. A tensor that was missing or None is a cache.

        Raises:
            ConfigurationError: An attribute has changed.
        """
        self._follow()
        self._shared.refuse_changed(self._place)
        for name in additions(self._before, self._module, (), self._place, self._together):
            raise ConfigurationError(
                f"model: {self._place}: a step of {type(self._module).__name__} appends to {name!r}, which all clients share under "
                f"{self._together}; use SequentialExecutor"
            )


class Copies:
    """The copies of a LightningModule for the clients that this rank computes in a round.

    Args:
        task: What a client computes.
        cohort: The rank's clients.
    """

    def __init__(self, task: Any, cohort: RoundCohort) -> None:
        self._module, self.clients, self._fresh = task.module, cohort.client_ids, task.fresh
        self._rows = cohort.params  # held, as its identity stands for these copies
        server = {**dict(task.module.named_parameters()), **dict(task.module.named_buffers())}
        self._shared = SharedTensors(task.module, cohort)
        untrained = {id(tensor): tensor for tensor in self._shared.tensors.values()}
        template = Template(task.module, task.shared_by_copies(), task.hooks_of_methods())
        self.of_row: list[ClientCopy] = []
        for row in range(len(cohort)):
            parameters, buffers = cohort.params.row(row), cohort.buffers.row(row)
            # data, not detach: a write to one view would be a write to all for the backward pass
            tensors: dict[str, Tensor] = {n: nn.Parameter(x.data) for n, x in parameters.items()}
            for name, view in buffers.items():
                is_parameter = isinstance(server[name], nn.Parameter)
                tensors[name] = nn.Parameter(view.data, False) if is_parameter else view.data
            copy = template.copy(untrained | {id(server[name]): x for name, x in tensors.items()})
            copy.trainer = task.module.trainer
            self.of_row.append(ClientCopy(copy, tensors, {**parameters, **buffers}, cohort.trained_names))
        self._layers = _layers(task.module)

    def additions(
        self, named: Callable[[int], str], place: str
    ) -> Iterator[tuple[int, dict[str, list[Any]]]]:
        """Yield each client with what its steps have appended to lists of the module, by name.

        Args:
            named: Returns words for a client.
            place: Words for the round.

        Raises:
            ConfigurationError: A step has changed something else outside of the client's tensors.
        """
        self.follow()
        for client, copy in zip(self.clients, self.of_row, strict=True):
            words = f"{place}, {named(client)}"
            own = copy.own_attributes | self._fresh
            yield client, additions(self._module, copy.module, own, words)
        self._shared.refuse_changed(place)

    def follow(self) -> None:
        """Make the changes to the copies that methods have made to the server's layers since."""
        before, self._layers = self._layers, _layers(self._module)
        for name, now in self._layers.items():
            if not now.is_as(before[name]):
                for copy in self.of_row:
                    _follow(copy.module.get_submodule(name), before[name], now)


def hooks_of_layers(module: nn.Module) -> list[Any]:
    """Return the hooks of all layers."""
    return [hook for layer in module.modules() for name in HOOKS for hook in vars(layer)[name].values()]


class _Layer:
    """Class, attributes and hooks of a layer at some time."""

    def __init__(self, layer: nn.Module) -> None:
        self.module, self.kind, self.attributes = layer, type(layer), dict(vars(layer))
        self.hooks = {name: dict(self.attributes[name]) for name in HOOKS}

    def containers(self) -> list[Any]:
        """Return the layer's own lists, dicts, sets and deques."""
        kinds = (dict, OrderedDict, list, set, deque)
        return [x for key, x in self.attributes.items() if type(x) in kinds and key not in APART]

    def is_as(self, other: "_Layer") -> bool:
        """Return whether the layer holds the same objects; equal values do not suffice."""
        one, two = self.attributes, other.attributes
        same = self.kind is other.kind and self.hooks == other.hooks and one.keys() == two.keys()
        return same and all(one[key] is two[key] for key in one)


def _layers(module: nn.Module) -> dict[str, _Layer]:
    """Return the state of each layer; metric objects are the copies' own."""
    layers = module.named_modules()
    return {name: _Layer(layer) for name, layer in layers if not isinstance(layer, Metric | MetricCollection)}


def _follow(layer: nn.Module, before: _Layer, now: _Layer) -> None:
    """Make the changes to a layer of a copy that were made to the server's layer."""
    layer.__class__ = now.kind
    for key in before.attributes.keys() - now.attributes.keys():
        vars(layer).pop(key, None)
    for key, value in now.attributes.items():
        if before.attributes.get(key) is not value:
            vars(layer)[key] = value
    for store, hooks in now.hooks.items():
        for key in before.hooks[store].keys() - hooks.keys():
            vars(layer)[store].pop(key, None)
        vars(layer)[store].update({key: hooks[key] for key in hooks.keys() - before.hooks[store].keys()})
