"""Evaluation on clients' own data, and adaptation of the server's model to unlabelled data."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers, explain_batch_of_one
from fl_lightning.batch_norm.moments import merge_, moments
from fl_lightning.batch_norm.swapping import batch_statistics
from fl_lightning.client_data.batches import copied
from fl_lightning.randomness import derive_seed, seeded
from fl_lightning.round.evaluation import ServerEvaluation

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule

Adaptation = Callable[[nn.Module, Iterable[Any]], object]
"""Function that adapts a model in place to the inputs of evaluation data.

The arguments are the model and the batches. The model is a copy of the server's model in eval mode.
The batches have no labels, and can be iterated only once. Gradients are enabled.
"""


def adapted_state(
    pl_module: "FederatedModule", adapt: Adaptation, loader: Iterable[Any], name: str, client: int = -1
) -> dict[str, Tensor]:
    """Return the parameters and buffers of an adapted copy of the server's model.

    The adaptation does not change the server's model or the random numbers of training.

    Args:
        pl_module: The federated module.
        adapt: The adaptation.
        loader: Batches of evaluation data. Only the first entry of each batch, the inputs, is used.
        name: Name of the adaptation. Its random numbers depend on the seed, the name, the round and
            the client.
        client: Id of the client that owns the data, or -1 for the server.
    """

    def inputs() -> Iterator[Any]:
        for batch in loader:
            batch = pl_module.on_device(batch)
            batch = batch[0] if isinstance(batch, list | tuple) else batch
            # copy: autograd rejects tensors that a loader has cached in inference mode
            yield copied(batch)

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        seeded(derive_seed(pl_module.seed, f"adaptation {name}", pl_module.trainer.global_step, client)),
        pl_module.trainer.precision_plugin.val_step_context(),
        explain_batch_of_one(),
    ):
        model = deepcopy(pl_module.model).eval()
        adapt(model, inputs())
        return {n: x.detach() for n, x in (*model.named_parameters(), *model.named_buffers())}


@torch.no_grad()
def input_statistics(model: nn.Module, batches: Iterable[Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the mean and the biased variance of each BN layer's inputs, each ``[channels]``.

    In this pass, BN layers normalise with the batch. The statistics of all BN layers except the
    first therefore depend on the composition of the batches.

    Args:
        model: The model.
        batches: The inputs.
    """
    seen: dict[str, Tensor] = {}

    def look(layer: nn.Module, inputs: tuple[Tensor, ...], _outputs: Any, name: str) -> None:
        values = inputs[0].transpose(0, 1).flatten(1).to(layer.get_buffer("running_mean"))
        count, mean, spread = seen.setdefault(name, values.new_zeros(3, len(values)))
        merge_(count, mean, spread, *moments(values))

    layers = batch_norm_layers(model)
    with batch_statistics([*layers.values()]), ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.enter_context(layer.register_forward_hook(partial(look, name=name)))
        for inputs in batches:
            model(inputs)
    return {name: (mean, spread / count) for name, (count, mean, spread) in seen.items()}


def evaluate_client(
    pl_module: "FederatedModule",
    client: int,
    split: str,
    evaluate: Callable[[Any, ServerEvaluation], None],
) -> ServerEvaluation | None:
    """Evaluate a model on a client's own data, on this rank only.

    Args:
        pl_module: The federated module.
        client: Id of the client.
        split: The evaluation data, ``"val"`` or ``"test"``.
        evaluate: Function that adds a batch to an evaluation. The random numbers of the function
            and of the loader depend only on the run's seed and the client.

    Returns:
        The finished evaluation, or None if the client has no such data.
    """
    evaluation = ServerEvaluation()
    with seeded(derive_seed(pl_module.seed, "own evaluation", client)):
        loader = pl_module.data.own_dataloader(client, split)
        if loader is None:
            return None
        for batch in loader:
            evaluate(copied(pl_module.on_device(batch)), evaluation)
    evaluation.finish()
    return evaluation


def weighed_accuracy(class_accuracy: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the accuracy on data with given frequencies of the classes.

    Args:
        class_accuracy: Accuracy of each class. Classes with the accuracy None are left out.
        weights: Frequency of each class, in any unit.

    Returns:
        The accuracy, or None if every class is left out or has weight 0.
    """
    known = [(a, w) for a, w in zip(class_accuracy, weights, strict=False) if a is not None]
    total = sum(weight for _, weight in known)
    return sum(accuracy * weight for accuracy, weight in known) / total if total else None
