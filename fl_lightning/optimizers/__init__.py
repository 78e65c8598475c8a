"""Client and server optimizers, their checks, and learning-rate schedules."""

from fl_lightning.optimizers.client_lr import InverseSteps, MultiStep
from fl_lightning.optimizers.milestones import check_milestone, round_at
from fl_lightning.optimizers.server import FedAdam, FedYogi
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable

__all__ = [
    "FedAdam",
    "FedYogi",
    "GroupSettings",
    "InverseSteps",
    "MultiStep",
    "OptimizerCallable",
    "check_milestone",
    "round_at",
]
