"""Attacks without knowledge of other clients."""

import math
from typing import Any

import torch
from torch import Tensor

from fl_lightning.attacks.base import Attack, Message
from fl_lightning.errors import ConfigurationError, check_number


class LabelFlip(Attack):
    """Flipped labels: attackers train with the label ``num_classes - 1 - y`` instead of ``y``.

    See Tolpegin et al. 2020, arXiv 2007.08432. ByzFL and Blades use the same formula.
    """

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch with flipped labels. Ignored labels do not change.

        The loss ignores labels such as 255 and -100.
        """
        if num_classes is None:
            raise ConfigurationError(
                "LabelFlip: the data do not say how many classes they have (num_classes)"
            )
        inputs, targets = batch
        return inputs, torch.where(
            (targets >= 0) & (targets < num_classes), num_classes - 1 - targets, targets
        )


class Backdoor(Attack):
    """Backdoor: the model learns to classify images with a trigger as ``target``.

    The trigger is a bright square in the lower right corner of an image. The first images of each
    batch of an attacker get the trigger and the label ``target`` (Gu et al. 2017, "BadNets", arXiv
    1708.06733). Evaluations log ``attack_success``. For this metric, all test images of other
    classes get the trigger. The metric is the share of these images that the model classifies as
    ``target``.

    Args:
        target: Label of images with the trigger.
        fraction: Share of the images in each batch that get the trigger, in (0, 1]. The number of
            images is rounded up.
        size: Side length of the square in pixels.
        value: Value of the square in all channels. Images are normalised before they get the
            square.

    Raises:
        ConfigurationError: A setting is out of range.
    """

    def __init__(self, target: int = 0, fraction: float = 0.5, size: int = 3, value: float = 2.5) -> None:
        check_number("Backdoor.fraction", fraction, above=0, most=1)
        check_number("Backdoor.target", target, least=0)
        check_number("Backdoor.size", size, least=1)
        self.target, self.fraction, self.size, self.value = target, fraction, size, value

    def triggered(self, images: Tensor) -> Tensor:
        """Return a copy of images ``[b, c, h, w]`` with the trigger."""
        images = images.clone()
        images[..., -self.size :, -self.size :] = self.value
        return images

    def batch(self, batch: Any, num_classes: int | None) -> Any:
        """Return the batch with the trigger and the label ``target`` on its first images."""
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
        count = math.ceil(self.fraction * len(inputs) - 1e-9)  # 0.55 * 100 is above 55
        poisoned = torch.full_like(targets[:count], self.target)
        return torch.cat([self.triggered(inputs[:count]), inputs[count:]]), torch.cat(
            [poisoned, targets[count:]]
        )


class GradientAscent(Attack):
    """Gradient ascent: local steps use ``-scale`` times the gradient.

    The local steps therefore increase the loss. The library Blades calls this attack sign flip.

    Args:
        scale: Factor by which the negated gradient is multiplied.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def gradient(self, gradient: Tensor) -> Tensor:
        """Return the negated gradient times ``scale``."""
        return -self.scale * gradient


class ModelReplacement(Attack):
    """Model replacement: attackers scale their updates.

    The paper is Bagdasaryan et al. 2020, arXiv 1807.00459. Suppose that f of n clients attack with
    the factor n / f, and that the honest updates sum to 0. The mean over all clients then equals
    the attackers' unscaled mean update. To plant a backdoor within a few rounds, combine this
    attack with ``Backdoor`` for the same clients, and list ``Backdoor`` first.

    Args:
        scale: Factor by which the update is multiplied.
    """

    def __init__(self, scale: float = 10.0) -> None:
        self.scale = scale

    def messages(self, messages: list[Message]) -> list[Tensor]:
        """Return the attackers' vectors, multiplied by ``scale``."""
        return [self.scale * message.own for message in messages]
