"""SiloBN: Andreux et al., "Siloed Federated Learning for Multi-Centric Histopathology Datasets", arXiv 2008.07424."""

from fl_lightning.methods import LocalState


class SiloBN(LocalState):
    """Clients keep their running statistics; weights, gamma and beta are averaged.

    Statistics are not read in training, so all parameters are those of FedAvg with BN, bit for bit; what differs is the
    model that each client ends with. The server's own copy of the statistics, the mean over the round's clients, stands in
    for a client that it has never seen.
    """

    paper = "Andreux et al., arXiv 2008.07424"
    claims = ("weights_of_fedavg", "fedavg_on_identical_clients", "one_client_is_plain_training")
    examples = ({}, {"evaluate_clients": 2})
    kinds = ("mean", "var", "counter")
