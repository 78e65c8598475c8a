"""Batch Normalization in federated learning, on PyTorch Lightning.

``__init__.pyi`` lists the public names. They are imported on first use, so ``import fl_lightning``
does not import torch. In a configuration, write ``fl_lightning.X`` for the class ``X``, whichever
module defines it.
"""

import lazy_loader

from fl_lightning import aliases

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

aliases.install()
