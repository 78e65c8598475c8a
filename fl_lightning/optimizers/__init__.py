"""Client and server optimizers, learning-rate schedules, and which optimizers are refused."""

from fl_lightning.optimizers.milestones import one_milestone, round_at
from fl_lightning.optimizers.schedules import InverseSteps, MultiStep
from fl_lightning.optimizers.server import FedAdam, FedYogi
from fl_lightning.optimizers.settings import GroupSettings, OptimizerCallable

__all__ = [
    "FedAdam",
    "FedYogi",
    "GroupSettings",
    "InverseSteps",
    "MultiStep",
    "OptimizerCallable",
    "one_milestone",
    "round_at",
]
