"""What the clients of a round send, as the vectors of the server's rules."""

import torch

from fl_lightning import FederatedCallback
from fl_lightning.aggregation import Krum, Median
from fl_lightning.callbacks import FedBN, FixBN
from fl_lightning.round.client_messages import sent_vectors
from tests.support.helpers import blobs, small_cnn, train


class Vectors(FederatedCallback):
    """The names and widths of what is sent, and whether the rows are the differences from the server's."""

    role = "observer"

    def __init__(self):
        self.rounds, self.exact = {}, True

    def on_before_aggregate(self, trainer, pl_module, cohort):
        sent = sent_vectors(pl_module, cohort)
        self.rounds[cohort.round] = [(one.what, one.rows().shape[1]) for one in sent]
        updates = torch.cat([one.rows() for one in sent if one.what == "parameters"], 1)
        wanted = torch.cat(
            [(cohort.params[name] - server).flatten(1) for name, server in cohort.server.items()], 1
        )
        self.exact &= bool(torch.equal(updates.sort(1).values, wanted.sort(1).values))


def seen(callbacks=(), **settings):
    vectors = Vectors()
    train(small_cnn(), blobs(3), 2, [*callbacks, vectors], **settings)
    return vectors


def test_parameters_are_one_vector_and_statistics_two_for_each_layer():
    vectors = seen()
    (kind, width), *statistics = vectors.rounds[1]
    assert (kind, width) == ("parameters", sum(p.numel() for p in small_cnn().parameters()))
    assert [what for what, _ in statistics] == ["means", "means", "variances", "variances"]
    assert vectors.exact


def test_a_rule_says_what_a_vector_is():
    layers = seen(aggregator=Krum(0, per="layer"))
    widths = [width for what, width in layers.rounds[1] if what == "parameters"]
    model = small_cnn()
    own = [sum(p.numel() for p in layer.parameters()) for layer in model if [*layer.parameters()]]
    assert sorted(widths) == sorted(own)
    whole = seen(statistics_aggregator=Median(per="model"))
    assert [what for what, _ in whole.rounds[1]] == ["parameters", "means", "variances"]


def test_what_is_frozen_or_kept_is_not_sent():
    assert [{what for what, _ in sent} for sent in seen([FixBN(freeze_round=1)]).rounds.values()] == [
        {"parameters", "means", "variances"},
        {"parameters"},
    ]
    kept = Vectors()
    train(small_cnn(), blobs(3), 1, [FedBN(), kept])
    affine = 2 * sum(width for _, width in seen().rounds[1][1:3])
    assert kept.rounds[1] == [("parameters", seen().rounds[1][0][1] - affine)]
