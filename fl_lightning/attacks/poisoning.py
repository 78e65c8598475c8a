"""Attacks through what attackers compute themselves: labels, images, gradients and the scale of their updates."""

import math
from typing import Any

import torch
from torch import Tensor

from fl_lightning.attacks.base import Attack, Message
from fl_lightning.errors import ConfigurationError


class LabelFlip(Attack):
    """Attackers train on labels ``num_classes - 1 - y`` (Tolpegin et al. 2020, arXiv 2007.08432; ByzFL, Blades)."""

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """The batch with flipped labels; a label that is no class, such as 255 or -100, stays."""
        if num_classes is None:
            raise ConfigurationError(
                "LabelFlip: the data do not say how many classes they have (num_classes)"
            )
        inputs, targets = batch
        return inputs, torch.where(
            (targets >= 0) & (targets < num_classes), num_classes - 1 - targets, targets
        )


class Backdoor(Attack):
    """Attackers teach the model to take every image with a trigger, a bright square, for a class of theirs.

    The first images of each batch of theirs get the trigger in the lower right corner and the label ``target`` (Gu et al. 2017,
    "BadNets", arXiv 1708.06733). Evaluations log ``attack_success``: the share of the images of other classes that the model
    takes for ``target`` once they have the trigger.

    Args:
        target: The class.
        fraction: Share of each batch that is poisoned, in (0, 1], rounded up.
        size: Pixels of the square's side.
        value: Its value in all channels, in the units of the normalised images.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(self, target: int = 0, fraction: float = 0.5, size: int = 3, value: float = 2.5) -> None:
        if not 0 < fraction <= 1:
            raise ConfigurationError(f"Backdoor.fraction: {fraction} must be in (0, 1]")
        for setting, number, least in (("target", target, 0), ("size", size, 1)):
            if number < least:
                raise ConfigurationError(f"Backdoor.{setting}: {number} must be at least {least}")
        self.target, self.fraction, self.size, self.value = target, fraction, size, value

    def triggered(self, images: Tensor) -> Tensor:
        """The images ``[b, c, h, w]`` with the trigger."""
        images = images.clone()
        images[..., -self.size :, -self.size :] = self.value
        return images

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """The batch with its first images poisoned."""
        if num_classes is not None and self.target >= num_classes:
            raise ConfigurationError(
                f"Backdoor.target: {self.target} must be less than the {num_classes} classes"
            )
        inputs, targets = batch
        if inputs.ndim != 4 or min(inputs.shape[2:]) < self.size or targets.ndim != 1:
            raise ConfigurationError(
                f"Backdoor.size: a square of {self.size} pixels and a label for the image do not fit inputs of shape "
                f"{[*inputs.shape[1:]]} and targets of shape {[*targets.shape[1:]]}; it needs larger images, [channels, height, width], "
                "with one label each"
            )
        count = math.ceil(self.fraction * len(inputs))
        poisoned = torch.full_like(targets[:count], self.target)
        return torch.cat([self.triggered(inputs[:count]), inputs[count:]]), torch.cat(
            [poisoned, targets[count:]]
        )


class GradientAscent(Attack):
    """Attackers climb their own loss: each local step goes along ``-scale`` times the gradient (Blades' sign flip).

    Args:
        scale: Factor on the opposite of the gradient.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def gradient(self, gradient: Tensor) -> Tensor:
        """The opposite of the gradient."""
        return -self.scale * gradient


class ModelReplacement(Attack):
    """Attackers scale up what they have trained (Bagdasaryan et al. 2020, "How To Backdoor Federated Learning", arXiv 1807.00459).

    Of parameters that is the update. With a factor of n / f it takes the place of the mean of n clients, as far as the honest ones'
    updates cancel. With a ``Backdoor`` of the same clients before it, the backdoor gets in within a few rounds.

    Args:
        scale: The factor.
    """

    def __init__(self, scale: float = 10.0) -> None:
        self.scale = scale

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """What the attackers have computed, scaled up."""
        return [self.scale * message.own for message in messages]
