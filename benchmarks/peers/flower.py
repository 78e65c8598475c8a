"""FedAvg by Flower's simulation engine on Ray, with one actor on each core."""

import logging
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks.contenders import Timing
from benchmarks.peers.flower_client import app
from benchmarks.process_tree import running
from benchmarks.recipe import make_model
from benchmarks.workloads import SyntheticImages, Workload

_SECONDS_TO_END = 20.0  # longest wait for the end of Ray's processes


class Peer:
    """FedAvg by Flower. The images are in files that the actors map into memory.

    Attributes:
        seen: Mean number of samples that a client saw in the last round.
    """

    def __init__(self, workload: Workload, model_name: str, data: SyntheticImages) -> None:
        self.workload, self.model_name, self.seen = workload, model_name, 0.0
        self.folder = tempfile.TemporaryDirectory()
        files = {"images": data.pictures, "labels": data.samples.labels.numpy()}
        files |= {f"samples{i}": data.client_samples(i).numpy() for i in range(workload.num_clients)}
        for name, array in files.items():
            np.save(Path(self.folder.name) / name, array)
        self.state = make_model(model_name).state_dict()

    def run(self, rounds: int) -> Timing:
        """Run a round that starts the actors and is not timed, then ``rounds`` timed rounds."""
        timing = Timing()
        server = ServerApp()

        def after_round(number: int, arrays: ArrayRecord) -> None:
            if number == 1:
                timing.total.start()
            elif number == rounds + 1:
                timing.total.stop()

        @server.main()  # type: ignore[misc, untyped-decorator, unused-ignore]  # Flower need not be installed
        def main(grid: Any, context: Any) -> None:
            workload = self.workload
            strategy = FedAvg(
                fraction_train=workload.cohort_size / workload.num_clients,
                fraction_evaluate=0.0,
                min_train_nodes=workload.cohort_size,
                min_available_nodes=workload.num_clients,
            )
            settings = {"folder": self.folder.name, "model": self.model_name, "steps": workload.local_steps}
            result = strategy.start(
                grid,
                ArrayRecord(self.state),
                num_rounds=rounds + 1,
                train_config=ConfigRecord(settings),
                evaluate_fn=after_round,
            )
            self.state = result.arrays.to_torch_state_dict()
            self.seen = float(result.train_metrics_clientapp[rounds + 1]["seen"])

        cores, before = os.cpu_count() or 1, running()
        logging.getLogger("flwr").setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_simulation(
                server,
                app,
                num_supernodes=self.workload.num_clients,
                backend_config={
                    "init_args": {"num_cpus": cores, "log_to_driver": False, "logging_level": logging.ERROR},
                    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
                },
            )
        deadline = time.monotonic() + _SECONDS_TO_END
        while running() - before and time.monotonic() < deadline:
            time.sleep(0.1)
        return timing
