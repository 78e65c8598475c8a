"""Networks of the papers, with a choice of norm layers.

Most models take images ``[b, in_channels, height, width]`` and return outputs ``[b, num_classes]``.
``BNProbe`` takes points ``[b, in_features]``. ``SmallDeepLab`` returns
``[b, num_classes, height, width]``. Every model also runs under ``torch.func.vmap`` with stacked
parameters and buffers of several clients.

:func:`~fl_lightning.models.library.library_model` and
:func:`~fl_lightning.models.library.deeplab_v3_plus` create models of other libraries.
"""

from fl_lightning.models.bn_probe import BNProbe
from fl_lightning.models.deeplab import SmallDeepLab
from fl_lightning.models.fbn_cnn import FBNCNN
from fl_lightning.models.lenet import LeNet
from fl_lightning.models.library import deeplab_v3_plus, library_model
from fl_lightning.models.norm import convert_norm
from fl_lightning.models.resnet import CIFARResNet, ResNet8, ResNet20, ResNet32
from fl_lightning.models.resnet18 import ResNet18
from fl_lightning.models.tabular import TabularMLP
from fl_lightning.models.weights import read_weights

__all__ = [
    "FBNCNN",
    "BNProbe",
    "CIFARResNet",
    "LeNet",
    "ResNet8",
    "ResNet18",
    "ResNet20",
    "ResNet32",
    "SmallDeepLab",
    "TabularMLP",
    "convert_norm",
    "deeplab_v3_plus",
    "library_model",
    "read_weights",
]
