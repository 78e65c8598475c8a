"""FedAvg by the clients and the server of ByzFL, which aggregate whole state dicts."""

import torch
from byzfl import Client, Server
from byzfl.fed_framework import models
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.contenders import Timing, client_images
from benchmarks.recipe import BATCH_SIZE, LEARNING_RATE, MOMENTUM, WEIGHT_DECAY, make_model
from benchmarks.workloads import SyntheticImages, Workload
from fl_lightning.round.plan import sample_cohort


class Peer:
    """FedAvg by ByzFL with the unweighted average.

    ByzFL's clients keep model, momentum and loader from round to round.
    """

    def __init__(self, workload: Workload, model_name: str, data: SyntheticImages) -> None:
        self.workload, self.rounds_done = workload, 0
        # ByzFL finds a model only by its name in its module models
        models.benchmarked = lambda: make_model(model_name)
        common = {
            "model_name": "benchmarked",
            "device": "cpu",
            "optimizer_name": "SGD",
            "optimizer_params": {"momentum": MOMENTUM},
            "learning_rate": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "milestones": [],
            "learning_rate_decay": 1.0,
        }
        of_clients = {
            "loss_name": "CrossEntropyLoss",
            "LabelFlipping": False,
            "momentum": 0.0,
            "nb_labels": 10,
            "store_per_client_metrics": False,
        }
        images = [client_images(data, client) for client in range(workload.num_clients)]
        loaders = [DataLoader(own, BATCH_SIZE, shuffle=True, drop_last=True) for own in images]
        self.clients = [Client({**common, **of_clients, "training_dataloader": own}) for own in loaders]
        of_server = {"aggregator_info": {"name": "Average", "parameters": {}}, "pre_agg_list": []}
        unused = DataLoader(TensorDataset(torch.zeros(1)))
        self.server = Server({**common, **of_server, "test_loader": unused})

    def run(self, rounds: int) -> Timing:
        """Run ``rounds`` further rounds as ByzFL's own benchmark does, and return their time."""
        timing, workload = Timing(), self.workload
        with timing.total:
            for _ in range(rounds):
                self.rounds_done += 1
                cohort = sample_cohort(workload.num_clients, workload.cohort_size, 0, self.rounds_done)
                state = self.server.get_dict_parameters()
                for client in cohort:
                    self.clients[client].set_model_state(state)
                    self.clients[client].compute_model_update(workload.local_steps)
                weights = [self.clients[client].get_flat_parameters() for client in cohort]
                self.server.update_model_with_weights(weights)
        return timing
