"""The part of a run in Lightning's checkpoints."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from fl_lightning.client_data.federated import FederatedDataModule
from fl_lightning.clients.unsaved import unsaved
from fl_lightning.cohort.client_memory import locate, saved
from fl_lightning.errors import ConfigurationError
from fl_lightning.round.context import RunContext
from fl_lightning.round.record import RunRecord

_KEYS = {"total_rounds", "parts", "record", "kept", "data", "unsaved"}


def save_run(run: RunContext, checkpoint: dict[str, Any], merged: Mapping[str, Tensor]) -> None:
    """Add a run to a checkpoint.

    Args:
        run: The run.
        checkpoint: The checkpoint.
        merged: Tensors that the model's ``eval()`` has changed, with their values in training.
    """
    state = checkpoint["state_dict"]
    state |= {name: value for name, value in merged.items() if name in state}
    checkpoint["callbacks"] = saved(checkpoint.get("callbacks", {}))
    run.client.save(checkpoint)
    checkpoint["fl_lightning"] = {
        "total_rounds": run.total_rounds,
        "parts": run.parts,
        "record": run.record.state_dict(),
        "kept": run.evaluation.kept,
        "data": run.data.facts(),
        # the module's own hook may have replaced the dict
        "unsaved": {} if run.strict_loading else unsaved(run.model, checkpoint["state_dict"], merged),
    }


def restore_run(
    run: RunContext, checkpoint: dict[str, Any], trainer: Any, *, accept_data: bool
) -> dict[str, Any]:
    """Load a run from a checkpoint, and return what :func:`save_run` has added.

    Args:
        run: The run.
        checkpoint: The checkpoint.
        trainer: The run's trainer; None if the checkpoint is loaded without one.
        accept_data: Whether the data may differ from those of the checkpoint.

    Raises:
        ConfigurationError: The data differ, or no FederatedModule of this version wrote the checkpoint.
    """
    state: dict[str, Any] | None = checkpoint.get("fl_lightning")
    if state is None:
        raise ConfigurationError("ckpt_path: the checkpoint was not written by a FederatedModule")
    if missing := _KEYS - state.keys():
        raise ConfigurationError(
            f"ckpt_path: another version of fl_lightning wrote the checkpoint, which has no {min(missing)}; use that version, or train anew"
        )
    locate(checkpoint.get("callbacks"), trainer and trainer.ckpt_path)
    run.total_rounds = state["total_rounds"]
    run.record = RunRecord()
    run.record.load_state_dict(state["record"])
    run.evaluation.kept = state["kept"]
    if trainer is not None:
        _check_data(run, checkpoint["global_step"], accept=accept_data)
    run.client.load(checkpoint)
    return state


def _check_data(run: RunContext, round_number: int, *, accept: bool) -> None:
    """Require the data of the loaded checkpoint in training; compare them in an evaluation."""
    trainer = run.trainer
    path = str(trainer.ckpt_path)
    if trainer.state.fn == TrainerFn.FITTING:
        run.record.go_on_with(run.data.fingerprint(), path, round_number, accept=accept)
    elif isinstance(data := trainer.datamodule, FederatedDataModule) and trainer.is_global_zero:  # type: ignore[attr-defined]  # set by the trainer
        run.record.compare(data, data.fit_split if trainer.state.fn == TrainerFn.VALIDATING else "test", path)
