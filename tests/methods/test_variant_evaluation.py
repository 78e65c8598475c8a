"""Variants of the server's model are evaluated like the server's own and leave no trace in the training."""

from copy import deepcopy
from functools import partial

import lightning as L
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning import ConfigurationError, FederatedDataModule, FederatedModule
from fl_lightning.callbacks import FBN, FixBN
from fl_lightning.datamodules import Digits, TensorData
from fl_lightning.experiments.run_directory.metrics_log import JSONLinesLogger, read_metrics
from fl_lightning.methods.variant_evaluation import BATCH_STATISTICS, VariantEvaluation, mixed_batches
from fl_lightning.models import LeNet
from tests.support.contract import contents
from tests.support.helpers import SGD, ArrayClient, SaveRounds, States, blobs, distance, federated_run, fit

EVALUATED = {"limit_val_batches": None, "num_sanity_val_steps": -1}
QUIET = {
    "accelerator": "cpu",
    "precision": "64-true",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Variants(VariantEvaluation):
    """Evaluates what a function of the module gives."""

    def __init__(self, make):
        self.make = make

    def variants(self, trainer, pl_module):
        return self.make(pl_module)


class Plain(Variants):
    """The server itself as a variant."""

    def __init__(self):
        super().__init__(lambda module: {"same": {}})


def doubled(module):
    """The server with its first BN layer's running variance and gamma replaced."""
    state = module.model.state_dict()
    return {name: 4 * state[name] for name in ("1.running_var", "1.weight")}


run = partial(federated_run, trainer=EVALUATED)


def by_hand(model, loader):
    """Accuracy and loss of a model over a loader."""
    right = total = loss = 0
    with torch.no_grad():
        for inputs, targets in loader:
            outputs = model(inputs)
            right += int((outputs.argmax(1) == targets).sum())
            loss += float(cross_entropy(outputs, targets, reduction="sum"))
            total += len(targets)
    return right / total, loss / total


def equals_the_server(metrics, split):
    return all(metrics[f"{split}/{name}_same"] == metrics[f"{split}/{name}"] for name in ("accuracy", "loss"))


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
def test_the_server_as_a_variant_has_the_servers_metrics_in_every_stage(precision):
    plain, data = Plain(), blobs()
    if precision != "64-true":
        for client in (*data.clients, data.server):
            client.dataset.tensors = tuple(
                t.float() if t.is_floating_point() else t for t in client.dataset.tensors
            )
    module = run(plain, data=data, trainer={**EVALUATED, "precision": precision}).module
    assert equals_the_server(module.metrics, "val")
    for stage, split in (("validate", "val"), ("test", "test")):
        trainer = L.Trainer(callbacks=[Plain()], **{**QUIET, "precision": precision})
        fresh = FederatedModule(deepcopy(module.model), SGD, local_steps=2)
        (metrics,) = getattr(trainer, stage)(fresh, datamodule=data, verbose=False)
        assert equals_the_server(metrics, split)


def test_a_row_has_the_variants_where_it_has_the_server_and_row_0_is_one_of_them(tmp_path):
    log = JSONLinesLogger(tmp_path)
    run(Plain(), trainer={**EVALUATED, "check_val_every_n_epoch": 2, "logger": log})
    rows = read_metrics(log.path)
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert all(equals_the_server(rows[number], "val") for number in (0, 2, 3))  # 3 is the last
    assert not any(name.startswith("val/") for name in rows[1])


def test_a_check_of_a_few_batches_before_training_leaves_nothing_in_the_first_row(tmp_path):
    log = JSONLinesLogger(tmp_path)
    settings = {"check_val_every_n_epoch": 2, "num_sanity_val_steps": 1, "logger": log}
    run(Plain(), trainer={**EVALUATED, **settings})
    (first, second, _) = read_metrics(log.path)
    assert first["round"] == 1
    assert ["val/loss_same" in row for row in (first, second)] == [False, True]


def test_evaluation_on_test_data_inside_fit_is_called_so():
    module = FederatedModule(LeNet(in_channels=1, image_size=8), SGD, local_steps=1)
    data = Digits(num_clients=2, max_examples=100)
    fit(module, data, 1, [Plain()], limit_val_batches=None, precision="32-true")
    assert equals_the_server(module.metrics, "test")
    assert not any(name.startswith("val/") for name in module.metrics)


def test_replaced_state_is_what_is_evaluated():
    changed = Variants(lambda module: {"doubled": doubled(module)})
    data = blobs()
    module = run(changed, data=data).module
    other = deepcopy(module.model).eval()
    other.load_state_dict({**other.state_dict(), **doubled(module)})
    accuracy, loss = by_hand(other, data.val_dataloader())
    assert module.metrics["val/accuracy_doubled"] == pytest.approx(accuracy, abs=1e-6)
    assert module.metrics["val/loss_doubled"] == pytest.approx(loss, rel=1e-6)
    assert module.metrics["val/loss_doubled"] != module.metrics["val/loss"]


def test_replaced_state_takes_the_precision_of_the_model():
    def singles(module):
        return {"same": {name: value.float() for name, value in module.model.state_dict().items()}}

    module = run(Variants(singles)).module
    assert module.metrics["val/loss_same"] == pytest.approx(module.metrics["val/loss"], rel=1e-5)


@pytest.mark.filterwarnings("ignore:Found 2 module.s. in eval mode")
@pytest.mark.parametrize("method", [[], [FixBN(freeze_round=1)], [FBN()]], ids=["BN", "FixBN", "FBN"])
def test_batch_statistics_are_those_of_the_evaluation_batch_whatever_the_method(method):
    data = blobs()
    module = run(*method, Variants(lambda module: {"batch": BATCH_STATISTICS}), data=data).module
    model = deepcopy(module.model).eval()
    for layer in (model[1], model[4]):
        layer.train()
    loader = data.val_dataloader()
    accuracy, loss = by_hand(model, mixed_batches(loader, len(loader)))
    assert module.metrics["val/accuracy_batch"] == pytest.approx(accuracy, abs=1e-6)
    assert module.metrics["val/loss_batch"] == pytest.approx(loss, rel=1e-6)
    assert abs(module.metrics["val/loss_batch"] - module.metrics["val/loss"]) > 1e-3


def sorted_loaders():
    """Loaders of 22 samples in the order of their 4 classes, in batches of 5."""
    labels = torch.arange(22) * 4 // 22
    own = TensorDataset(torch.arange(22.0)[:, None], labels)
    train = torch.arange(4.0)[:, None], torch.tensor([0, 1, 2, 3])
    test = {"test_features": own.tensors[0], "test_targets": labels}
    table = TensorData(*train, **test, num_clients=1, batch_size=4)
    table.eval_batch_size = 5
    table.setup("test")
    return [DataLoader(own, batch_size=5), table.test_dataloader()]


@pytest.mark.parametrize("which", [0, 1], ids=["list of indices", "tensors of indices"])
def test_batches_of_sorted_samples_are_mixed(which):
    loader = sorted_loaders()[which]
    assert max(len(labels.unique()) for _, labels in loader) == 2
    for count, sizes, classes in ((5, [5, 5, 5, 5, 2], 4), (2, [5, 5], 2)):
        batches = [*mixed_batches(loader, count)]
        assert [len(labels) for _, labels in batches] == sizes
        assert max(len(labels.unique()) for _, labels in batches) == classes
        inputs, labels = map(torch.cat, zip(*batches, strict=True))
        order = inputs.flatten().argsort()
        assert inputs.flatten()[order].tolist() == [*range(sum(sizes))]
        assert torch.equal(labels[order], torch.cat([labels for _, labels in loader])[: sum(sizes)])


def test_a_sampler_of_its_own_and_a_list_of_batches_keep_their_order():
    data = TensorDataset(torch.arange(6))
    by_size = DataLoader(data, batch_sampler=[[0, 1], [2, 3, 4], [5]])
    for loader in (by_size, [*by_size]):
        assert [batch[0].tolist() for batch in mixed_batches(loader, 2)] == [[0, 1], [2, 3, 4]]


def test_a_batch_of_one_value_per_channel_is_named():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    inputs, targets = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 0])
    data = FederatedDataModule([ArrayClient(inputs, targets, 5)], ArrayClient(inputs[:1], targets[:1], 1))
    module = FederatedModule(model, SGD, local_steps=1)
    with pytest.raises(ConfigurationError, match="a BN layer gets one value per channel"):
        fit(module, data, 1, [Variants(lambda module: {"batch": BATCH_STATISTICS})], limit_val_batches=None)


