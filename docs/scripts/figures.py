"""Draw the figures of README and results from runs below ``runs/``: ``python docs/scripts/figures.py NAME``, see ``FIGURES``.

Each curve is the mean over the seeds of a configuration, its band reaches from the lowest to the highest seed.
"""

import sys
from collections.abc import Sequence

import numpy as np
from folders import FIGURES_FOLDER
from matplotlib.figure import Figure
from runs import finished

from fl_lightning.pictures.style import BLUE, GREY, PURPLE, VERMILLION, paper_style, write_figure
from fl_lightning.run_directory.metrics import read_metrics

FIGURES = {
    "digits": {
        "title": "Digits, 10 clients with one class each, E = 1, LeNet",
        "freeze": 200,
        "curves": {
            "quickstart": ("FixBN", VERMILLION, "-", "o"),
            "digits_fedavg_gn": ("FedAvg, GN", BLUE, "--", "s"),
            "digits_fedavg_bn": ("FedAvg, BN", GREY, ":", "^"),
        },
    },
    "cifar10_small": {
        "title": "CIFAR-10 at 16x16 pixels, 5 clients with two classes each, E = 1, ResNet-8",
        "freeze": 1500,
        "curves": {
            "cifar10_small_fixbn_momentum_local": ("FixBN, momentum kept (local)", PURPLE, "-", "D"),
            "cifar10_small_fixbn": ("FixBN", VERMILLION, "-", "o"),
            "cifar10_small_gn": ("FedAvg, GN", BLUE, "--", "s"),
            "cifar10_small_bn": ("FedAvg, BN", GREY, ":", "^"),
        },
    },
    "cifar10_small_fbn": {
        "title": "CIFAR-10 at 16x16 pixels, 10 clients with one class each, E = 1, FBN's CNN",
        "freeze": 500,
        "curves": {
            "cifar10_small_fbn_central_bn": ("BN, centralised", GREY, "-.", "v"),
            "cifar10_small_fbn": ("FBN", BLUE, "-", "s"),
            "cifar10_small_fbn_fixbn": ("FixBN", VERMILLION, "-", "o"),
            "cifar10_small_fbn_naive": ("FedAvg, BN", GREY, ":", "^"),
        },
    },
}


def curves(name: str, seeds: Sequence[int] = (0, 1, 2)) -> tuple[np.ndarray, np.ndarray]:
    """Rounds ``[R]`` and validation accuracies ``[seeds, R]`` of the newest finished attempt of each seed.

    Raises:
        SystemExit: A seed's is missing, or they are not of one configuration, length and kind of data.
    """
    attempts = finished(name)
    found = []
    for seed in seeds:
        if seed not in attempts:
            sys.exit(
                f"runs/{name}: a finished run of seed {seed} is needed, found {', '.join(map(str, attempts))}"
            )
        rows = read_metrics(attempts[seed][0] / "metrics.jsonl")
        found.append({row["round"]: row["val/accuracy"] for row in rows if "val/accuracy" in row})
        if not found[-1]:
            sys.exit(f"runs/{name}: seed {seed} has no val/accuracy; set data.init_args.val_fraction above 0")
    if any(curve.keys() != found[0].keys() for curve in found):
        sys.exit(f"runs/{name}: the seeds were not evaluated after the same rounds")
    return np.array([*found[0]]), np.array([[*curve.values()] for curve in found])


def main(key: str) -> None:
    """Draw a figure to ``docs/figures/<key>.png``."""
    settings = FIGURES[key]
    with paper_style():
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.subplots()
        last = 1
        for name, (label, colour, line, marker) in settings["curves"].items():
            rounds, accuracy = curves(name)
            last = rounds[-1]
            mean = accuracy.mean(0)
            axes.fill_between(rounds, accuracy.min(0), accuracy.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.plot(
                rounds,
                mean,
                line,
                color=colour,
                marker=marker,
                markersize=4,
                label=f"{label}: {mean[-1]:.3f}",
            )
        axes.axvline(settings["freeze"], color=VERMILLION, linewidth=1, alpha=0.5)
        axes.annotate(" T*: statistics freeze", (settings["freeze"], 0.03), color=VERMILLION)
        axes.set(xlabel="communication round", ylabel="validation accuracy", xlim=(0, last), ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(
            loc="upper left", bbox_to_anchor=(1, 1), frameon=False, title="mean of 3 seeds, last round"
        )
        axes.set_title(settings["title"], loc="left", fontsize=10)
    write_figure(FIGURES_FOLDER / f"{key}.png", figure)


if __name__ == "__main__":
    if sys.argv[1:] not in ([key] for key in FIGURES):
        sys.exit(
            f"docs/scripts/figures.py: one of {', '.join(FIGURES)} is needed, found {' '.join(sys.argv[1:]) or 'nothing'}"
        )
    main(sys.argv[1])
