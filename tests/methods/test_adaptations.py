"""Variants that adapt to unlabelled evaluation data: by hand, without labels, and without a trace in the training."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import FederatedDataModule, VariantEvaluation
from fl_lightning.callbacks import FBN, AdaBN, FixBN, StatisticsSources
from fl_lightning.execution.strategy import CohortStrategy
from fl_lightning.testing.federation import federation
from tests.support.contract import contents
from tests.support.helpers import ArrayClient, SaveRounds, blobs, distance, federated_run, small_cnn

EVALUATED = {"limit_val_batches": None, "num_sanity_val_steps": -1}
run = partial(federated_run, trainer=EVALUATED)


def minimise_entropy(model, batches, rate=0.05):
    """One step on gamma and beta per batch, as TENT."""
    layers = [layer.train() for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=rate)
    for inputs in batches:
        outputs = model(inputs)
        entropy = -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean()
        optimizer.zero_grad()
        entropy.backward()
        optimizer.step()


class Adapted(VariantEvaluation):
    def __init__(self, adapt=minimise_entropy):
        self.adapt = adapt

    def variants(self, trainer, pl_module):
        return {"adapted": self.adapt}


def measured(model, loader):
    """A copy of a model with AdaBN's statistics, by hand: each layer's inputs in one tensor."""
    model, values = deepcopy(model), {1: [], 4: []}
    with torch.no_grad():
        for inputs, _ in loader:
            for place, layer in enumerate(model):
                if place in values:
                    values[place].append(inputs)
                    mean, var = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), correction=0)
                    shape = (1, -1, 1, 1)
                    inputs = (inputs - mean.view(shape)) / (var.view(shape) + layer.eps).sqrt()
                    inputs = inputs * layer.weight.view(shape) + layer.bias.view(shape)
                else:
                    inputs = layer(inputs)
        for place, seen in values.items():
            whole = torch.cat(seen)
            model[place].running_mean.copy_(whole.mean((0, 2, 3)))
            model[place].running_var.copy_(whole.var((0, 2, 3), correction=0))
    return model.eval()


def quality(model, loader):
    """Accuracy and loss."""
    with torch.no_grad():
        pairs = [(model(inputs), targets) for inputs, targets in loader]
    outputs, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
    accuracy = (outputs.argmax(1) == targets).double().mean()
    return float(accuracy), float(nn.functional.cross_entropy(outputs, targets))


def server_by_hand(adapt, module, data):
    model = deepcopy(module.model).eval()
    adapt(model, (inputs for inputs, _ in data.val_dataloader()))
    return quality(model.eval(), data.val_dataloader())


@pytest.mark.filterwarnings("ignore:Found 2 module.s. in eval mode")
@pytest.mark.parametrize("method", [[], [FixBN(freeze_round=1)], [FBN()]], ids=["BN", "FixBN", "FBN"])
def test_adabn_is_the_evaluation_under_statistics_of_the_evaluated_data(method):
    data = blobs(4, (80, 100, 70))
    module = run(*method, AdaBN(), data=data).module
    model = deepcopy(module.model)
    for layer in (model[1], model[4]):
        layer.train()
    accuracy, loss = quality(measured(model, data.val_dataloader()), data.val_dataloader())
    assert module.metrics["val/accuracy_adabn"] == pytest.approx(accuracy, abs=1e-6)
    assert module.metrics["val/loss_adabn"] == pytest.approx(loss, rel=1e-6)
    assert abs(module.metrics["val/loss_adabn"] - module.metrics["val/loss"]) > 1e-3
    own = [
        quality(measured(model, client.val_dataloader()), client.val_dataloader())[0]
        for client in data.clients
    ]
    assert module.metrics["val/own_accuracy_adabn"] == pytest.approx(sum(own) / len(own), abs=1e-6)
    assert module.metrics["val/own_accuracy_adabn"] != module.metrics["val/accuracy_adabn"]


def test_adabn_is_the_source_of_statistics_of_that_name():
    metrics = run(AdaBN(), StatisticsSources(["test_set"]), data=blobs(4, (80, 100, 70))).module.metrics
    for name in ("accuracy", "loss"):
        assert metrics[f"val/{name}_adabn"] == pytest.approx(metrics[f"val/{name}_test_set"], rel=1e-12)


def test_clients_without_data_of_their_own_have_no_own_accuracy():
    module = run(AdaBN(), data=FederatedDataModule(federation((0, 1)).clients, blobs().server)).module
    assert "val/accuracy_adabn" in module.metrics
    assert not any(name.startswith("val/own_") for name in module.metrics)
    assert not module.record.diverged


def test_gradient_steps_are_those_by_hand():
    data = blobs()
    module = run(Adapted(), data=data).module
    accuracy, loss = server_by_hand(minimise_entropy, module, data)
    assert module.metrics["val/accuracy_adapted"] == pytest.approx(accuracy, abs=1e-6)
    assert module.metrics["val/loss_adapted"] == pytest.approx(loss, rel=1e-6)
    assert abs(module.metrics["val/loss_adapted"] - module.metrics["val/loss"]) > 1e-3


def test_an_adaptation_that_changes_nothing_is_the_servers_evaluation():
    metrics = run(Adapted(lambda model, batches: [model(inputs) for inputs in batches])).module.metrics
    for name in ("accuracy", "loss"):
        assert metrics[f"val/{name}_adapted"] == metrics[f"val/{name}"]


@pytest.mark.parametrize("method", [AdaBN, Adapted])
def test_labels_never_reach_an_adaptation(method):
    seen = []

    def adapted_to(shuffled):
        data = blobs()
        inputs, targets = data.server.dataset.tensors
        server = ArrayClient(inputs, targets.flip(0) if shuffled else targets, 64)
        states = []

        class Spy(method):
            def variants(self, trainer, pl_module):
                ((_, adapt),) = super().variants(trainer, pl_module).items()

                def spied(model, batches):
                    adapt(model, batches)
                    states.append({n: x.detach().clone() for n, x in model.state_dict().items()})

                return {"spied": spied}

        run(Spy(), data=FederatedDataModule(data.clients, server, seed=0), rounds=1)
        return states

    seen = [adapted_to(shuffled) for shuffled in (False, True)]
    assert len(seen[0]) == len(seen[1]) == 2 * 4  # row 0 and round 1: the server's data, and three clients'
    assert all(distance(one, two) == 0 for one, two in zip(*seen, strict=True))
    assert distance(seen[0][-1], seen[0][-2]) > 0


@pytest.mark.parametrize("method", [AdaBN, Adapted])
def test_an_adaptation_leaves_no_trace_in_the_training(method, tmp_path):
    def drawing(model, batches):
        torch.rand(5)
        minimise_entropy(model, batches)
        for parameter in model.parameters():
            parameter.data.add_(1.0)

    saved = []
    for name, extra in (("without", []), ("with", [method(drawing) if method is Adapted else method()])):
        run(*extra, SaveRounds(tmp_path / name), rounds=3, model=partial(small_cnn, dropout=0.5))
        saved.append(contents(tmp_path / name / "3.ckpt"))
    plain, adapted = saved
    for place, leaf in plain.items():
        assert torch.equal(leaf, adapted[place]) if torch.is_tensor(leaf) else leaf == adapted[place], place


def test_two_ranks_evaluate_as_one():
    ranks = {**EVALUATED, "devices": 2, "strategy": CohortStrategy()}
    one, two = (
        federated_run(AdaBN(), Adapted(), trainer=trainer).module.metrics for trainer in (EVALUATED, ranks)
    )
    names = [name for name in one if name.endswith(("_adabn", "_adapted"))]
    assert len(names) == 6
    assert [one[name] for name in names] == [two[name] for name in names]
