"""Settings of every test: one thread, no network, no accelerator, no W&B but in its own tests."""

import gc
import os
import shutil
import sys
import tempfile
from functools import cache

import pytest

pytest_plugins = [
    "tests.support.chosen_rows",
    "tests.support.cpu_seconds",
    *(["tests.support.reached_lines"] if "REACHED_LINES" in os.environ else []),
]

os.environ["WANDB_MODE"] = "disabled"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
# also for what tests start; and runs stay in one process unless they ask for more
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config):
    """Where no bytecode is written, pytest's workers and what they start would compile PyTorch again and again."""
    if sys.dont_write_bytecode and config.getoption("numprocesses", None):
        written = config.rootpath / ".pytest_cache" / "bytecode"
        # modules that earlier tests wrote
        shutil.rmtree(f"{written}{tempfile.gettempdir()}", ignore_errors=True)
        os.environ["PYTHONPYCACHEPREFIX"] = str(written)
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def plugins_of_lightning_are_looked_up_once():
    """Every Trainer asks all installed packages for callbacks of theirs."""
    from lightning.fabric.utilities import registry

    registry.entry_points = cache(registry.entry_points)


def pytest_collection_finish():
    """What is imported and collected by now stays to the end: nothing looks for garbage in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def single_thread():
    import torch  # not above: with workers, pytest's own process needs no torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    """Tests kill processes, never the machine: what was written need not have reached the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture(autouse=True)
def pictures_are_drawn_where_they_are_looked_at(request, monkeypatch):
    """Drawing takes as long as training: without the mark ``pictures`` runs and studies leave out these files."""
    if request.node.get_closest_marker("pictures") is None:
        for name in ("clients_figure", "learning_curve_figure", "class_quality_figure", "overlays"):
            drawings = "fl_lightning.experiments.run_directory.drawings"
            monkeypatch.setattr(f"{drawings}.{name}", lambda *args: None)
        for name in ("run_directory.drawings.write_figure", "studies.figures.write"):
            monkeypatch.setattr(f"fl_lightning.experiments.{name}", lambda path, figure: None)


@pytest.fixture(autouse=True)
def first_steps_are_compared_where_it_is_tested(request, monkeypatch):
    """The comparison takes a third of a short run: without the mark ``first_steps`` a test leaves it out."""
    if request.node.get_closest_marker("first_steps") is None:
        for check in ("check_first_steps", "compare_with_copies"):
            monkeypatch.setattr(f"fl_lightning.round.module.{check}", lambda run: None)


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    """Whatever a test writes relative to the working directory lands in its temporary directory."""
    monkeypatch.chdir(tmp_path)
