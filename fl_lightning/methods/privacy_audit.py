"""A lower bound of epsilon by an attack on canaries in one run (Steinke et al., arXiv 2305.08846)."""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.batch_norm.swapping import evaluating

if TYPE_CHECKING:
    from fl_lightning.round.module import FederatedModule

CONFIDENCE = 0.95


class Audit(NamedTuple):
    """Result of an attack.

    Attributes:
        canaries: Number of canaries m.
        guesses: Number of canaries about which the attack guesses.
        right: Number of right guesses.
        epsilon: Lower bound of epsilon with confidence 0.95; 0 if the attack shows nothing.
    """

    canaries: int
    guesses: int
    right: int
    epsilon: float


def epsilon_lower_bound(canaries: int, guesses: int, right: int, delta: float) -> float:
    """Return the largest epsilon that so many right guesses refute, with confidence 0.95.

    Each canary is in the training data with probability 1/2. Of a run with (epsilon, delta)-differential
    privacy, the probability of so many right guesses is at most ``beta + 2 m delta alpha`` (Theorem
    5.2 of the paper).

    Example:
        >>> round(epsilon_lower_bound(200, 100, 90, 1e-5), 2)
        1.63
    """
    from scipy.stats import binom  # slow to import

    def probability(epsilon: float) -> float:
        chance = 1 / (1 + torch.exp(torch.tensor(-epsilon)).item())
        beta, alpha, total = float(binom.sf(right - 1, guesses, chance)), 0.0, 0.0
        for i in range(1, right + 1):
            total += float(binom.pmf(right - i, guesses, chance))
            alpha = max(alpha, total / i)
        return beta + 2 * canaries * delta * alpha

    low, high = 0.0, 20.0
    if probability(low) > 1 - CONFIDENCE:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if probability(middle) <= 1 - CONFIDENCE else (low, middle)
    return low


@torch.no_grad()
def audit(pl_module: "FederatedModule", delta: float) -> Audit | None:
    """Attack the server's model with the canaries in the data; None if there are none.

    The attack guesses that the quarter of the canaries with the lowest losses is in the training
    data, and that the quarter with the highest losses is not. It says nothing about the others.
    """
    planted: tuple[Tensor, Tensor] | None = getattr(pl_module.data, "planted", None)
    if planted is None:
        return None
    data: Any = pl_module.data
    indices, included = planted
    inputs, targets = data.samples[indices]
    with evaluating(pl_module.model):
        outputs = pl_module.model(pl_module.on_device(inputs))
    pairs = zip(outputs.split(1), pl_module.on_device(targets).split(1), strict=True)
    order = torch.stack([pl_module.client.loss(*pair) for pair in pairs]).argsort().cpu()
    quarter = len(indices) // 4
    right = int(included[order[:quarter]].sum() + (~included[order[-quarter:]]).sum())
    bound = epsilon_lower_bound(len(indices), 2 * quarter, right, delta)
    return Audit(len(indices), 2 * quarter, right, bound)
