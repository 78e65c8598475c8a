"""The state of a round's clients, stacked in tensors with one row per client."""

from fl_lightning.cohort.client_memory import ClientMemory, is_finite
from fl_lightning.cohort.cohort import SERVER, Cohort
from fl_lightning.cohort.parts import LAST_LAYER, match_parts, treatments
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.slots import StateSlots

__all__ = [
    "LAST_LAYER",
    "SERVER",
    "ClientMemory",
    "Cohort",
    "RoundCohort",
    "StateSlots",
    "is_finite",
    "match_parts",
    "treatments",
]
