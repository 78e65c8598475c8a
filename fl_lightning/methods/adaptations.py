"""Adaptations of a model to unlabelled data, for evaluations of clients and of the server."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.batch_norm.layers import batch_norm_layers
from fl_lightning.batch_norm.swapping import batch_statistics
from fl_lightning.methods.own_data import adapt_statistics


@torch.no_grad()
def moving_statistics(model: nn.Module, batches: Iterable[Any], tau: float = 0.1) -> None:
    """Move BN statistics towards the statistics of each batch: ``S <- (1 - tau) S + tau batch``.

    TsmoBN (Jiang et al., arXiv 2110.09974) in our reading: S starts from the server's statistics, and
    a layer normalises a batch with S after the move. The variance of a batch is biased.

    Args:
        model: The model in eval mode, changed in place.
        batches: Batches of model inputs.
        tau: Weight of a batch, in [0, 1]. With 0, S does not change. With 1, S are the statistics of
            the last batch.
    """

    def move(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        mean, variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        values = inputs[0].transpose(0, 1).flatten(1).to(mean.dtype)
        mean.lerp_(values.mean(1), tau)
        variance.lerp_(values.var(1, correction=0), tau)

    _pass(model, batches, dict.fromkeys(batch_norm_layers(model), move))


def entropy_steps(model: nn.Module, batches: Iterable[Any], lr: float = 1e-3) -> None:
    """Take a step of Adam on gamma and beta per batch, on the entropy of the model's predictions.

    TENT (Wang et al., arXiv 2006.10726). In the steps, BN layers normalise with the batch. In the
    paper, the predictions before a step are the result. Here, the model is adapted first: after the
    last step, another pass over the batches sets the statistics
    (:func:`~fl_lightning.methods.own_data.adapt_statistics`).

    Args:
        model: The classifier, changed in place. The outputs are logits ``[b, num_classes, ...]``.
        batches: Batches of model inputs.
        lr: Learning rate. With 0, only the statistics change.
    """
    held, layers = list(batches), batch_norm_layers(model)
    affine = [x for layer in layers.values() for x in (layer.weight, layer.bias) if x is not None]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.Adam([x.requires_grad_(True) for x in affine], lr=lr)
    with batch_statistics([*layers.values()]):
        for inputs in held:
            logs = model(inputs).log_softmax(1)
            optimizer.zero_grad()
            (-(logs.exp() * logs).sum(1).mean()).backward()
            optimizer.step()
    adapt_statistics(model, held)


@torch.no_grad()
def balanced_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    rate: float | None = None,
    share: float = 0.0,
    labels: Iterable[Tensor] | None = None,
) -> None:
    """Set BN statistics to class-balanced statistics of the data.

    Balanced BN of TRIBE (Su, Xu and Jia, AAAI 2024). Each layer keeps a mean m_k and a variance v_k of
    each class k, which start from the server's statistics. With n_k values u of class k in a batch,
    and a_k = 1 / n_k, or ``rate`` if n_k is at most 1 / rate::

        d_k = a_k sum (u - m_k)
        e_k = a_k (sum (u - m_k)^2 - n_k v_k) - d_k^2
        m_k <- m_k + (1 - share) d_k + share mean(d)
        v_k <- v_k + (1 - share) e_k + share mean(e)

    The statistics are the mean of all m_k, and the mean of all v_k plus the variance of all m_k with
    divisor K - 1. A layer normalises a batch with the statistics after the update.

    Args:
        model: The classifier in eval mode, changed in place.
        batches: Batches of model inputs.
        rate: Largest weight of a value of a rare class. None: 0.01 for up to 10 classes, 0.05 for up to
            100, and 0.5 for more, as TRIBE uses for 10, 100 and 1,000 classes.
        share: Share in [0, 1] of the mean over the classes in the update of each class.
        labels: Class of each sample ``[b]``, by batch. Default: the classes that the model predicts
            before the update (pseudo-labels).
    """
    layers, known = batch_norm_layers(model), dict[str, tuple[Tensor, Tensor]]()
    given = iter(labels) if labels is not None else None

    def update(layer: nn.Module, inputs: tuple[Tensor, ...], name: str) -> None:
        mean, variance = layer.get_buffer("running_mean"), layer.get_buffer("running_var")
        if name not in known:
            # float32 would cancel in the sums of squares
            known[name] = mean.double().repeat(len(counts), 1), variance.double().repeat(len(counts), 1)
        m, v = known[name]
        values = inputs[0].double().reshape(*inputs[0].shape[:2], -1)
        n = (counts * values.shape[2]).double().unsqueeze(1)
        eta = rate or (0.01 if len(counts) <= 10 else 0.05 if len(counts) <= 100 else 0.5)
        a = torch.where(n <= 1 / eta, eta, 1 / n.clamp(min=1))
        sums, squares = (onehot.T.double() @ x.sum(2) for x in (values, values.square()))
        d = a * (sums - n * m)
        e = a * (squares - 2 * m * sums + n * m.square() - n * v) - d.square()
        m, v = (x + (1 - share) * c + share * c.mean(0) for x, c in ((m, d), (v, e)))
        known[name] = m, v
        mean.copy_(m.mean(0))
        variance.copy_(v.mean(0) + m.var(0, correction=1))

    hooks: Mapping[str, Callable[..., None]] = {name: partial(update, name=name) for name in layers}
    for inputs in batches:
        predicted = model(inputs)
        classes = predicted.argmax(1) if given is None else next(given)
        onehot = nn.functional.one_hot(classes, predicted.shape[1])
        counts = onehot.sum(0)
        _pass(model, [inputs], hooks)


def _pass(model: nn.Module, batches: Iterable[Any], before: Mapping[str, Callable[..., None]]) -> None:
    layers = batch_norm_layers(model)
    with ExitStack() as hooks:
        for name, hook in before.items():
            hooks.enter_context(layers[name].register_forward_pre_hook(hook))
        for inputs in batches:
            model(inputs)
