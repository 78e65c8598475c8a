"""What is changed on objects after they are made names a run, and so does the code of classes that no import finds."""

import dataclasses
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_description import hash_of, python_run

from fl_lightning import FederatedDataModule, Run
from fl_lightning.aggregation import Median
from fl_lightning.callbacks import FedProx
from fl_lightning.datamodules import Gaussians, Shards
from fl_lightning.experiments.run_directory.description import config_hash


def renamed(change):
    """The hash of a run whose objects are changed before the first round."""
    mine = python_run(callbacks=[FedProx(mu=0.1)])
    change(mine)
    return config_hash(Run(mine.module, mine.data, callbacks=mine.callbacks, max_epochs=1).config)


def zeroed(*_args):
    return None


CHANGES = {
    "nothing": lambda mine: None,
    "partition": lambda mine: setattr(mine.data, "partition", Shards(0.8)),
    "setting of the partition": lambda mine: setattr(mine.data.partition, "class_fraction", 0.8),
    "aggregator": lambda mine: setattr(mine.module, "aggregator", Median()),
    "model": lambda mine: setattr(mine.module, "model", torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))),
    "method of a callback": lambda mine: setattr(mine.callbacks[0], "on_after_local_backward", zeroed),
    "method of the module": lambda mine: setattr(mine.module, "client_loss", zeroed),
    "method of the data": lambda mine: setattr(mine.data, "setup", zeroed),
}  # fmt: skip


def test_what_is_assigned_later_names_a_run():
    names = {what: renamed(change) for what, change in CHANGES.items()}
    # the two ways to the same partition need not agree
    assert len({*names.values()}) == len(names), names
    assert names["nothing"] == hash_of(callbacks=[FedProx(mu=0.1)])


CODE = """
from fl_lightning import FederatedCallback

class Scale(FederatedCallback):
    def on_after_local_backward(self, trainer, module, cohort, step):
        for block in cohort.grads.blocks.values():
            block *= FACTOR
"""


def executed(factor, **names):
    space = {**names}
    exec(CODE.replace("FACTOR", str(factor)), space)  # noqa: S102  # the text above
    return space["Scale"]()


@pytest.mark.parametrize("names", [{}, {"__name__": "notebook"}, {"__name__": "builtins"}])
def test_classes_of_executed_text_count_by_their_code(names):
    one, same, other = (hash_of(callbacks=[executed(x, **names)]) for x in (1.0, 1.0, 0.1))
    assert one == same != other


def test_classes_of_a_file_that_is_run_count_by_their_code(tmp_path):
    def made(factor):
        file = tmp_path / f"{factor}.py"
        file.write_text(CODE.replace("FACTOR", str(factor)))
        return hash_of(callbacks=[runpy.run_path(str(file))["Scale"]()])

    assert made(1.0) != made(0.1)


SPAWNED = """
import multiprocessing, sys
sys.path[:0] = PATHS
CODE

def name():
    from test_description import hash_of
    print(hash_of(callbacks=[Scale()]), flush=True)

if __name__ == "__main__":
    name()
    process = multiprocessing.get_context("spawn").Process(target=name)
    process.start()
    process.join()
"""


@pytest.mark.slow
def test_a_child_process_gives_a_scripts_run_the_same_name(tmp_path):
    script = tmp_path / "script.py"
    code = CODE.replace("FACTOR", "1.0")
    paths = [path for path in sys.path if path]
    script.write_text(SPAWNED.replace("CODE", code).replace("PATHS", repr(paths)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    own, spawned = done.stdout.split()
    assert own == spawned


def test_a_model_of_another_default_type_is_another_run():
    before = hash_of(callbacks=[])
    torch.set_default_dtype(torch.float64)
    try:
        assert hash_of(callbacks=[]) != before
    finally:
        torch.set_default_dtype(torch.float32)


class Spread(Gaussians):
    def __init__(self, threads: int = 1):
        super().__init__(num_clients=3, radius=float(threads))


def test_threads_of_ones_own_data_count():
    assert hash_of(data=Spread(threads=1)) != hash_of(data=Spread(threads=3))


@dataclasses.dataclass(slots=True)
class Hidden:
    value: float = dataclasses.field(repr=False)


def frame(value):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    return pandas.DataFrame({"x": [1.0, value]})


VALUES = {
    "frames": frame,
    "masks": lambda value: np.ma.masked_array([1.0, 2.0], mask=[value > 1, False]),
    "patterns": lambda value: re.compile("a" * 300 + str(value)),
    "hidden fields": Hidden,
    "bytes": lambda value: bytes(10_000) + str(value).encode(),
}


@pytest.mark.parametrize("what", VALUES)
def test_foreign_values_count_by_what_they_are_pickled_as(what):
    make = VALUES[what]
    one, same, other = (hash_of(data=FederatedDataModule([make(x)])) for x in (1.0, 1.0, 2.0))
    assert one == same != other
