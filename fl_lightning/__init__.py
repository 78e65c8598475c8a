"""Batch Normalization in federated learning, on PyTorch Lightning.

The public names are listed in ``__init__.pyi`` and imported on first use, so that ``import fl_lightning`` does not import
torch. Configurations name a class directly below ``fl_lightning``, so that they survive moves within the package.
"""

import lazy_loader

from fl_lightning import aliases

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

aliases.install()
