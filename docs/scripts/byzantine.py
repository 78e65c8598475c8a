"""Draw the figures of docs/byzantine.md: ``python docs/scripts/byzantine.py``.

The figures show FBN and averaged BN under attack. The numbers come from the file
``docs/numbers/byzantine.json``. The command ``python docs/scripts/byzantine.py numbers`` first
writes this file from the runs of the study ``fbn_byzantine`` at the scale ``reduced``. It then
draws the figures.
"""

import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch
from folders import FIGURES_FOLDER, NUMBERS_FOLDER
from matplotlib.figure import Figure

from fl_lightning import load_study
from fl_lightning.aggregation import NNM, LayerStatistics, Median, StatisticsAggregator, WeightedMean
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.pictures.style import BLUE, GREY, PURPLE, VERMILLION, paper_style, write_figure

STUDY = "runs/studies/fbn_byzantine-reduced"
FILE = NUMBERS_FOLDER / "byzantine.json"
METHODS = {"fbn": "FBN", "fbn_naive": "averaged BN"}
GAMMAS = ("0.0", "0.01")
ATTACKS = {"sign_flip": "SF", "fall_of_empires": "FOE", "a_little_is_enough": "ALIE"}
DEFENCES = {"undefended": "mean", "median": "NNM + median", "trimmed_mean": "NNM + trimmed mean"}
CELLS = {"clean": "no attack, mean"} | {
    f"{defence}-{attack}": f"{label}, {words}"
    for attack, label in ATTACKS.items()
    for defence, words in DEFENCES.items()
}
CURVES = {
    "clean": ("no attack", GREY, "-", "o"),
    "undefended-sign_flip": ("SF, mean", VERMILLION, ":", "v"),
    "undefended-fall_of_empires": ("FOE, mean", PURPLE, ":", "^"),
    "median-sign_flip": ("SF, NNM + median", VERMILLION, "-", "s"),
    "median-fall_of_empires": ("FOE, NNM + median", PURPLE, "-", "D"),
    "median-a_little_is_enough": ("ALIE, NNM + median", BLUE, "-", "P"),
}


def collect() -> None:
    """Write the file of numbers from the runs of the study.

    The file has three entries for each method, gamma and cell: the test accuracy of each seed, the
    seeds that diverged, and the validation accuracy of each seed and round.
    """
    numbers = {}
    methods, attacks, defences = (
        {words: name for name, words in named.items()} for named in (METHODS, ATTACKS, DEFENCES)
    )
    for labels, cells, _ in load_study(STUDY).rows:
        cell = "clean"
        if labels["attack"] != "none":
            cell = f"{defences[labels['defence']]}-{attacks[labels['attack']]}"
        found: dict = {"test": {}, "diverged": [], "validation": {}}
        for seed, folder in zip(cells["seed"], map(Path, cells["directory"]), strict=True):
            result = json.loads((folder / "result.json").read_text())
            found["test"][seed] = round(result["test/accuracy"], 4)
            found["diverged"] += [seed] if result.get("diverged") else []
            rows = read_metrics(folder / "metrics.jsonl")
            found["validation"][seed] = {
                row["round"]: round(row["val/accuracy"], 4) for row in rows if "val/accuracy" in row
            }
        numbers[f"{methods[labels['method']]} {float(labels['gamma'])} {cell}"] = found
    FILE.write_text(json.dumps(numbers) + "\n")


def mean(found: dict) -> float:
    """Return the test accuracy of a cell, as the mean over its seeds."""
    return statistics.mean(found["test"].values())


