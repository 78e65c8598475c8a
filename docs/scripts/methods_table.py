"""Print the tables in docs/methods.md: ``python docs/scripts/methods_table.py``.

A table for each family has a line for each callback, from its docstring and its ``paper``.

A further table shows how methods treat the state of the model. These treatments come from the
method's policy in a run of 100 rounds. The table also shows bytes and exchanges. They come from the
log of a run with ResNet-20. A method has one row for each of its ``examples``. Rows that equal an
earlier row of the method, or FedAvg's, are left out.
"""

import inspect
import logging
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import FederatedCallback, FederatedDataModule, FederatedModule, callbacks
from fl_lightning.batch_norm.kinds import KINDS
from fl_lightning.models import ResNet20
from fl_lightning.round.policy import resolve_policy

ROUNDS = 100
STATE = {"weight": "W", "affine": "A", "mean": "S", "var": "S"}
COLUMNS = {"averaged": ("averaged", "max"), "local": ("local",), "frozen": ("frozen",), "pooled": ("pooled",)}
FAMILIES = {
    "freezing": ("FixBN", "SlidingWindowFixBN", "FedExFixBN"),
    "in training": ("FBN", "FedTAN", "HybridBN", "BNSCAFFOLD", "BatchRenormalization"),
    "for evaluation": ("MomentMatching", "StaticBN", "FedDNA"),
    "personal": ("FedBN", "SiloBN", "MTFL", "FedPer", "FedRep", "FedBABU"),
    "drift": ("FedProx", "SCAFFOLD", "FedDyn", "FedNova", "MaintainedMomentum", "ClientGradientClipping"),
    "privacy": ("PrivateSGD", "PrivateFedAvg"),
    "robustness": ("Byzantine", "AggregationDiagnostics"),
    "observers": (
        "ClientEvaluation",
        "BatchNormDiagnostics",
        "ClassifierBias",
        "CommunicationLedger",
        "StatisticsSources",
        "AdaBN",
        "ParticipationGap",
        "GradientInversion",
        "LabelInference",
    ),
}
"""Callbacks of each family, in the order of its table."""


def family(name: str) -> str:
    """Return the table of a family in Markdown: callback, first line of the docstring, and paper."""
    lines = ["| callback | purpose | paper |", "|---|---|---|"]
    for callback in FAMILIES[name]:
        kind = getattr(callbacks, callback)
        line = (inspect.getdoc(kind) or "").splitlines()[0].rstrip(".").replace("``", "`")
        purpose = re.sub(r"^[\w-]+( \(lite\))?: ", "", line)
        lines.append(f"| `{callback}` | {purpose[0].upper()}{purpose[1:]} | {_linked(kind.paper)} |")
    return "\n".join(lines)


def _linked(paper: str) -> str:
    """Return the words for a paper with a link to arXiv, without remarks on the callback."""
    words = re.sub(r" ?\((an observer|attacks|FBN|HBN)[^)]*\)", "", paper)
    return re.sub(r"arXiv (\d{4}\.\d{4,5})", r"[arXiv \1](https://arxiv.org/abs/\1)", words)


def methods() -> dict[str, type[FederatedCallback]]:
    """Return the shipped methods by name.

    Attacks and observers are left out, and methods that take no network with BN.
    FedAvg has the name ``"none"``.
    """
    found = {name: getattr(callbacks, name) for name in callbacks.__all__}
    ours = {
        n: kind
        for n, kind in found.items()
        if issubclass(kind, FederatedCallback) and kind.role == "method" and not kind.per_sample
    }
    return {"none": FederatedCallback, **ours}


def stages(callback: FederatedCallback, column: tuple[str, ...]) -> str:
    """Return the text of one table cell, such as ``"W, A, S until T*"``.

    The text names the kinds of state that belong to the column, and their rounds.
    """
    policies = [resolve_policy([callback], r, ROUNDS) for r in range(1, ROUNDS + 1)]
    later = callback.undecided()
    words = {}
    parts = {part: part for part in policies[0] if part not in KINDS}
    for kind, state in (STATE | parts).items():
        inside = [policy[kind] in column for policy in policies]
        if later.get(kind) in column:
            words[state] = f"{state} after T*"
        elif any(inside):
            whole = all(inside) and kind not in later
            words[state] = state if whole else f"{state} until T*" if inside[0] else f"{state} after T*"
    return ", ".join(words.values())


class RandomImages(L.LightningDataModule):
    """A client with eight images of random noise.

    The pixels do not matter, because the number of bytes does not depend on them.
    """

    def train_dataloader(self) -> DataLoader:
        """Return batches of four images."""
        images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(images, torch.arange(8)), batch_size=4)

    def val_dataloader(self) -> DataLoader:
        """Return the training batches."""
        return self.train_dataloader()


class Rows(L.Callback):
    """A callback that stores the metrics of each round."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the metrics of the round."""
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def costs(callback: FederatedCallback) -> list[tuple[str, str, int]]:
    """Return the communication of a client in rounds 1 and 4 of a run of 5 rounds.

    For each of the two rounds, there are three values: megabytes sent, megabytes received, and the
    number of exchanges. Round 1 is before T*, and round 4 is after T*. The first round after T* is
    not typical, because clients receive the frozen state in this round. The last round is not
    typical either, because some methods end a run with a pass over the data.
    """
    data = FederatedDataModule([RandomImages(), RandomImages()], RandomImages())
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    module = FederatedModule(
        ResNet20(), optimizer, local_steps=1 + getattr(callback, "head_steps", 0), **callback.needs
    )
    seen = Rows()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_epochs=5,
            accelerator="cpu",
            callbacks=[callback, seen],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=1,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=data)
    return [
        (
            f"{row['comm/upload_bytes'] / 2e6:.3f}",
            f"{row['comm/download_bytes'] / 2e6:.3f}",
            int(row["comm/exchanges"]),
        )
        for row in (seen.rows[0], seen.rows[3])
    ]


def shown_as(name: str, settings: Mapping[str, object]) -> str:
    """Return the name of a method, with its settings."""
    arguments = ", ".join(f"{key}: {value}" for key, value in settings.items())
    return f"`{name}`, `{arguments}`" if settings else f"`{name}`"


def table() -> str:
    """Return the table of state and traffic in Markdown."""
    header = ["callback", *COLUMNS, "MB up", "MB down", "exchanges"]
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    seen: set[str] = set()
    for name, kind in methods().items():
        for number, settings in enumerate(kind.examples):
            cells = [stages(kind(**settings), column) for column in COLUMNS.values()]
            callback = kind(**settings)
            if callback.undecided():
                callback.freeze_round = 1  # pretend that the method has found T* = 1
            columns = zip(*costs(callback), strict=True)
            cells += [" then ".join(dict.fromkeys(map(str, column))) for column in columns]
            row = " | ".join(cells)
            if f"none {row}" not in seen and f"{name} {row}" not in seen:
                first = "none (FedAvg)" if name == "none" else shown_as(name, settings if number else {})
                lines.append(f"| {first} | {row} |")
            seen.add(f"{name} {row}")
    return "\n".join(lines)


def quiet_table() -> str:
    """Return the table. Meanwhile, methods and Lightning print nothing to the standard output."""
    loggers = [logging.getLogger(f"lightning.pytorch{name}") for name in ("", ".utilities.rank_zero")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with redirect_stdout(sys.stderr):
            return table()
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


if __name__ == "__main__":
    print("\n\n".join([*map(family, FAMILIES), quiet_table()]))
