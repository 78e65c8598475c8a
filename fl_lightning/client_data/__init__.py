"""The clients' data: federated data modules, loaders and batches."""

from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule

__all__ = ["BatchStack", "ClientDataModule", "FederatedDataModule", "copied"]
