"""Draw what gradient inversion finds with BN and after FixBN's T*: ``python docs/scripts/inversion.py``.

Two runs on Digits end with an attack on four clients: one with BN, and one whose statistics are frozen
after half of the rounds. Both have the same samples.
"""

import logging
import warnings
from functools import partial

import lightning as L
import torch
from folders import FIGURES_FOLDER

from fl_lightning import FederatedModule
from fl_lightning.callbacks import FixBN, GradientInversion
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import ResNet8
from fl_lightning.pictures import inversion_figure
from fl_lightning.pictures.style import write_figure

ROUNDS = 100


def attacked(*callbacks: L.Callback) -> dict[str, torch.Tensor]:
    """Train a ResNet-8, and return the true and the reconstructed images of four clients."""
    L.seed_everything(0, verbose=False)
    data = Digits(num_clients=5, batch_size=20, partition=Dirichlet(0.5), val_fraction=0.2)
    model = ResNet8(in_channels=1, width=8)
    module = FederatedModule(model, partial(torch.optim.SGD, lr=0.05), local_steps=1)
    attack = GradientInversion(batch_sizes=[1], clients=4)
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        callbacks=[*callbacks, attack],
        check_val_every_n_epoch=ROUNDS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)
    (images,) = attack.images.values()
    return {"training image": images["true"], "reconstruction": images["gradient"]}


logging.getLogger("lightning").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
shown = {"BN": attacked(), "FixBN after T*": attacked(FixBN(freeze_round=0.5))}
write_figure(FIGURES_FOLDER / "inversion.png", inversion_figure(shown, []))
