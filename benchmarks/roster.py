"""Who is timed: the naive loop, this framework with each executor, the compute alone, and other frameworks if installed."""

import importlib
import importlib.metadata
import os

from benchmarks.compute import Compute
from benchmarks.contenders import EXECUTORS, Contender, Framework, NaiveLoop
from benchmarks.recipe import make_model
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning import ProcessExecutor

PEERS = {"pfl": "pfl", "fluke": "fluke-fl", "byzfl": "byzfl", "flower": "flwr"}
"""Other frameworks and the names under which they are installed; ``benchmarks/peers`` has a file for each."""

BOUNDS = ("compute", "convolutions")
"""No contenders: what none of them can undercut in float32 on a CPU."""

NAMES = ("naive", *EXECUTORS, "processes_bf16", *BOUNDS, *PEERS)
"""Everybody who can be measured."""

ON_CUDA = ("naive", "sequential", "vectorized")
"""Those who can run on a GPU."""

FRAMEWORKS = tuple(name for name in NAMES if name not in (*BOUNDS, "processes_bf16"))
"""Those who run whole rounds on a CPU in float32."""

MULTI_PROCESS = ("processes", "processes_bf16", *BOUNDS, "flower")
"""Those who use the machine by processes, each of them on one thread."""


def version(peer: str) -> str | None:
    """The version of a framework of :data:`PEERS`, None where it is not installed."""
    try:
        return importlib.metadata.version(PEERS[peer])
    except importlib.metadata.PackageNotFoundError:
        return None


def present(name: str) -> bool:
    """Whether somebody of :data:`NAMES` can run here."""
    return name not in PEERS or version(name) is not None


def import_packages(name: str) -> None:
    """Import what somebody of :data:`NAMES` needs."""
    if name in PEERS:
        # Flower reports its use over the network, and so does Ray
        os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        importlib.import_module(f"benchmarks.peers.{name}")


def enter(
    name: str, workload: Workload, model_name: str, data: SyntheticImages, device: str = "cpu"
) -> Contender:
    """Prepare somebody of :data:`NAMES` for a workload.

    Args:
        name: Whom.
        workload: The federation and its local work.
        model_name: A name of ``recipe.MODELS``.
        data: The federated data, set up for ``fit``.
        device: ``"cpu"``, or ``"cuda"`` for those of :data:`ON_CUDA`.
    """
    import_packages(name)
    if name in PEERS:
        module = importlib.import_module(f"benchmarks.peers.{name}")
        contender: Contender = module.Peer(workload, model_name, data)
        return contender
    if name in EXECUTORS:
        return Framework(workload, make_model(model_name), data, EXECUTORS[name](), device)
    if name == "processes_bf16":
        executor = ProcessExecutor()
        return Framework(workload, make_model(model_name), data, executor, precision="bf16-mixed")
    if name in BOUNDS:
        return Compute(workload, model_name, kind=name)
    return NaiveLoop(workload, make_model(model_name), data, device)
