"""Run and draw the toy of the FBN paper: ``python docs/scripts/gaussian_toy.py``.

The toy is from Figures 1 and 2 of arXiv 2405.14670.

There are ten clients. Each client has one Gaussian in the plane, and draws 30 new points from it in
every round. The script trains FBN, and FedAvg with BN, for 100 rounds, and stores their running
statistics. It then normalises the points of each round in four ways:

- ``central`` uses the statistics of the union of the clients' batches. The other three ways are
  compared with ``central``.
- ``FBN`` uses FBN's running statistics after the previous round.
- ``FixBN`` uses FedAvg's averaged running statistics after the previous round. FixBN does the same
  after it has frozen the statistics.
- ``naive`` uses the statistics of each client's own batch, as FedAvg does in training.
"""

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from folders import FIGURES_FOLDER
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from fl_lightning import FederatedModule, VectorizedExecutor
from fl_lightning.callbacks import FBN
from fl_lightning.datamodules import Gaussians
from fl_lightning.models import BNProbe
from fl_lightning.pictures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    paper_style,
    write_figure,
)

ROUNDS = 100
GAMMAS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STYLES = {
    "naive": ("naive: each client its own batch", GREY, ":", "^"),
    "FixBN": ("FixBN: averaged running statistics", VERMILLION, "--", "D"),
    "FBN": ("FBN", BLUE, "-", "o"),
}
TITLES = {
    "raw": "before",
    "central": "BN, centralised",
    "naive": "naive (FedAvg in training)",
    "FixBN": "FixBN, averaged statistics",
    "FBN": "FBN",
}
NUM_CLASSES = 10
CLASS_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, BLACK)
CLASS_MARKERS = ("o", "^")
ERROR_TICKS = (0.2, 0.5, 1, 2, 5, 10)

Moments = tuple[Tensor, Tensor]
"""Running mean and running variance. Each has the shape ``[2]``."""

Statistics = list[Moments]
"""Running statistics at the start of each round. The last entry is from the end of the run."""


