"""A client for Flower's actors. Every actor imports this file, so its imports are few."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.utils.data import DataLoader

from benchmarks.naive import Batch, ClientImages, train
from benchmarks.recipe import AUGMENTATION, BATCH_SIZE, CLIENT_OPTIMIZER, make_model

app = ClientApp()


@app.train()  # type: ignore[misc, untyped-decorator, unused-ignore]  # Flower need not be installed
def train_client(message: Message, context: Context) -> Message:
    """Train on one client. Round 1 only starts the actors and has a single step."""
    torch.set_num_threads(1)
    settings: Any = message.content["config"]
    images = _images(settings["folder"], int(context.node_config["partition-id"]))
    loader: DataLoader[Batch] = DataLoader(images, BATCH_SIZE, shuffle=True, drop_last=True)
    model = make_model(settings["model"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    steps = 1 if settings["server-round"] == 1 else settings["steps"]
    seen = train(model, loader, steps, CLIENT_OPTIMIZER)
    metrics = MetricRecord({"num-examples": len(images), "seen": seen})
    return Message(
        RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message
    )


@cache
def _images(folder: str, client: int) -> ClientImages:
    """Return a client's images from the files that all actors share."""
    images, labels = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r") for name in ("images", "labels"))
    return ClientImages(images, labels, np.load(Path(folder) / f"samples{client}.npy"), AUGMENTATION)
