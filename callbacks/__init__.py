"""The methods: one file, one class, one paper each. They import ``fl_lightning``, never the reverse."""

from callbacks.aggregation_diagnostics import AggregationDiagnostics
from callbacks.batch_norm_diagnostics import BatchNormDiagnostics
from callbacks.byzantine import Byzantine
from callbacks.client_evaluation import ClientEvaluation
from callbacks.communication_ledger import CommunicationLedger
from callbacks.fbn import FBN
from callbacks.fedbn import FedBN
from callbacks.feddna import FedDNA
from callbacks.fedex import FedExFixBN
from callbacks.fedprox import FedProx
from callbacks.fedtan import FedTAN
from callbacks.fixbn import FixBN
from callbacks.gradient_clipping import ClientGradientClipping
from callbacks.maintained_momentum import MaintainedMomentum
from callbacks.moment_matching import MomentMatching
from callbacks.scaffold import SCAFFOLD
from callbacks.silobn import SiloBN
from callbacks.sliding_window import SlidingWindowFixBN
from callbacks.static_bn import StaticBN
from callbacks.statistics_sources import StatisticsSources

__all__ = [
    "FBN",
    "SCAFFOLD",
    "AggregationDiagnostics",
    "BatchNormDiagnostics",
    "Byzantine",
    "ClientEvaluation",
    "ClientGradientClipping",
    "CommunicationLedger",
    "FedBN",
    "FedDNA",
    "FedExFixBN",
    "FedProx",
    "FedTAN",
    "FixBN",
    "MaintainedMomentum",
    "MomentMatching",
    "SiloBN",
    "SlidingWindowFixBN",
    "StaticBN",
    "StatisticsSources",
]
