"""Batch Normalization in federated learning, on PyTorch Lightning.

The public names are listed in ``__init__.pyi`` and imported on first use. Therefore
``import fl_lightning`` does not import torch. A configuration can name every public class ``X`` as
``fl_lightning.X``.
"""

import lazy_loader

from fl_lightning import folders

__version__ = "0.3.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

folders.install()
