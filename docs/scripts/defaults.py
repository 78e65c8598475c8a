"""Record the defaults of shipped classes: ``.venv/bin/python docs/scripts/defaults.py``.

The defaults are in the file ``fl_lightning/experiments/run_directory/defaults.json``. Run this
script after you have added a class or a setting. The script adds new classes and settings to the
file. It does not change existing entries.
"""

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fl_lightning
import fl_lightning.callbacks
import fl_lightning.datamodules
import fl_lightning.models
from fl_lightning.experiments.run.training import TRAINER_DEFAULTS
from fl_lightning.experiments.run_directory.code import full_name
from fl_lightning.experiments.run_directory.description import TRAINER, defaults
from fl_lightning.experiments.run_directory.values import as_plain
from fl_lightning.recorded import Recorded

FILE = Path(fl_lightning.__file__).parent / "experiments/run_directory/defaults.json"
_FUNCTIONS = (fl_lightning.models.library_model, fl_lightning.models.deeplab_v3_plus)


def shipped() -> dict[str, Any]:
    """Return the classes and functions that a configuration can name. The keys are full names."""
    found = {full_name(x): x for x in [*_FUNCTIONS, *_below(Recorded)]}
    # leave out base classes that no package exports; their names have three dots or more
    return {name: x for name, x in found.items() if name.startswith("fl_lightning.") and name.count(".") < 3}


def today() -> dict[str, dict[str, Any]]:
    """Return the defaults of the shipped classes in the current code."""
    found = {name: defaults(kind) for name, kind in shipped().items()}
    return found | {TRAINER: as_plain(TRAINER_DEFAULTS)}


def _below(kind: type) -> Iterator[type]:
    for one in kind.__subclasses__():
        if not inspect.isabstract(one):
            yield one
        yield from _below(one)


def main() -> None:
    """Add new classes and settings to the file of defaults."""
    pinned = json.loads(FILE.read_text())
    for name, found in today().items():
        pinned[name] = found | pinned.get(name, {})
    FILE.write_text(json.dumps(dict(sorted(pinned.items())), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
