"""The clients' data: federated data modules, loaders, and the batches of a local step."""

from fl_lightning.client_data.batches import BatchStack
from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule

__all__ = ["BatchStack", "ClientDataModule", "FederatedDataModule"]
