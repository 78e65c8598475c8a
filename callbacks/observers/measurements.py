"""What Batch Normalization does to federated training, in numbers: pure functions on statistics and gradients."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float64).tiny


def layer_statistics(buffers: Mapping[str, Tensor], layers: Iterable[str]) -> Tensor:
    """Running means and variances of some BN layers side by side, ``[2, channels]``.

    Args:
        buffers: A model's buffers by name.
        layers: Names of the layers.
    """
    names = list(layers)
    return torch.stack(
        [torch.cat([buffers[f"{layer}.running_{kind}"] for layer in names]) for kind in ("mean", "var")]
    )


def local_deviation(clients: Tensor, server: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean over the clients of ``|S_m - S|`` (Zhong et al., arXiv 2303.06530, Figure 3a), float by float.

    Args:
        clients: Each client's statistics, shape ``[2, C, channels]``.
        server: The server's, ``[2, channels]``.
        weights: Weights of the clients, ``[C]``, sum 1.

    Returns:
        Shape ``[2, channels]``; its sum is the figure's L1 norm.
    """
    return torch.einsum("c,kcn->kn", weights.double(), (clients - server.unsqueeze(1)).abs().double())


def mean_variance(windows: Iterable[Tensor]) -> Tensor | None:
    """Unbiased variance of each client's statistics over its window, averaged over the clients (Figure 3b).

    Args:
        windows: For each client its statistics of the rounds of the window, ``[rounds, floats]``.

    Returns:
        A variance for each float; None as long as no client has two rounds.
    """
    variances = [window.double().var(0) for window in windows if len(window) > 1]
    return torch.stack(variances).mean(0) if variances else None


def relative_deviation(
    found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], names: Iterable[str], smallest: float = 0.0
) -> float:
    """``||found - wanted|| / ||wanted||`` over some tensors together, in L2 norms.

    Args:
        found: Tensors by name.
        wanted: Those that they should be.
        names: Which of them; 0 where they are none.
        smallest: What the norm of ``wanted`` at least counts: below it there is only rounding.
    """
    pairs = [(found[name].double(), wanted[name].double()) for name in names]
    if not pairs:
        return 0.0
    apart = torch.stack([(one - other).square().sum() for one, other in pairs]).sum().sqrt()
    size = torch.stack([other.square().sum() for _, other in pairs]).sum().sqrt()
    return float(apart / size.clamp(min=max(smallest, _TINY)))


def rounding(gradients: Mapping[str, Tensor]) -> float:
    """The norm below which a part of some gradients is nothing but the rounding of the others."""
    norms = [gradient.double().norm() for gradient in gradients.values()]
    precision = max((torch.finfo(gradient.dtype).eps for gradient in gradients.values()), default=0.0)
    return precision * float(torch.stack(norms).norm()) if norms else 0.0


def statistics_bias(
    held: Mapping[str, Tensor], true: Mapping[str, Tensor], layers: Sequence[str]
) -> tuple[list[float], list[float]]:
    """How far running statistics are from the moments of the data, by layer.

    Args:
        held: The server's buffers by name.
        true: Means and variances of the layers' inputs, by the name of the buffer that should hold them.
        layers: Names of the BN layers.

    Returns:
        For each layer ``||m - m*|| / ||sqrt(v*)||``, errors of means in units of the standard deviation, since means may
        well be zero; and ``||v - v*|| / ||v*||``.
    """
    means, variances = [], []
    for layer in layers:
        mean, variance = f"{layer}.running_mean", f"{layer}.running_var"
        spread = true[variance].double().sum().sqrt()
        means.append(float((held[mean] - true[mean]).double().norm() / spread.clamp(min=_TINY)))
        variances.append(relative_deviation(held, true, [variance]))
    return means, variances
