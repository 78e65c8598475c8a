"""Measures of Batch Normalization in federated training, as functions of statistics and gradients."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny


def local_deviation(clients: Tensor, server: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of ``|S_m - S|`` over the clients, ``[2, channels]``.

    Figure 3a in Zhong et al., arXiv 2303.06530, shows the sum over all entries.

    Args:
        clients: Statistics S_m of each client, ``[2, C, channels]``.
        server: Statistics S of the server, ``[2, channels]``.
        weights: Weights of the clients, ``[C]``, sum 1.
    """
    return torch.einsum("c,kcn->kn", weights.double(), (clients - server.unsqueeze(1)).abs().double())


def mean_variance(windows: Iterable[Tensor]) -> Tensor | None:
    """Return each statistic's variance over the rounds, averaged over the clients, ``[floats]``.

    The variance is unbiased. Figure 3b in Zhong et al., arXiv 2303.06530, shows this variance.

    Args:
        windows: Each client's statistics in the client's newest rounds, ``[rounds, floats]``.

    Returns:
        The mean over all clients with at least two rounds; None if there is no such client.
    """
    variances = [window.double().var(0) for window in windows if len(window) > 1]
    return torch.stack(variances).mean(0) if variances else None


def relative_deviation(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], names: Iterable[str], smallest: float = 0.0
) -> float:
    """Return ``||found - wanted|| / ||wanted||``, with L2 norms over all tensors together.

    Args:
        found: Measured tensors by name.
        wanted: Reference tensors by name.
        names: Names of the tensors to compare. With an empty list the result is 0.
        smallest: Lower bound of the denominator, for a norm of ``wanted`` that is only a rounding
            error.
    """
    pairs = [(found[name].double(), wanted[name].double()) for name in names]
    if not pairs:
        return 0.0
    error = torch.stack([(value - reference).square().sum() for value, reference in pairs]).sum().sqrt()
    size = torch.stack([reference.square().sum() for _, reference in pairs]).sum().sqrt()
    return float(error / size.clamp(min=max(smallest, _TINY)))


def rounding_error(gradients: Mapping[str, Tensor]) -> float:
    """Return the norm of the rounding error of all gradients together."""
    norms = [gradient.double().norm() for gradient in gradients.values()]
    precision = max((torch.finfo(gradient.dtype).eps for gradient in gradients.values()), default=0.0)
    return precision * float(torch.stack(norms).norm()) if norms else 0.0


def statistics_bias(
    held: Mapping[str, Tensor], true: Mapping[str, Tensor], layers: Sequence[str]
) -> tuple[list[float], list[float]]:
    """Return the distance between running statistics and the moments of the data, by layer.

    m and v are a layer's running mean and variance. m* and v* are the mean and variance of the
    layer's inputs.

    Args:
        held: The server's buffers by name, including m and v.
        true: The moments m* and v* of the layers' inputs, by buffer name.
        layers: Names of the BN layers.

    Returns:
        ``||m - m*|| / ||sqrt(v*)||`` and ``||v - v*|| / ||v*||`` of each layer. The first
        denominator is a standard deviation, because means may be zero.
    """
    means, variances = [], []
    for layer in layers:
        mean, variance = f"{layer}.running_mean", f"{layer}.running_var"
        spread = true[variance].double().sum().sqrt()
        means.append(float((held[mean] - true[mean]).double().norm() / spread.clamp(min=_TINY)))
        variances.append(relative_deviation(held, true, [variance]))
    return means, variances
