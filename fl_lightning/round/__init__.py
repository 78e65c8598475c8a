"""The communication round: the federated module, its hooks, and what a round needs."""
