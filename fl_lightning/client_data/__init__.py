"""The clients' data: federated data modules, their loaders and the batches of a cohort."""
