"""A method whose server measures the BN statistics itself: recalibration on the server's validation data."""

from torch.optim.swa_utils import update_bn

from fl_lightning import FederatedCallback


class ServerRecalibration(FederatedCallback):
    """After each round, the server measures the running statistics of its new weights on its validation inputs.

    Clients train as in FedAvg. They start from the server's statistics, which count as download. After the round, their
    statistics are ``discarded``. ``averaged`` and ``pooled`` are for statistics that clients send.
    """

    def policy(self, round_number, total_rounds):
        return dict.fromkeys(("mean", "var", "counter"), "discarded")

    def on_round_end(self, trainer, pl_module, cohort):
        update_bn(pl_module.data.val_dataloader(), pl_module.model, pl_module.device)
