"""Attacks without knowledge of other clients: on labels, images, gradients and update scales."""

import math
from typing import Any

import torch
from torch import Tensor

from fl_lightning.attacks.base import Attack, Message
from fl_lightning.errors import ConfigurationError


class LabelFlip(Attack):
    """Labels ``num_classes - 1 - y`` (Tolpegin et al. 2020, arXiv 2007.08432; ByzFL, Blades)."""

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch with flipped labels; labels of no class, such as 255 or -100, stay."""
        if num_classes is None:
            raise ConfigurationError(
                "LabelFlip: the data do not say how many classes they have (num_classes)"
            )
        inputs, targets = batch
        return inputs, torch.where(
            (targets >= 0) & (targets < num_classes), num_classes - 1 - targets, targets
        )


class Backdoor(Attack):
    """Backdoor: the model learns to classify images with a trigger, a bright square, as ``target``.

    The first images of each of the attackers' batches get the trigger in the lower right corner
    and the label ``target`` (Gu et al. 2017, "BadNets", arXiv 1708.06733). Evaluations log
    ``attack_success``: the share of images of other classes that the model classifies as
    ``target`` after the trigger is added.

    Args:
        target: Label of images with the trigger.
        fraction: Share of each batch that is poisoned, in (0, 1], rounded up to whole images.
        size: Side of the square, in pixels.
        value: Value of the square in all channels, in the units of the normalised images.

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
        """Return the images ``[b, c, h, w]`` with the trigger."""
        images = images.clone()
        images[..., -self.size :, -self.size :] = self.value
        return images

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch with its first images poisoned."""
        if num_classes is not None and self.target >= num_classes:
            raise ConfigurationError(
                f"Backdoor.target: {self.target} must be less than the {num_classes} classes"
            )
        inputs, targets = batch
        if inputs.ndim != 4 or min(inputs.shape[2:]) < self.size or targets.ndim != 1:
            raise ConfigurationError(
                f"Backdoor.size: a square of {self.size} pixels and a label for the image do not fit inputs of shape "
                f"{[*inputs.shape[1:]]} and targets of shape {[*targets.shape[1:]]}; use larger images [channels, height, width] "
                "with one label each"
            )
        count = math.ceil(self.fraction * len(inputs))
        poisoned = torch.full_like(targets[:count], self.target)
        return torch.cat([self.triggered(inputs[:count]), inputs[count:]]), torch.cat(
            [poisoned, targets[count:]]
        )


class GradientAscent(Attack):
    """Local steps with ``-scale`` times the gradient, to increase the loss (sign flip of Blades).

    Args:
        scale: Factor on the negated gradient.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the negated gradient times ``scale``."""
        return -self.scale * gradient


class ModelReplacement(Attack):
    """Updates scaled up (Bagdasaryan et al. 2020, arXiv 1807.00459).

    With the factor n / f the attackers' update replaces the mean over n clients if the honest
    updates cancel. If the same clients have a ``Backdoor``, listed before this attack, the model
    learns the backdoor within a few rounds.

    Args:
        scale: Factor on the update.
    """

    def __init__(self, scale: float = 10.0) -> None:
        self.scale = scale

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the attackers' vectors times ``scale``."""
        return [self.scale * message.own for message in messages]
