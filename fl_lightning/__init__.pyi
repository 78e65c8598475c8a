"""The public names of fl_lightning, imported on first use."""

from .batch_norm.swapping import SwappedBatchNorm as SwappedBatchNorm
from .batch_norm.swapping import swap_batch_norm as swap_batch_norm
from .callbacks.observers.network_link import NetworkLink as NetworkLink
from .cli.load_model import load_model as load_model
from .client_data.federated import ClientDataModule as ClientDataModule
from .client_data.federated import FederatedDataModule as FederatedDataModule
from .clients.network import NetworkTask as NetworkTask
from .clients.tasks import Classification as Classification
from .clients.tasks import Segmentation as Segmentation
from .clients.tasks import Task as Task
from .cohort.client_memory import ClientMemory as ClientMemory
from .cohort.cohort import Cohort as Cohort
from .errors import ConfigurationError as ConfigurationError
from .execution.graphs import GraphExecutor as GraphExecutor
from .execution.sequential import SequentialExecutor as SequentialExecutor
from .execution.vectorized import VectorizedExecutor as VectorizedExecutor
from .experiments.run.progress import RoundProgress as RoundProgress
from .experiments.run.run import Run as Run
from .experiments.run_directory.checkpoints import RoundCheckpoint as RoundCheckpoint
from .experiments.run_directory.load_run import load_run as load_run
from .experiments.studies.study_frame import load_study as load_study
from .methods.callback import FederatedCallback as FederatedCallback
from .methods.freezing import Freezing as Freezing
from .methods.local_state import LocalState as LocalState
from .methods.personal_evaluation import PersonalEvaluation as PersonalEvaluation
from .methods.run_report import Report as Report
from .methods.run_report import Table as Table
from .methods.statistics_pass import measured_statistics as measured_statistics
from .methods.variant_evaluation import VariantEvaluation as VariantEvaluation
from .models.dropout import Dropout as Dropout
from .models.loss_terms import add_loss as add_loss
from .optimizers.client_lr import InverseSteps as InverseSteps
from .optimizers.client_lr import MultiStep as MultiStep
from .optimizers.server import FedAdam as FedAdam
from .optimizers.server import FedYogi as FedYogi
from .round.failures import ClientFailures as ClientFailures
from .round.module import FederatedModule as FederatedModule

__version__: str
