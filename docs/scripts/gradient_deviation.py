"""Measure and draw the gradient deviation: ``python docs/scripts/gradient_deviation.py``.

The gradient deviation compares two gradients: the mean of the clients' gradients, and the gradient
of one model on the union of the clients' batches. It is the relative distance between the two.
``BatchNormDiagnostics`` measures it in every tenth round. The runs are shipped configurations in
float64. There are ten clients with one digit each, and a round has one local step. All runs
together take five minutes on one core.

The script prints a table and draws ``docs/figures/gradient_deviation.png``. The papers on FedTAN
and FixBN claim that BN has a large gradient deviation if clients have different classes. In the
figure, BN's curve is near 1, and the lowest curves are near 1e-15.
"""

import logging
import os
import warnings
from pathlib import Path

import torch
from folders import FIGURES_FOLDER
from matplotlib.figure import Figure

from fl_lightning.cli.command_line import main as command_line
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.pictures.series import Series, series
from fl_lightning.pictures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    VERMILLION,
    paper_style,
    write_figure,
)

CONFIGS = Path(__file__).parents[2] / "configs"
FEDTAN = ("--trainer.callbacks=FedTAN", "--model.weighting=uniform")
CURVES = {
    "BN": (["digits_fedavg_bn"], GREY, ":", "^"),
    "FedTAN, forward only": (
        ["digits_fedavg_bn", *FEDTAN, "--trainer.callbacks.backward=own"],
        PURPLE,
        "-.",
        "v",
    ),
    "FixBN, T* = 200": (["quickstart"], VERMILLION, "-", "o"),
    "FedTAN": (["digits_fedavg_bn", *FEDTAN], ORANGE, "-", "P"),
    "GN": (["digits_fedavg_gn"], BLUE, "--", "s"),
    "FBN": (["digits_fbn"], GREEN, "-", "D"),
}
FLOOR = 1e-17  # a value of exactly 0 is drawn here, because the axis is logarithmic
ROUNDS = 400


def deviations(config: str, *options: str) -> tuple[Series, Series]:
    """Run a configuration. Return the measured rounds and their gradient deviations."""
    cli = command_line(
        [
            "fit",
            f"--config={CONFIGS / config}.yaml",
            "--name=gradient_deviation",
            *options,
            f"--trainer.max_epochs={ROUNDS}",
            f"--trainer.check_val_every_n_epoch={ROUNDS}",
            "--trainer.precision=64-true",
            "--trainer.callbacks+=BatchNormDiagnostics",
            "--trainer.callbacks.measure=[gradients]",
            "--wandb.mode=disabled",
        ]
    )
    assert cli.attempt is not None
    return series(read_metrics(cli.attempt.metrics), "bn/gradient_deviation")


def draw(found: dict[str, tuple[Series, Series]]) -> Figure:
    """Draw the gradient deviations over the rounds. The axis of the deviation is logarithmic."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for label, (_, colour, line, marker) in CURVES.items():
        rounds, values = found[label]
        axes.plot(
            rounds,
            values.clip(min=FLOOR),
            line,
            color=colour,
            marker=marker,
            markersize=4,
            markevery=4,
            label=label,
        )
    axes.axhspan(1e-16, 1e-13, color="0.92", zorder=0)
    axes.text(8, 2e-14, "equal to the union's, up to rounding", color=GREY, va="center", fontsize=8)
    axes.text(
        190, 1e-7, "FixBN freezes its statistics", color=VERMILLION, ha="right", va="center", fontsize=8
    )
    axes.set(
        yscale="log",
        xlabel="communication round",
        ylabel="gradient deviation\n" r"$\|\sum_i w_i g_i - g_{\mathrm{union}}\|\;/\;\|g_{\mathrm{union}}\|$",
        xlim=(0, ROUNDS),
        ylim=(FLOOR, 10),
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes.set_title("Digits, 10 clients with one class each, E = 1", loc="left", fontsize=10)
    return figure


def main() -> None:
    """Train all methods, print the table and draw the figure."""
    torch.set_num_threads(1)
    os.environ.setdefault("WANDB_MODE", "disabled")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    found = {label: deviations(*arguments) for label, (arguments, *_) in CURVES.items()}
    print(f"\n{'gradient deviation':22}  {'round 1':>8}  {'round 200':>9}  {'round 400':>9}")
    for label in CURVES:
        by_round = dict(zip(*found[label], strict=True))
        print(f"{label:22}  {by_round[1]:8.2g}  {by_round[200]:9.2g}  {by_round[400]:9.2g}")
    with paper_style():
        figure = draw(found)
    write_figure(FIGURES_FOLDER / "gradient_deviation.png", figure)


if __name__ == "__main__":
    main()
