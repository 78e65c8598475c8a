"""Draw the figure of the study ``bias_or_features`` and print the gaps between its methods.

Command: ``python docs/scripts/bias_or_features.py runs/studies/bias_or_features-long``.

A gap is a difference between two methods with the same seed. If a bias of the classifier causes the
gap, ``ClassifierBias`` removes the gap.
"""

import sys
from statistics import mean, stdev

from folders import FIGURES_FOLDER
from matplotlib.figure import Figure

from fl_lightning import load_study
from fl_lightning.experiments.studies.study_frame import StudyFrame
from fl_lightning.pictures.style import BLUE, GREEN, VERMILLION, WIDTH, paper_style, write_figure

COLOURS = {"BN": VERMILLION, "GN": GREEN, "FixBN": BLUE}
GAPS = (("FixBN", "BN"), ("FixBN", "GN"), ("GN", "BN"))
ACCURACY, CALIBRATED = "test/accuracy", "test/accuracy_calibrated"
MEASURES = {
    ACCURACY: "accuracy",
    CALIBRATED: "calibrated",
    "test/accuracy_within_clients": "within clients",
    "test/accuracy_between_clients": "between clients",
}
Setting = tuple[str, str]
"""Labels of the axes ``E`` and ``tail``."""


def values(study: StudyFrame, setting: Setting, method: str, metric: str) -> list[float]:
    """Return a metric of one method in one setting, one value per seed."""
    wanted = {"E": setting[0], "tail": setting[1], "method": method}
    (row,) = (row for row in study.rows if row.labels == wanted)
    return [*row.of(metric).sort_index()]


def settings(study: StudyFrame) -> list[Setting]:
    """Return all settings in the order of the study."""
    return list(dict.fromkeys((row.labels["E"], row.labels["tail"]) for row in study.rows))


def described(setting: Setting) -> str:
    """Return a setting in words."""
    steps, tail = setting
    return f"E = {steps}, {'two classes only' if tail == '0' else f'{tail} images of every class'}"


def gaps(study: StudyFrame) -> str:
    """Return a Markdown table with the mean and the standard deviation of each gap in points."""
    lines = [f"| setting | gap | {' | '.join(MEASURES.values())} |", "|---" * (2 + len(MEASURES)) + "|"]
    for setting in settings(study):
        for high, low in GAPS:
            entries = []
            for metric in MEASURES:
                sides = (values(study, setting, method, metric) for method in (high, low))
                points = [100 * (left - right) for left, right in zip(*sides, strict=True)]
                entries.append(f"{mean(points):+.1f} ± {stdev(points):.1f}")
            lines.append(f"| {described(setting)} | {high} - {low} | {' | '.join(entries)} |")
    return "\n".join(lines)


def draw(study: StudyFrame) -> None:
    """Draw the accuracy and the calibrated accuracy of each method, one panel per setting."""
    with paper_style():
        figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
        for index, setting in enumerate(settings(study)):
            shared = figure.axes[0] if index else None
            axes = figure.add_subplot(1, len(settings(study)), index + 1, sharey=shared)
            for place, (method, colour) in enumerate(COLOURS.items()):
                for shift, metric, filled in ((-0.12, ACCURACY, True), (0.12, CALIBRATED, False)):
                    seeds = values(study, setting, method, metric)
                    axes.errorbar(
                        place + shift,
                        mean(seeds),
                        stdev(seeds),
                        fmt="o" if filled else "s",
                        color=colour,
                        markerfacecolor=colour if filled else "white",
                        capsize=2,
                    )
            axes.set_title(described(setting).replace(", ", "\n"), fontsize=8)
            axes.set_xticks(range(len(COLOURS)), [*COLOURS])
            axes.set_xlim(-0.5, len(COLOURS) - 0.5)
            axes.tick_params(labelleft=not index)
        figure.axes[0].set_ylabel("test accuracy")
        for marker, filled, label in (("o", "black", "accuracy"), ("s", "white", "calibrated")):
            figure.axes[0].plot(
                [], [], marker, color="black", markerfacecolor=filled, markersize=4, label=label
            )
        figure.axes[0].legend(fontsize=7, loc="best")
        write_figure(FIGURES_FOLDER / "gallery" / "bias_or_features-long-calibrated.png", figure)


if __name__ == "__main__":
    (folder,) = sys.argv[1:]
    draw(load_study(folder))
    print(gaps(load_study(folder)))
