"""FedAvg by the clients and the server of fluke, run by fluke's ``CentralizedFL``."""

import contextlib
import io

import torch
from fluke.algorithms import CentralizedFL
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.server import Server

from benchmarks.contenders import Timing, client_images, round_loader
from benchmarks.recipe import CLIENT_OPTIMIZER, make_model
from benchmarks.workloads import SyntheticImages, Workload


class Peer:
    """FedAvg by fluke. Its clients create an optimizer and a copy of the model in each round."""

    def __init__(self, workload: Workload, model_name: str, data: SyntheticImages) -> None:
        self.participation = workload.cohort_size / workload.num_clients
        optimizer = OptimizerConfigurator({"name": CLIENT_OPTIMIZER.func, **CLIENT_OPTIMIZER.keywords})
        loss = torch.nn.CrossEntropyLoss()
        clients = [
            Client(
                index,
                round_loader(client_images(data, index), workload.local_steps),
                None,
                optimizer,
                loss,
                local_epochs=1,
                persistency=False,
            )
            for index in range(workload.num_clients)
        ]
        server = Server(make_model(model_name), None, clients, weighted=True)
        self.algorithm = CentralizedFL(workload.num_clients, None, {}, clients=clients, server=server)
        self.algorithm.finalize = lambda: None  # the original sends the model to all clients

    def run(self, rounds: int) -> Timing:
        """Run ``rounds`` further rounds without fluke's progress bars, and return their time."""
        timing = Timing()
        with contextlib.redirect_stdout(io.StringIO()), timing.total:
            self.algorithm.run(rounds, self.participation)
        return timing
