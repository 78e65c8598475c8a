"""The trainer that a client's LightningModule sees."""

from typing import Any, NoReturn

from fl_lightning.errors import ConfigurationError

_REFUSED = {
    "lr_scheduler_configs": "belong to the server; a scheduler of configure_optimizers changes rates",
    "train_dataloader": "has no batches of a client; use trainer.num_training_batches",
    "datamodule.train_dataloader": "has no batches of a client; use trainer.num_training_batches, or the data modules in .clients",
}


class View:
    """An object of the run, some of whose attributes are refused.

    Args:
        seen: The object.
        place: Prefix of the attributes' names in messages.
    """

    def __init__(self, seen: Any, place: str) -> None:
        vars(self).update(_seen=seen, _place=place)

    def __getattr__(self, name: str) -> Any:
        if (place := self._place + name) in _REFUSED:
            refuse(f"trainer.{place}", _REFUSED[place])
        return getattr(self._seen, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._seen, name, value)


class ClientTrainer(View):
    """The run's trainer, with the counts of a client.

    ``current_epoch`` is the round minus 1. E is the largest number of local steps that a client takes
    in a round. ``global_step`` is (round - 1) E + k in local step k. ``num_training_batches`` is E.
    ``estimated_stepping_batches`` is E times the planned rounds. Between the last local step and the
    next round, ``global_step`` counts the round's steps. Everything else is the trainer's.

    Args:
        run: The federated module.
        client: The client's module, whose counts are read.
    """

    def __init__(self, run: Any, client: Any) -> None:
        super().__init__(run.trainer, "")
        vars(self).update(_client=client, datamodule=View(run.trainer.datamodule, "datamodule."))

    @property
    def model(self) -> Any:
        """The client's module."""
        return self._client.module

    lightning_module = model

    @property
    def optimizers(self) -> list[Any]:
        """The client optimizer."""
        return [self._client.optimizer_in_use]

    @property
    def global_step(self) -> int:
        """Number of local steps before the current one."""
        return int(self._seen.current_epoch * self._client.local_steps + self._client.steps_taken)

    @property
    def num_training_batches(self) -> int:
        """Number of local steps of a round."""
        return int(self._client.local_steps)

    @property
    def estimated_stepping_batches(self) -> int:
        """Number of local steps of the run."""
        return int(self._client.local_steps * self._client.rounds)

    @property
    def is_last_batch(self) -> bool:
        """Whether the current local step is the last of the round."""
        return bool(self._client.local_step == self._client.local_steps - 1)


def refuse(name: str, reason: str) -> NoReturn:
    """Raise a ``ConfigurationError`` for a part of Lightning that a client's step must not use."""
    raise ConfigurationError(f"self.{name}: {reason}")
