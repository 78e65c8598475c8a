"""Draw accuracy against communication: ``python docs/scripts/communication.py``.

The script trains several methods and draws a figure. ``python docs/scripts/communication.py draw``
does not train. It draws the results of an earlier call.

The runs are shipped configurations with ``CommunicationLedger``. Ten clients have one class of
Digits each, and train LeNet for 400 rounds of one local step with seed 0. Only FBN has another
learning rate than its configuration. This learning rate was chosen on validation data among 0.02,
0.05, 0.1, 0.2 and 0.4. With 0.4 FBN diverges.
"""

import json
import sys
import tempfile
from pathlib import Path

from folders import FIGURES_FOLDER, NUMBERS_FOLDER

from fl_lightning.callbacks.observers.network_link import NetworkLink
from fl_lightning.cli.command_line import main as run
from fl_lightning.experiments.run_directory.metrics_log import read_metrics
from fl_lightning.pictures.communication import communication_figure
from fl_lightning.pictures.style import write_figure

FILE = NUMBERS_FOLDER / "communication.json"
CONFIGS = Path(__file__).parents[2] / "configs"
METHODS: dict[str, list[str]] = {
    "FedTAN": ["digits_fedavg_bn.yaml", "--trainer.callbacks", "FedTAN", "--model.weighting", "uniform"],
    "FedAvg, GN": ["digits_fedavg_gn.yaml"],
    "FixBN": ["quickstart.yaml"],
    "FedAvg, BN": ["digits_fedavg_bn.yaml"],
    "FixBN, global momentum": ["digits_fixbn_momentum_local.yaml", "--trainer.callbacks.scope", "global"],
    "FBN": [
        *("digits_fedavg_bn.yaml", "--trainer.callbacks", "FBN"),
        *("--model.weighting", "samples", "--model.client_optimizer.init_args.lr", "0.2"),
    ],
    "SCAFFOLD, GN": ["digits_fedavg_gn.yaml", "--trainer.callbacks", "SCAFFOLD"],
}
KEPT = (
    "round",
    "val/accuracy",
    "comm/total_bytes_per_client",
    "comm/total_exchanges",
    "comm/total_simulated_s",
)


def train() -> None:
    """Train every method, and write the metrics of all evaluated rounds to the file of numbers."""
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for method, (config, *options) in METHODS.items():
            attempt = run(
                [
                    *("fit", "--config", str(CONFIGS / config), *options),
                    *("--trainer.callbacks+", "CommunicationLedger", "--run_root", folder),
                    *("--trainer.check_val_every_n_epoch", "10", "--wandb.mode", "disabled"),
                ]
            ).attempt
            assert attempt is not None
            rows = [row for row in read_metrics(attempt.metrics) if "val/accuracy" in row]
            found[method] = [{name: row[name] for name in KEPT if name in row} for row in rows]
    lines = [
        f" {json.dumps(method)}: [\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n ]"
        for method, rows in found.items()
    ]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def draw() -> None:
    """Draw ``docs/figures/communication.png`` from the file of numbers."""
    title = ["Digits, 10 clients with one class each, E = 1, 400 rounds, LeNet"]
    figure = communication_figure(json.loads(FILE.read_text()), str(NetworkLink()), title)
    write_figure(FIGURES_FOLDER / "communication.png", figure)


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["draw"]):
        sys.exit(f"docs/scripts/communication.py: nothing or draw is needed, found {' '.join(sys.argv[1:])}")
    if not sys.argv[1:]:
        train()
    draw()
