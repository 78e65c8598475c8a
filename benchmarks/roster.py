"""Names of the contenders (naive loop, executors, other frameworks) and of the lower bounds."""

import importlib
import importlib.metadata
import os

from benchmarks.compute import Compute
from benchmarks.contenders import COMPILED, EXECUTORS, GRAPHS, OURS, RANKED, Contender, Framework, NaiveLoop
from benchmarks.recipe import make_model
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning import SequentialExecutor
from fl_lightning.cores import cores_of_a_run

PEERS = {"pfl": "pfl", "fluke": "fluke-fl", "byzfl": "byzfl", "flower": "flwr"}
"""Package of each other framework, by its name here; ``benchmarks/peers`` has a file for each."""

BOUNDS = ("compute", "convolutions", "compute_compiled")
"""Lower bounds of the time in float32 on a CPU; ``compute_compiled`` uses ``torch.compile``."""

NAMES = ("naive", *EXECUTORS, *COMPILED, "ranks_bf16", *BOUNDS, *PEERS)
"""All contenders and bounds on a CPU."""

ON_CUDA = ("naive", "sequential", "vectorized", *GRAPHS)
"""Contenders that can run on a GPU."""

FRAMEWORKS = ("naive", *EXECUTORS, *PEERS)
"""Contenders that run whole rounds on a CPU in float32 without ``torch.compile``."""

MULTI_PROCESS = (*RANKED, *BOUNDS, "flower")
"""Names that run in several processes with one thread each."""


def bound_of(name: str) -> str:
    """Return the lower bound for a name of :data:`~benchmarks.contenders.OURS`."""
    return "compute_compiled" if name in COMPILED else "compute"


def version(peer: str) -> str | None:
    """Return the version of a framework of :data:`PEERS`, or None if it is not installed."""
    try:
        return importlib.metadata.version(PEERS[peer])
    except importlib.metadata.PackageNotFoundError:
        return None


def present(name: str) -> bool:
    """Return whether a contender can run: whether its framework is installed."""
    return name not in PEERS or version(name) is not None


def import_packages(name: str) -> None:
    """Import the packages that a contender needs; ``name`` is a name of :data:`NAMES`."""
    if name in PEERS:
        # turn off reports of Flower and Ray over the network
        os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        importlib.import_module(f"benchmarks.peers.{name}")


def enter(
    name: str, workload: Workload, model_name: str, data: SyntheticImages, device: str = "cpu"
) -> Contender:
    """Prepare a contender or bound for a workload.

    Args:
        name: A name of :data:`NAMES`.
        workload: The federation and its local work.
        model_name: A name of ``recipe.MODELS``.
        data: The federated data, set up for ``fit``.
        device: ``"cpu"``, or ``"cuda"`` for names of :data:`ON_CUDA`.
    """
    import_packages(name)
    if name in PEERS:
        module = importlib.import_module(f"benchmarks.peers.{name}")
        contender: Contender = module.Peer(workload, model_name, data)
        return contender
    ranks = cores_of_a_run() if name in RANKED else 1
    if name in OURS:
        return Framework(workload, make_model(model_name), data, OURS[name](), device, ranks=ranks)
    if name == "ranks_bf16":
        executor = SequentialExecutor(compile=False)
        return Framework(
            workload, make_model(model_name), data, executor, precision="bf16-mixed", ranks=ranks
        )
    if name in BOUNDS:
        return Compute(workload, model_name, kind=name)
    return NaiveLoop(workload, make_model(model_name), data, device)