def test_outputs_that_are_not_finite_count_as_wrong_and_flag_the_run():
    def broken(module):
        state = module.model.state_dict()
        return {"broken": {"8.bias": torch.full_like(state["8.bias"], torch.nan)}}

    module = run(Variants(broken)).module
    assert module.metrics["val/accuracy_broken"] == 0.0
    assert module.metrics["val/accuracy"] > 0
    assert module.record.diverged


@pytest.mark.filterwarnings("ignore:Found 2 module.s. in eval mode")
@pytest.mark.parametrize("method", [FixBN, FBN])
def test_variants_leave_no_trace_in_the_training(method, tmp_path):
    def several(module):
        return {"batch": BATCH_STATISTICS, "doubled": doubled(module), "same": {}}

    settings = {FixBN: {"freeze_round": 2}, FBN: {}}[method]
    histories, saved = [], []
    for name, extra in (("without", []), ("with", [Variants(several)])):
        history, folder = States(), tmp_path / name
        module = run(method(**settings), *extra, history, SaveRounds(folder), rounds=4).module
        modes = [layer.training for layer in module.model.modules()]
        histories.append((history.states, modes, [type(layer) for layer in module.model]))
        saved.append([contents(folder / f"{round_number}.ckpt") for round_number in (1, 2, 3, 4)])
    (states, *shape), (varied, *varied_shape) = histories
    assert shape == varied_shape
    assert [distance(first, second) for first, second in zip(states, varied, strict=True)] == [0.0] * 5
    names = ("accuracy_", "loss_")
    for plain, varied in zip(*saved, strict=True):
        kept = {place: leaf for place, leaf in varied.items() if not any(name in place for name in names)}
        assert len(kept) < len(varied)
        assert kept.keys() == plain.keys()
        for place, leaf in kept.items():
            assert torch.equal(leaf, plain[place]) if torch.is_tensor(leaf) else leaf == plain[place], place


def test_a_variant_that_disturbed_the_statistics_would_be_seen():
    class Disturbing(Plain):
        def on_validation_epoch_end(self, trainer, pl_module):
            super().on_validation_epoch_end(trainer, pl_module)
            pl_module.model[1].running_var.mul_(1.01)

    assert distance(run(Plain()).states[-1], run(Disturbing()).states[-1]) > 1e-3
