"""Draw the figure of docs/audit.md and print its table: ``python docs/scripts/audit.py``.

A cell is a run of the audit. Each file in ``docs/numbers/audit`` describes one cell. The file has
the command and the evaluations of the cell. If the run is finished, the file also has the result.

``python docs/scripts/audit.py PURE FILE`` writes the partition of the cells with ten images of
every class to FILE. PURE is a partition into two classes per client, seed 0 or 1.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml
from folders import FIGURES_FOLDER, NUMBERS_FOLDER
from matplotlib.figure import Figure

from fl_lightning.pictures.style import BLUE, GREEN, VERMILLION, paper_style, write_figure

METHODS = ("BN", "GN", "FixBN")

PUBLISHED = {
    entry["rows"]["method"]: round(float(entry["printed"].partition("±")[0]) / 100, 4)
    for entry in yaml.safe_load((NUMBERS_FOLDER / "published.yaml").read_text())["fixbn_table4"]
}
"""Test accuracy of each method in FixBN's Table 4, the mean of three runs."""

COLOURS = {"BN": VERMILLION, "GN": GREEN, "FixBN": BLUE, "BN centralised": "black"}
STYLES = {0: ":", 1: "--", 3: (0, (5, 1, 1, 1, 1, 1)), 10: "-"}
"""Line of each number of images of every other class, for seed 0."""

LAST = 5
"""Number of evaluations at the end of a run that enter the column "mean of the last five".

A run is evaluated every ten rounds.
"""


