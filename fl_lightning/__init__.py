"""fl_lightning: Batch Normalization in federated learning, on PyTorch Lightning.

The public names stand in ``__init__.pyi`` and are imported on first use, so that ``import fl_lightning`` does not import torch. A
class is named by ``fl_lightning`` alone in configurations, so a move within the package changes none of them.
"""

import lazy_loader

from fl_lightning import aliases

__version__ = "0.2.0"
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

aliases.install()