class RunningStatistics(L.Callback):
    """A callback that stores the server's running statistics in every round."""

    def __init__(self) -> None:
        self.found: Statistics = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the statistics at the start of a round."""
        norm = pl_module.model.norm
        self.found.append((norm.running_mean.clone(), norm.running_var.clone()))

    on_train_end = on_train_epoch_start


def statistics(
    data: Gaussians, callbacks: Sequence[L.Callback] = (), centralised: bool = False
) -> Statistics:
    """Train the model and return the server's running statistics of all rounds.

    Args:
        data: Data of the clients.
        callbacks: Methods of the run.
        centralised: Whether one model is trained on the union of the clients' batches.
    """
    L.seed_everything(0, verbose=False)
    module = FederatedModule(
        BNProbe(),
        partial(torch.optim.SGD, lr=0.5),
        local_steps=1,
        executor=VectorizedExecutor(),
        centralised=centralised,
    )
    kept = RunningStatistics()
    L.Trainer(
        max_epochs=ROUNDS,
        callbacks=[*callbacks, kept],
        accelerator="cpu",
        precision="64-true",
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, datamodule=data)
    return kept.found


def points_of(data: Gaussians, round_number: int) -> tuple[Tensor, Tensor]:
    """Return the points ``[n, m, 2]`` and labels ``[n, m]`` of a round.

    There are n clients with m points each.
    """
    everyone = range(data.num_clients)
    points, labels = data.cohort_batch(everyone, [round_number - 1] * data.num_clients).stack()
    return points.double(), labels


def normalised(points: Tensor, fbn: Moments, fedavg: Moments) -> dict[str, Tensor]:
    """Return the points of a round, ``[n m, 2]``, after each of the four normalisations.

    The keys are the names of the normalisations.

    Args:
        points: The clients' points, ``[n, m, 2]``.
        fbn: FBN's running statistics at the start of the round.
        fedavg: FedAvg's running statistics at the start of the round.
    """
    union = points.flatten(0, 1)
    return {
        "central": F.batch_norm(union, None, None, training=True),
        "FBN": F.batch_norm(union, *fbn),
        "FixBN": F.batch_norm(union, *fedavg),
        "naive": torch.cat([F.batch_norm(own, None, None, training=True) for own in points]),
    }


def errors(data: Gaussians, fbn: Statistics, fedavg: Statistics) -> dict[str, Tensor]:
    """Return each method's error, ``[rounds]``.

    The error is the mean Euclidean distance between the points that the method has normalised and
    the points that ``central`` has normalised.
    """
    rounds = []
    for number in range(1, ROUNDS + 1):
        views = normalised(points_of(data, number)[0], fbn[number - 1], fedavg[number - 1])
        rounds.append({name: (views[name] - views["central"]).norm(dim=1).mean() for name in STYLES})
    return {name: torch.stack([each[name] for each in rounds]) for name in STYLES}


def separability(data: Gaussians, fbn: Statistics, fedavg: Statistics) -> dict[str, float]:
    """Return the accuracy of a linear classifier for each normalisation.

    The classifier is fitted to the normalised points of round 99, and evaluated on the normalised
    points of round 100. The keys are the names of the normalisations. The key ``"raw"`` stands for
    the points without normalisation.
    """
    views, labels = [], []
    for number in (ROUNDS - 1, ROUNDS):
        points, own = points_of(data, number)
        views.append(normalised(points, fbn[number - 1], fedavg[number - 1]) | {"raw": points.flatten(0, 1)})
        labels.append(own.flatten())
    return {
        name: float(
            LinearDiscriminantAnalysis().fit(views[0][name], labels[0]).score(views[1][name], labels[1])
        )
        for name in views[0]
    }


def scatter(axes: Axes, points: Tensor, labels: Tensor) -> None:
    """Draw points. Each class has its own combination of colour and marker.

    If no point is near the origin, the number of each class is drawn too.
    """
    apart = bool(points.norm(dim=1).min() > 0.4)
    limit = (1.3 if apart else 1.1) * float(points.abs().max())
    for label in range(NUM_CLASSES):
        own = points[labels == label]
        colour = CLASS_COLOURS[label % len(CLASS_COLOURS)]
        axes.scatter(
            *own.T,
            s=9,
            color=colour,
            marker=CLASS_MARKERS[label % len(CLASS_MARKERS)],
            linewidths=0,
            alpha=0.7,
        )
        if apart:
            centre = own.mean(0)
            place = centre * (1 + 0.32 * limit / (1.3 * float(centre.norm())))
            axes.text(*place.tolist(), str(label), color=colour, ha="center", va="center", fontsize=9)
    axes.set(xlim=(-limit, limit), ylim=(-limit, limit), aspect="equal")
    axes.locator_params(nbins=5)


def draw_points(path: Path, data: Gaussians, fbn: Statistics, fedavg: Statistics) -> None:
    """Draw the points of the last round after each normalisation.

    The last panel shows the running variances of FBN and FedAvg over the rounds.
    """
    points, labels = points_of(data, ROUNDS)
    views = {"raw": points.flatten(0, 1)} | normalised(points, fbn[ROUNDS - 1], fedavg[ROUNDS - 1])
    accuracy = separability(data, fbn, fedavg)
    radius = float(views["central"].norm(dim=1).mean())
    with paper_style():
        figure = Figure(figsize=(7, 5.2), layout="constrained")
        grid = figure.subplots(2, 3)
        for axes, (name, title) in zip(grid.flat[:-1], TITLES.items(), strict=True):
            scatter(axes, views[name], labels.flatten())
            axes.set_title(f"{title}\nlinear probe accuracy {accuracy[name]:.2f}", loc="left", fontsize=9)
            if name != "raw":
                axes.add_patch(Circle((0, 0), radius, fill=False, color=GREY, linestyle="--", linewidth=1))
        axes = grid.flat[-1]
        for found, name, label in ((fbn, "FBN", "FBN"), (fedavg, "FixBN", "FedAvg, FixBN")):
            _, colour, line, _ = STYLES[name]
            variance = torch.stack([variance for _, variance in found]).mean(1)
            axes.plot(variance, line, color=colour)
            axes.text(ROUNDS, 1.15 * variance[-1], f"{label}: {variance[-1]:.1f}", color=colour, ha="right")
        axes.set(yscale="log", ylim=(0.7, 120), xlim=(0, ROUNDS), xlabel="communication round")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_title("running variance\n(of all points: 51)", loc="left", fontsize=9)
        title = "Ten clients with one class each, round 100: points before and after Batch Normalization."
        where = "Dashed: where centralised BN puts the classes 0 to 9."
        figure.suptitle(f"{title}\n{where}", x=0.01, ha="left")
    write_figure(path, figure)


def draw_errors(path: Path, found: dict[float, dict[str, float]]) -> None:
    """Draw the error of each method for each gamma, the similarity of the clients."""
    with paper_style():
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        axes = figure.subplots()
        for name, (label, colour, line, marker) in STYLES.items():
            values = [error[name] for error in found.values()]
            axes.plot([*found], values, line, color=colour, marker=marker, markersize=5, label=label)
        axes.set(
            yscale="log",
            xlabel="similarity gamma of the clients (0: one class each, 1: all alike)",
            ylabel="distance from centralised BN",
        )
        axes.set_yticks(ERROR_TICKS, [f"{tick:g}" for tick in ERROR_TICKS])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right", frameon=False)
        axes.text(0, 0.16, "FBN: mostly its first rounds, whose variance starts at 1", color=STYLES["FBN"][1])
        axes.set_ylim(0.14, 11)
        axes.set_title("Normalisation error, mean of 300 points and 100 rounds", loc="left", fontsize=10)
    write_figure(path, figure)


def main() -> None:
    """Run the toy for each gamma, print the numbers and draw both figures."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found = {}
    print("gamma  variance FBN  FedAvg   error FBN  FixBN  naive")
    for gamma in GAMMAS:
        data = Gaussians(gamma=gamma)
        fbn, fedavg = statistics(data, [FBN()]), statistics(data)
        by_round = errors(data, fbn, fedavg)
        error = found[gamma] = {name: float(distances.mean()) for name, distances in by_round.items()}
        variances = [float(each[-1][1].mean()) for each in (fbn, fedavg)]
        print(
            f"{gamma:5.1f}  {variances[0]:12.2f}  {variances[1]:6.2f}  {error['FBN']:10.3f}  {error['FixBN']:5.3f}  "
            f"{error['naive']:5.3f}",
            flush=True,
        )
        if gamma == 0:
            start, accuracy = float(by_round["FBN"][:20].sum() / ROUNDS), separability(data, fbn, fedavg)
            central = statistics(data, centralised=True)
            gap = max(float((a - b).abs().max()) for a, b in zip(sum(fbn, ()), sum(central, ()), strict=True))
            draw_points(FIGURES_FOLDER / "gaussian_toy_points.png", data, fbn, fedavg)
    print(f"at gamma 0 the statistics of FBN and of centralised BN differ by at most {gap:.0e} in any round")
    print(f"at gamma 0 rounds 1 to 20 make {start:.3f} of the error of FBN, whose variance starts at 1")
    print("linear classifier at gamma 0: " + ", ".join(f"{name} {accuracy[name]:.3f}" for name in TITLES))
    draw_errors(FIGURES_FOLDER / "gaussian_toy_errors.png", found)


if __name__ == "__main__":
    main()