def heat_map(numbers: dict) -> None:
    """Draw the test accuracy of every cell as a heat map."""
    columns = [(method, gamma) for method in METHODS for gamma in GAMMAS]
    values = np.array([[mean(numbers[f"{m} {g} {cell}"]) for m, g in columns] for cell in CELLS])
    with paper_style():
        figure = Figure(figsize=(6.4, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.grid(visible=False)
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=0.6, aspect="auto")
        for row, cell in enumerate(CELLS):
            for column, (method, gamma) in enumerate(columns):
                found = numbers[f"{method} {gamma} {cell}"]
                text = f"{values[row, column]:.3f}"
                if found["diverged"]:
                    text += f"\n{len(found['diverged'])} of {len(found['test'])} diverged"
                colour = "white" if values[row, column] < 0.3 else "black"
                axes.text(column, row, text, ha="center", va="center", fontsize=7, color=colour)
        axes.set_xticks(range(len(columns)), [f"{METHODS[m]}\ngamma = {float(g):g}" for m, g in columns])
        axes.set_yticks(range(len(CELLS)), list(CELLS.values()))
        figure.colorbar(image, label="test accuracy, mean over seeds")
        write_figure(FIGURES_FOLDER / "byzantine.png", figure)


def curves(numbers: dict) -> None:
    """Draw the validation accuracy over the rounds at gamma = 0.

    A line is the mean over the seeds. A band reaches from the lowest to the highest seed.
    """
    with paper_style():
        figure = Figure(figsize=(8, 3.4), layout="constrained")
        for axes, method in zip(figure.subplots(1, 2, sharey=True), METHODS, strict=True):
            for cell, (label, colour, line, marker) in CURVES.items():
                by_seed = numbers[f"{method} 0.0 {cell}"]["validation"].values()
                rounds = [int(number) for number in next(iter(by_seed))]
                found = np.array([[*curve.values()] for curve in by_seed])
                axes.plot(
                    rounds,
                    found.mean(0),
                    color=colour,
                    linestyle=line,
                    marker=marker,
                    markersize=3,
                    label=label,
                )
                axes.fill_between(rounds, found.min(0), found.max(0), color=colour, alpha=0.15, linewidth=0)
            axes.set_title(METHODS[method])
            axes.set_xlabel("communication round")
        figure.axes[0].set_ylabel("validation accuracy")
        figure.axes[1].legend(fontsize=7)
        write_figure(FIGURES_FOLDER / "byzantine_curves.png", figure)


def amplification() -> None:
    """Draw the server's variance under an attack that flips the sign of the means.

    The left panel shows the variance over the rounds. The right panel shows the final variance for
    each beta. Three of ten clients attack. The data have mean 1 and variance 1.
    """
    with paper_style():
        figure = Figure(figsize=(7, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        for wire, defended, label, colour, line in (
            ("run", False, "run form", VERMILLION, "-"), ("batch", False, "batch form", BLUE, "-"),
            ("run", True, "run form, NNM + median", VERMILLION, ":"), ("batch", True, "batch form, NNM + median", BLUE, "--"),
        ):  # fmt: skip
            left.plot(
                *zip(*enumerate(variances(wire, 0.1, defended, 60)), strict=True),
                color=colour,
                linestyle=line,
                label=label,
            )
            if not defended:
                betas = np.linspace(0.02, 1, 50)
                right.plot(
                    betas,
                    [variances(wire, float(beta), False, 1500)[-1] for beta in betas],
                    color=colour,
                    label=label,
                )
        left.set_xlabel("communication round")
        left.set_ylabel("server's variance (true: 1)")
        left.legend(fontsize=7)
        right.set_xlabel("beta (momentum of the BN layer)")
        right.set_ylabel("where it ends")
        write_figure(FIGURES_FOLDER / "byzantine_amplification.png", figure)


def variances(wire: str, beta: float, defended: bool, rounds: int) -> list[float]:
    """Simulate FBN under a sign flip of the means, and return the server's variances.

    The first value is the variance at the start. The other values are those after each round.

    Args:
        wire: Statistics that clients send: ``"run"`` (running statistics) or ``"batch"``.
        beta: Momentum of the BN layer.
        defended: Whether the server uses NNM and the median instead of the mean.
        rounds: Number of rounds.
    """
    aggregator = StatisticsAggregator(Median(pre=NNM(3)) if defended else WeightedMean())
    weight, m, v = (beta if wire == "run" else 1.0), 1.0, 1.0
    found = [v]
    for _ in range(rounds):
        means = torch.full((10, 1), m + weight * (1 - m), dtype=torch.float64)
        spread = torch.full((10, 1), v + weight * (1 - v), dtype=torch.float64)
        means[7:] *= -1
        uniform = torch.full((10,), 0.1, dtype=torch.float64)
        ((mean_, variance),) = aggregator([LayerStatistics(means, spread, uniform, 1 / weight)])
        m, v = m + beta / weight * (float(mean_) - m), v + beta / weight * (float(variance) - v)
        found.append(v)
    return found


def main(arguments: list[str]) -> None:
    """Draw all figures. With the argument ``numbers``, write the file of numbers first."""
    if arguments == ["numbers"]:
        collect()
    numbers = json.loads(FILE.read_text())
    heat_map(numbers)
    curves(numbers)
    amplification()


if __name__ == "__main__":
    main(sys.argv[1:])
