"""Compare two orders of ReLU and BN for FBN: ``python docs/scripts/layer_order.py``.

The script trains all runs and draws a figure. ``python docs/scripts/layer_order.py draw`` does not
train. It draws the results of an earlier call.

Ten clients have one class of Digits each, and a round has one local step. The model is FBNCNN of
width 16 without dropout. It is trained by SGD without momentum. All runs are centralised: one model
is trained on the union of the clients' batches. For FBN, centralised training equals federated
training exactly.
"""

import json
import logging
import sys
import warnings
from functools import partial

import lightning as L
import torch
from folders import FIGURES_FOLDER, NUMBERS_FOLDER
from matplotlib.figure import Figure

from fl_lightning import FederatedModule
from fl_lightning.callbacks import FBN
from fl_lightning.datamodules import Digits, Shards
from fl_lightning.models import FBNCNN
from fl_lightning.pictures.style import BLUE, VERMILLION, paper_style, write_figure

FILE = NUMBERS_FOLDER / "layer_order.json"
ROUNDS = 600
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)
SEEDS = (0, 1, 2)
CURVES = {
    "FBN relu_bn": ("FBN, conv, ReLU, BN (the paper's order)", BLUE, "-", "o"),
    "FBN bn_relu": ("FBN, conv, BN, ReLU (ResNet's order)", VERMILLION, "-", "D"),
    "BN relu_bn": ("BN centralised, conv, ReLU, BN", BLUE, ":", "^"),
    "BN bn_relu": ("BN centralised, conv, BN, ReLU", VERMILLION, ":", "v"),
}


def accuracy(method: str, order: str, rate: float, seed: int) -> float:
    """Train a model and return its validation accuracy after the last round.

    If the run diverges, the accuracy is 0.

    Args:
        method: ``"FBN"`` or ``"BN"``.
        order: Order of the layers, ``"relu_bn"`` or ``"bn_relu"``.
        rate: Learning rate.
        seed: Seed of the run.
    """
    L.seed_everything(seed, verbose=False)
    data = Digits(num_clients=10, batch_size=20, partition=Shards(0.1), val_fraction=0.2, seed=seed)
    module = FederatedModule(
        FBNCNN(in_channels=1, image_size=8, width=16, order=order, dropout=0.0),
        partial(torch.optim.SGD, lr=rate),
        local_steps=1,
        centralised=True,
        on_divergence="record",
        seed=seed,
    )
    trainer = L.Trainer(
        max_epochs=ROUNDS,
        check_val_every_n_epoch=ROUNDS,
        callbacks=[FBN()] if method == "FBN" else [],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, datamodule=data)
    return float(trainer.callback_metrics["val/accuracy"])


def train() -> None:
    """Train all runs and write their accuracies to the file of numbers.

    The file has one accuracy for each curve, learning rate and seed.
    """
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found: dict[str, dict[str, list[float]]] = {}
    for curve in CURVES:
        method, order = curve.split()
        for rate in RATES:
            values = [accuracy(method, order, rate, seed) for seed in SEEDS]
            found.setdefault(curve, {})[str(rate)] = [round(value, 4) for value in values]
            print(curve, rate, found[curve][str(rate)], flush=True)
    FILE.write_text(json.dumps(found, indent=1) + "\n")


def draw() -> None:
    """Draw ``docs/figures/layer_order.png`` from the file of numbers.

    A curve shows the median of the seeds. Its band reaches from the lowest to the highest seed.
    """
    found = json.loads(FILE.read_text())
    with paper_style():
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.subplots()
        for curve, (label, colour, line, marker) in CURVES.items():
            values = torch.tensor([found[curve][str(rate)] for rate in RATES])
            axes.fill_between(RATES, values.amin(1), values.amax(1), color=colour, alpha=0.15, linewidth=0)
            axes.plot(
                RATES, values.median(1).values, line, color=colour, marker=marker, markersize=5, label=label
            )
        axes.set(
            xscale="log",
            xlabel="learning rate",
            ylabel="validation accuracy (0: diverged)",
            ylim=(-0.02, 1.02),
        )
        axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        axes.set_title(f"Digits, one class per client, {ROUNDS} rounds of one step", loc="left", fontsize=10)
    write_figure(FIGURES_FOLDER / "layer_order.png", figure)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["draw"]):
        sys.exit(f"docs/scripts/layer_order.py: nothing or draw is needed, found {' '.join(sys.argv[1:])}")
    if not sys.argv[1:]:
        train()
    draw()
