"""What a command line would run, without running it: its name, its settings and what it built."""

from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from fl_lightning.experiments.run_directory.config_digest import config_hash, deciding_settings
from tests.support.command_line import FederatedCLI, run


class Named(NamedTuple):
    """A run before its first round.

    Attributes:
        hash: Its name.
        config: Its resolved configuration, as ``config.yaml`` has it.
        settings: The settings that decide results, as its checkpoints keep them.
        model: The model.
    """

    hash: str
    config: dict
    settings: dict
    model: object


class _Found(BaseException):
    pass


def named(*arguments, config="tiny.yaml") -> Named:
    """Name what a command line would run."""

    def stop(self, **_):
        settings = deciding_settings(self.resolved)
        raise _Found(Named(config_hash(self.resolved), self.resolved, settings, self.model.model))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FederatedCLI, "instantiate_trainer", stop)
        with pytest.raises(_Found) as found:
            run(*arguments, config=config)
    return found.value.args[0]


def named_again(first: Named) -> Named:
    """Name what the ``config.yaml`` of a run would run."""
    path = Path("written.yaml")
    path.write_text(yaml.safe_dump(first.config, sort_keys=False))
    return named(config=str(path))
