"""Federated methods, one file and one class per paper.

The core of ``fl_lightning`` does not import this package.
"""

from fl_lightning.callbacks.adabn import AdaBN
from fl_lightning.callbacks.batch_renormalization import BatchRenormalization
from fl_lightning.callbacks.bn_scaffold import BNSCAFFOLD
from fl_lightning.callbacks.byzantine import Byzantine
from fl_lightning.callbacks.fbn import FBN
from fl_lightning.callbacks.fedbabu import FedBABU
from fl_lightning.callbacks.fedbn import FedBN
from fl_lightning.callbacks.feddna import FedDNA
from fl_lightning.callbacks.feddyn import FedDyn
from fl_lightning.callbacks.fedex import FedExFixBN
from fl_lightning.callbacks.fednova import FedNova
from fl_lightning.callbacks.fedper import FedPer
from fl_lightning.callbacks.fedprox import FedProx
from fl_lightning.callbacks.fedrep import FedRep
from fl_lightning.callbacks.fedtan import FedTAN
from fl_lightning.callbacks.fixbn import FixBN
from fl_lightning.callbacks.gradient_clipping import ClientGradientClipping
from fl_lightning.callbacks.hybrid_bn import HybridBN
from fl_lightning.callbacks.maintained_momentum import MaintainedMomentum
from fl_lightning.callbacks.moment_matching import MomentMatching
from fl_lightning.callbacks.mtfl import MTFL
from fl_lightning.callbacks.observers.aggregation_diagnostics import AggregationDiagnostics
from fl_lightning.callbacks.observers.batch_norm_diagnostics import BatchNormDiagnostics
from fl_lightning.callbacks.observers.classifier_bias import ClassifierBias
from fl_lightning.callbacks.observers.client_evaluation import ClientEvaluation
from fl_lightning.callbacks.observers.communication_ledger import CommunicationLedger
from fl_lightning.callbacks.observers.gradient_inversion import GradientInversion
from fl_lightning.callbacks.observers.label_inference import LabelInference
from fl_lightning.callbacks.observers.participation_gap import ParticipationGap
from fl_lightning.callbacks.observers.statistics_sources import StatisticsSources
from fl_lightning.callbacks.private_fedavg import PrivateFedAvg
from fl_lightning.callbacks.private_sgd import PrivateSGD
from fl_lightning.callbacks.scaffold import SCAFFOLD
from fl_lightning.callbacks.silobn import SiloBN
from fl_lightning.callbacks.sliding_window import SlidingWindowFixBN
from fl_lightning.callbacks.static_bn import StaticBN

__all__ = [
    "BNSCAFFOLD",
    "FBN",
    "MTFL",
    "SCAFFOLD",
    "AdaBN",
    "AggregationDiagnostics",
    "BatchNormDiagnostics",
    "BatchRenormalization",
    "Byzantine",
    "ClassifierBias",
    "ClientEvaluation",
    "ClientGradientClipping",
    "CommunicationLedger",
    "FedBABU",
    "FedBN",
    "FedDNA",
    "FedDyn",
    "FedExFixBN",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedTAN",
    "FixBN",
    "GradientInversion",
    "HybridBN",
    "LabelInference",
    "MaintainedMomentum",
    "MomentMatching",
    "ParticipationGap",
    "PrivateFedAvg",
    "PrivateSGD",
    "SiloBN",
    "SlidingWindowFixBN",
    "StaticBN",
    "StatisticsSources",
]
