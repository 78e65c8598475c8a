"""Batch Normalization in federated learning, on PyTorch Lightning.

The public names (in ``__init__.pyi``) are imported on first use: ``import fl_lightning`` does not
import torch. Configurations name public classes as ``fl_lightning.X``, regardless of their modules.
"""

import lazy_loader

from fl_lightning import aliases

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

aliases.install()
