"""A study of tiny runs in the working directory, each cell computed in this process."""

import shutil
from contextlib import redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from fl_lightning import load_study
from fl_lightning.__main__ import main
from fl_lightning.cli import study_cell
from fl_lightning.experiments.studies.engines.base import Engine

TINY = {
    "seed_everything": 0,
    "wandb": {"mode": "disabled"},
    "checkpoint": {"every_n_seconds": 0},
    "trainer": {"max_epochs": 6, "check_val_every_n_epoch": 3, "enable_progress_bar": False},
    "model": {
        "model": {"class_path": "fl_lightning.models.LeNet"},
        "client_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        "local_steps": 1,
    },
    "data": {
        "class_path": "fl_lightning.datamodules.Digits",
        "init_args": {"num_clients": 4, "batch_size": 8, "val_fraction": 0.2},
    },
}
STUDY = {
    "title": "When to freeze",
    "paper": "A paper, Figure 1",
    "axes": {
        "T*": {f"{r}": {"trainer.callbacks": [{"class_path": "fl_lightning.callbacks.FixBN", "init_args": {"freeze_round": r}}]} for r in (2, 4)},
        "method": {"BN": {}, "GN": {"model.model.norm": "gn", "trainer.callbacks": []}},
    },
    "without": [{"method": "GN", "T*": "4"}],
    "published": [{"T*": "2", "method": "BN", "value": 0.5}],
    "claims": ["T*=2 > T*=4"],
    "scales": {"quick": {"base": "tiny.yaml", "seeds": [0, 1]}},
}  # fmt: skip


class InThisProcess(Engine):
    """Runs each job as soon as it is submitted."""

    ran: list[str]
    cores, gpus = 1, 0

    def __init__(self, module):
        super().__init__(module)
        self._ended = {}

    def submit(self, jobs):
        for job in jobs:
            self.ran.append(job.name)
            with job.log.open("w") as log, redirect_stderr(log):
                try:
                    study_cell.main(job.arguments)
                    self._ended[job.name] = 0
                except SystemExit as stop:
                    self._ended[job.name] = stop.code

    def ended(self):
        found, self._ended = self._ended, {}
        return found

    def stop(self):
        pass


def write(**changes):
    Path("s.yaml").write_text(yaml.safe_dump({**STUDY, **changes}, sort_keys=False))


def study(*options):
    main(["study", "s.yaml", *options])


_FINISHED = {}


def finished_study(*options):
    """Run the study of the working directory; the second time that it is asked for, copy what the first has left."""
    key = (Path("s.yaml").read_text(), options)
    if key not in _FINISHED:
        study(*options)
        _FINISHED[key] = TemporaryDirectory(), [*InThisProcess.ran]
        shutil.copytree("runs", f"{_FINISHED[key][0].name}/runs")
    else:
        folder, InThisProcess.ran[:] = _FINISHED[key]
        shutil.copytree(f"{folder.name}/runs", "runs")


def found():
    return load_study("runs/studies/s-quick")
