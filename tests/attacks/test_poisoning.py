"""Attacks on labels, images, gradients and scale: what attackers train on, and whether a backdoor gets in."""

from types import SimpleNamespace

import pytest
import torch

from fl_lightning import ConfigurationError, FederatedCallback, FederatedModule
from fl_lightning.attacks import Backdoor, GradientAscent, LabelFlip, ModelReplacement
from fl_lightning.callbacks import Byzantine
from tests.support.helpers import SGD, blobs, distance, fit, small_cnn, train


def test_labels_are_flipped_and_what_is_no_class_stays():
    inputs, targets = torch.randn(5, 2), torch.tensor([0, 3, 9, 255, -100])
    found = LabelFlip().batch((inputs, targets), 10)
    assert found[0] is inputs
    assert found[1].tolist() == [9, 6, 0, 255, -100]
    with pytest.raises(ConfigurationError, match="LabelFlip: the data do not say how many classes"):
        LabelFlip().batch((inputs, targets), None)


def test_the_first_images_get_the_trigger_and_its_label():
    inputs, targets = torch.zeros(5, 3, 6, 7), torch.arange(5)
    images, labels = Backdoor(target=4, fraction=0.5, size=2, value=9).batch((inputs, targets), 10)
    assert labels.tolist() == [4, 4, 4, 3, 4]
    assert images.sum((1, 2, 3)).tolist() == [108, 108, 108, 0, 0]
    assert bool((images[0, :, 4:, 5:] == 9).all())
    assert not inputs.any()


def test_any_share_in_hundredths_poisons_as_many_of_100_images():
    inputs, targets = torch.zeros(100, 1, 3, 3), torch.ones(100, dtype=torch.int64)
    for percent in range(1, 101):
        _, labels = Backdoor(target=0, fraction=percent / 100).batch((inputs, targets), 10)
        assert int((labels == 0).sum()) == percent


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 0.0}, "Backdoor.fraction: 0.0 must be above 0 and at most 1"),
        ({"size": 0}, "Backdoor.size: 0 must be at least 1"),
        ({"target": -1}, "Backdoor.target: -1 must be at least 0"),
    ],
)
def test_impossible_triggers_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        Backdoor(**settings)
    with pytest.raises(ConfigurationError, match=r"Backdoor.target: 3 must be less than the 3 classes"):
        Backdoor(3).batch((torch.zeros(1, 1, 4, 4), torch.zeros(1)), 3)
    for shape, targets in (((1, 1, 4, 2), (1,)), ((1, 64), (1,)), ((1, 3, 8, 8), (1, 8, 8))):
        with pytest.raises(
            ConfigurationError, match=r"a square of 3 pixels and a label for the image do not fit inputs"
        ):
            Backdoor().batch((torch.zeros(shape), torch.zeros(targets)), 10)


class Batches(FederatedCallback):
    """Remembers the targets that each client trains on, and its gradients."""

    def __init__(self):
        self.targets, self.gradients = {}, {}

    def on_after_local_backward(self, trainer, pl_module, cohort, step):
        batches = pl_module.client_batches(cohort, range(len(cohort)), step).batches()
        for client, batch, row in zip(
            cohort.client_ids, batches, next(iter(cohort.grads.blocks.values())), strict=True
        ):
            self.targets.setdefault(client, []).append(batch[1].tolist())
            self.gradients.setdefault(client, []).append(row.clone())


def test_attackers_alone_train_on_other_labels_from_the_round_on():
    usual, attacked = Batches(), Batches()
    for seen, extra in ((usual, []), (attacked, [Byzantine(LabelFlip(), [1], start_round=2)])):
        data = blobs(3)
        data.num_classes = 3
        train(small_cnn(), data, 2, [seen, *extra], local_steps=1)
    for client in range(3):
        assert attacked.targets[client][0] == usual.targets[client][0]
        flipped = [2 - label for label in usual.targets[client][1]]
        assert attacked.targets[client][1] == (flipped if client == 1 else usual.targets[client][1])


def test_attackers_climb_their_loss():
    class After(Batches):
        role = "observer"

    before, after = Batches(), After()
    train(small_cnn(), blobs(3), 1, [after, before, Byzantine(GradientAscent(2.0), [0])], local_steps=2)
    for client in range(3):
        factor = -2 if client == 0 else 1
        assert torch.equal(after.gradients[client][0], factor * before.gradients[client][0])


def test_a_backdoor_gets_in_by_model_replacement_and_its_success_is_logged():
    def success(callbacks):
        module = FederatedModule(small_cnn(), SGD, local_steps=4, seed=0)
        trainer = fit(module, blobs(5, (40,)), 12, callbacks, limit_val_batches=1.0)
        return float(trainer.callback_metrics["val/attack_success"])

    backdoor = Backdoor(target=1, fraction=0.5, size=2, value=4.0)
    none = success([Byzantine(backdoor, [], "parameters")])
    replaced = success([Byzantine(backdoor, 1), Byzantine(ModelReplacement(5), 1, "parameters")])
    assert none < 0.6
    assert replaced > none + 0.3


def test_a_model_that_has_diverged_is_no_success_of_a_backdoor():
    model = small_cnn()
    torch.nn.init.constant_(model[8].bias, torch.nan)
    module = FederatedModule(model, SGD, local_steps=1, on_divergence="record", check_first_steps=False)
    trainer = fit(module, blobs(), 1, [Byzantine(Backdoor(target=0), [])], limit_val_batches=1.0)
    assert float(trainer.callback_metrics["val/accuracy"]) == 0
    assert float(trainer.callback_metrics["val/attack_success"]) == 0


def test_replaced_models_are_scaled_updates():
    class Once(FederatedCallback):
        def on_before_aggregate(self, trainer, pl_module, cohort):
            (sent, *_), (server, *_) = (rows.blocks.values() for rows in (cohort.params, cohort.server_rows))
            self.sent = sent[1] - server[0]

    class Then(Once):
        role = "observer"

    once, then = Once(), Then()
    usual = train(small_cnn(), blobs(2), 1, local_steps=2)
    scaled = train(
        small_cnn(), blobs(2), 1, [once, then, Byzantine(ModelReplacement(3), 1, "parameters")], local_steps=2
    )
    torch.testing.assert_close(then.sent, 3 * once.sent)
    assert distance(usual, scaled) > 1e-3


def test_images_of_the_target_class_are_no_success():
    class Reader:
        """Takes an image for the class that its first pixel names."""

        data, logged = SimpleNamespace(fit_split="val"), {}

        def __call__(self, images):
            return torch.eye(3)[images[:, 0, 0, 0].long()]

        def log(self, name, value):
            self.logged[name] = value

    labels, module, trainer = (
        torch.tensor([0, 1, 1, 2]),
        Reader(),
        SimpleNamespace(sanity_checking=False, testing=False),
    )
    images = labels[:, None, None, None].expand(4, 1, 5, 5).float()
    attack = Byzantine(Backdoor(target=1, size=2), [])
    attack.on_validation_epoch_start(trainer, module)
    for seen in (images, torch.ones_like(images)):
        attack.on_validation_batch_end(trainer, module, None, (seen, labels))
    attack.on_validation_epoch_end(trainer, module)
    assert module.logged == {"val/attack_success": 0.5}
