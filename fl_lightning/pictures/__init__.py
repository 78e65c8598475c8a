"""Figures of a run."""

from fl_lightning.pictures.communication import communication_figure, has_communication
from fl_lightning.pictures.drift import drift_figure, has_drift, layers_figure
from fl_lightning.pictures.federation import calibration_figure, client_quality_figure, participation_figure
from fl_lightning.pictures.inversion import inversion_figure
from fl_lightning.pictures.style import LAYERS

__all__ = [
    "LAYERS",
    "calibration_figure",
    "client_quality_figure",
    "communication_figure",
    "drift_figure",
    "has_communication",
    "has_drift",
    "inversion_figure",
    "layers_figure",
    "participation_figure",
]