def cells() -> dict[str, dict[str, Any]]:
    """Return the content of each cell's file. The key is the file's name without ``.json``."""
    folder = NUMBERS_FOLDER / "audit"
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def table() -> str:
    """Return a Markdown table of the cells. Finished cells come first."""
    lines = [
        "| method | images of other classes | seed | state | last | best (round) | mean of the last five | published | partition |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, cell in sorted(cells().items(), key=lambda item: (item[1]["state"] != "done", item[0])):
        method = _method(cell)
        rows = cell["rows"][1:]
        values = [row["test/accuracy"] for row in rows]
        best = max(rows, key=lambda row: row["test/accuracy"])
        done = cell["state"] == "done"
        numbers = (
            [
                f"{values[-1]:.4f}",
                f"{best['test/accuracy']:.4f} ({best['round']})",
                f"{sum(values[-LAST:]) / LAST:.4f}",
            ]
            if done
            else ["", f"{best['test/accuracy']:.4f} ({best['round']})", ""]
        )
        published = f"{PUBLISHED[method]:.4f}" if method in PUBLISHED else ""
        cut = [method, _other_images(name, cell), _seed(name), cell["state"], *numbers, published]
        digest = cell.get("partition_file_sha256") or cell["partition_sha256"]["total"]
        lines.append(f"| {' | '.join(cut)} | `{digest[:8]}` |")
    return "\n".join(lines)


def account() -> str:
    """Return a Markdown table with the points by which each change moves the accuracy.

    A point is 0.01 of test accuracy. A change without a finished cell has no entry.
    """
    content, rows = cells(), dict[str, list[str]]()
    biases = json.loads((NUMBERS_FOLDER / "classifier_bias.json").read_text())["rows"]
    for method in METHODS:
        runs = {tail: content[f"{method.lower()}_{tail}_s0"] for tail in ("pure", "tail10")}
        last, best = _last_and_best(runs["pure"]) or (None, None)
        with_tail = _last_and_best(runs["tail10"])
        bias = next((x for x in biases if (x["method"], x["tail"], x["round"]) == (method, 0, 640)), None)
        for name, value in (
            ("published", PUBLISHED[method]),
            ("here, two classes only, last evaluation", last),
            ("difference", last and PUBLISHED[method] - last),
            ("best evaluation instead of the last", best and last and best - last),
            ("ten images of every other class", with_tail and last and with_tail[0] - last),
            (
                "correction of the classifier's bias without labels",
                bias and bias["accuracy_calibrated"] - bias["accuracy"],
            ),
        ):
            is_accuracy = name.startswith(("published", "here"))
            shown = "" if value is None else f"{value:.3f}" if is_accuracy else f"{100 * value:+.1f}"
            rows.setdefault(name, []).append(shown)
    lines = [f"| {name} | {' | '.join(values)} |" for name, values in rows.items()]
    return "\n".join([f"| | {' | '.join(METHODS)} |", "|---|---|---|---|", *lines])


def _last_and_best(cell: dict[str, Any]) -> tuple[float, float] | None:
    """Return the last and the best accuracy of a finished cell; None for an unfinished cell."""
    values = [row["test/accuracy"] for row in cell["rows"][1:]]
    return (values[-1], max(values)) if cell["state"] == "done" else None


def measures() -> str:
    """Return a Markdown table of what ``ClassifierBias`` has measured on saved checkpoints."""
    names = (
        "accuracy",
        "train_accuracy",
        "accuracy_calibrated",
        "accuracy_within_clients",
        "accuracy_between_clients",
    )
    lines = [
        "| round | method | images of other classes | seed | test accuracy | training accuracy | calibrated | within clients | between clients |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in json.loads((NUMBERS_FOLDER / "classifier_bias.json").read_text())["rows"]:
        values = [f"{row[name]:.3f}" for name in names]
        cut = [str(row["round"]), row["method"], _tail(row["tail"]), str(row.get("seed", 0)), *values]
        lines.append(f"| {' | '.join(cut)} |")
    return "\n".join(lines)


def readings() -> str:
    """Return a Markdown table of the study ``shards_readings`` at scale ``long``."""
    lines = [
        "| difference | BN | GN | FixBN |",
        "|---|---|---|---|",
    ]
    rows = json.loads((NUMBERS_FOLDER / "shards_readings.json").read_text())["rows"]
    for reading in dict.fromkeys(row["reading"] for row in rows):
        cut = [reading]
        for method in METHODS:
            row = next((row for row in rows if (row["reading"], row["method"]) == (reading, method)), None)
            cut.append(f"{row['accuracy']:.3f} ({row['accuracy_calibrated']:.3f})" if row else "")
        lines.append(f"| {' | '.join(cut)} |")
    return "\n".join(lines)


def with_ten_images(partition: dict[str, Any]) -> dict[str, Any]:
    """Return a partition whose clients also have ten images of every other class.

    Args:
        partition: A saved partition of ``configs/cifar10_fedavg_bn.yaml`` with seed 0 or 1. The
            file ``docs/numbers/ten_images.json`` has the images that are added.

    Raises:
        KeyError: The partition has another seed.
    """
    added = json.loads((NUMBERS_FOLDER / "ten_images.json").read_text())
    images = added[str(partition["origin"]["settings"]["seed"])]
    clients = [
        {**client, "train": sorted({*client["train"], *more})}
        for client, more in zip(partition["clients"], images, strict=True)
    ]
    return {**partition, "overlap": True, "clients": clients}


def draw() -> None:
    """Draw the test accuracy of each cell over the rounds, random and consecutive pairs beside each other.

    Horizontal lines show the published values.
    """
    with paper_style():
        figure = Figure(figsize=(9, 3.6), layout="constrained")
        sides = figure.subplots(1, 2, sharey=True)
        for name, cell in cells().items():
            method, seed = _method(cell), _seed(name)
            rounds, values = zip(*((row["round"], row["test/accuracy"]) for row in cell["rows"]), strict=True)
            label = method if "centralised" in method else f"{method}, {_images_of_others(name)} other images"
            label = label if seed == "0" else f"{label}, seed {seed}"
            style = STYLES[_images_of_others(name)] if seed == "0" else "-."
            axes = sides[int("consecutive" in name)]
            axes.plot(rounds, values, color=COLOURS[method], linestyle=style, label=label)
        for axes, pairs in zip(sides, ("two random classes", "two consecutive classes"), strict=True):
            for method in METHODS:
                axes.axhline(PUBLISHED[method], color=COLOURS[method], linewidth=0.8, alpha=0.5)
                axes.annotate(f"{method}, published", (15, PUBLISHED[method]), va="bottom", fontsize=7)
            axes.set_title(pairs)
            axes.set_xlabel("communication round")
            axes.legend(fontsize=7, loc="lower right", ncols=2)
        sides[0].set_ylabel("test accuracy")
        sides[0].set_ylim(0, 0.92)
        write_figure(FIGURES_FOLDER / "audit.png", figure)


def _other_images(name: str, cell: dict[str, Any]) -> str:
    """Return the table's entry for the images beyond a client's two classes."""
    if "centralised" in _method(cell):
        return _tail(None)
    return _tail(_images_of_others(name)) + (", consecutive pairs" if "consecutive" in name else "")


def _images_of_others(name: str) -> int:
    """Return how many images of each other class a client has in a cell, such as 10 for bn_tail10_s0."""
    return int("".join(filter(str.isdigit, name.split("_")[1])) or 0)


def _tail(images: int | None) -> str:
    return "one machine has all images" if images is None else f"{images} of each class"


def _seed(name: str) -> str:
    """Return the seed of a cell, such as 0 for the file ``bn_pure_s0.json``."""
    return name.rpartition("_s")[2]


def _method(cell: dict[str, Any]) -> str:
    """Return the method of a cell: the part of its description before the first comma."""
    method: str = cell["cell"].split(",")[0]
    return method


if __name__ == "__main__":
    if sys.argv[1:]:
        pure, file = map(Path, sys.argv[1:])
        file.write_text(json.dumps(with_ten_images(json.loads(pure.read_text()))))
    else:
        draw()
        print(table())
