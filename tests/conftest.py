"""Settings of every test: one thread, no network, no accelerator, no W&B but in its own tests."""

import os

os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# also for what tests start; and runs stay in one process unless they ask for more
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch


@pytest.fixture(autouse=True)
def single_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Whatever a test writes relative to the working directory lands in its temporary directory."""
    monkeypatch.chdir(tmp_path)
