"""The clients' data: federated data modules, loaders and batches."""

from fl_lightning.client_data.batches import BatchStack, copied
from fl_lightning.client_data.federated import ClientDataModule, FederatedDataModule
from fl_lightning.client_data.loaders import every_batch

__all__ = ["BatchStack", "ClientDataModule", "FederatedDataModule", "copied", "every_batch"]
