"""Attacks by Byzantine clients. An attack changes the attackers' messages, local steps or data."""

from fl_lightning.attacks.base import Attack, Message
from fl_lightning.attacks.poisoning import Backdoor, GradientAscent, LabelFlip, ModelReplacement
from fl_lightning.attacks.vectors import (
    ALittleIsEnough,
    FallOfEmpires,
    Gaussian,
    Mimic,
    NonFinite,
    SignFlip,
    a_little_is_enough,
    fall_of_empires,
    sign_flip,
)

__all__ = [
    "ALittleIsEnough",
    "Attack",
    "Backdoor",
    "FallOfEmpires",
    "Gaussian",
    "GradientAscent",
    "LabelFlip",
    "Message",
    "Mimic",
    "ModelReplacement",
    "NonFinite",
    "SignFlip",
    "a_little_is_enough",
    "fall_of_empires",
    "sign_flip",
]
