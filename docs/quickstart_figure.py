"""Draw docs/quickstart.png from the three runs that the README names: ``python docs/quickstart_figure.py``.

Needs matplotlib (``pip install matplotlib``) and the runs below ``runs/``.
"""

from pathlib import Path

import matplotlib as mpl

from fl_lightning.metrics_log import read_rows

mpl.use("Agg")
import matplotlib.pyplot as plt

RUNS = {
    "digits_fedavg_gn": ("FedAvg, Group Normalization", "#0072B2", "--"),
    "quickstart": ("FixBN, T* = 200", "#D55E00", "-"),
    "digits_fedavg_bn": ("FedAvg, Batch Normalization", "#555555", ":"),
}


def main() -> None:
    """Read each run's newest metrics and draw validation accuracy over rounds."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name, (label, colour, line) in RUNS.items():
        newest = max(Path("runs", name).glob("*-s0*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        rows = [row for row in read_rows(newest) if "val/accuracy" in row]
        rounds, accuracy = [row["round"] for row in rows], [row["val/accuracy"] for row in rows]
        axes.plot(rounds, accuracy, line, color=colour, label=label, linewidth=2)
    axes.axvline(200, color="#D55E00", linewidth=1, alpha=0.4)
    axes.annotate("T*: statistics freeze", (200, 0.5), (206, 0.5), color="#D55E00")
    axes.set(xlabel="communication round", ylabel="validation accuracy", ylim=(0, 1.02), xlim=(0, 400))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    axes.set_title("Digits, 10 clients with one class each, E = 1", loc="left", fontsize=11)
    target = Path(__file__).parent / "quickstart.png"
    figure.savefig(target, dpi=150)
    print(f"written to {target}")


if __name__ == "__main__":
    main()
