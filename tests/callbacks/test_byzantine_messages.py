"""What Byzantine clients may rewrite, and what their attacks are told of it."""

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.attacks import LabelFlip, SignFlip
from fl_lightning.callbacks import Byzantine, FixBN, SiloBN
from tests.support.helpers import blobs, small_cnn, train

FIVE = {"num_clients": 5, "sizes": (16,)}


@pytest.mark.parametrize(
    ("norm", "method", "settings", "sent"),
    [
        ("gn", [], {}, "parameters"),
        ("bn", [SiloBN()], {}, "parameters"),
        ("bn", [FixBN(freeze_round=1)], {"start_round": 3}, "parameters"),
        ("bn", [], {"target": "variances"}, None),
        ("bn", [FixBN(freeze_round=2)], {}, None),
        ("bn", [SiloBN()], {"target": "everything"}, None),
        ("bn", [SiloBN()], {"attack": LabelFlip()}, None),
    ],
)
def test_a_target_that_nobody_sends_is_refused(norm, method, settings, sent):
    attack = Byzantine(settings.pop("attack", SignFlip()), 2, **{"target": "means", **settings})
    data = blobs(**FIVE)
    data.num_classes = 3
    if sent is None:
        train(small_cnn(norm), data, 1, [*method, attack], on_divergence="record")
        return
    first = settings.get("start_round", 1)
    message = f"Byzantine.target: means are not sent in round {first}, the first attacked round; clients send {sent}$"
    with pytest.raises(ConfigurationError, match=message):
        train(small_cnn(norm), data, 4, [*method, attack])


def test_nothing_is_sent_in_a_centralised_run():
    with pytest.raises(ConfigurationError, match=r"clients send nothing \(the run is centralised\)"):
        train(small_cnn(), blobs(**FIVE), 1, [Byzantine(SignFlip(), 2)], centralised=True)


class Records(SignFlip):
    """Remembers the messages of a round."""

    def messages(self, messages):
        self.seen = [*getattr(self, "seen", []), messages]
        return super().messages(messages)


@pytest.mark.parametrize("per", ["model", "layer"])
def test_the_attack_is_called_for_the_whole_model_or_for_each_message(per):
    attack = Records()
    train(small_cnn(), blobs(**FIVE), 1, [Byzantine(attack, 2, per=per)], on_divergence="record")
    assert [len(messages) for messages in attack.seen] == (
        [5] if per == "model" else [1] * 5
    )  # two BN layers


def test_weights_of_a_message_are_in_the_order_of_its_rows():
    attack = Records()
    train(small_cnn(), blobs(5, (16, 16, 80, 16, 16)), 1, [Byzantine(attack, [0, 2])], on_divergence="record")
    (message, *_), *_ = attack.seen
    assert message.weights.tolist() == pytest.approx([16 / 144] * 4 + [80 / 144])
    assert torch.equal(
        message.aggregate(message.own[1:]),
        message.rule(torch.cat([message.honest, message.own[[1, 1]]]), message.weights),
    )
