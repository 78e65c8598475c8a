"""What a LightningModule logs: names, means over samples and clients, metric objects, evaluations by its own steps."""

import inspect
from copy import deepcopy

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from sklearn.metrics import roc_auc_score

from tests.support.helpers import Rows
from tests.support.lightning_sites import CLASSES, TRAINER, Lit, Site, federated, sites

IN_FLOAT = {"trainer": {"precision": "32-true"}}
from torch import nn
from torch._C._functorch import is_batchedtensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from fl_lightning import ConfigurationError, FederatedCallback, FederatedDataModule, callbacks
from fl_lightning.clients.log_collector import LogCollector
from fl_lightning.errors import CannotVectorize
from fl_lightning.execution.vectorized import VectorizedExecutor
from fl_lightning.experiments.run_directory.checkpoints import RoundCheckpoint
from fl_lightning.methods import VariantEvaluation
from tests.support.recorded_calls import RecordingExecutor


class Logs(Lit):
    """Logs the values that a test gives, by step of the round and sample."""

    def __init__(self, **kwargs):
        super().__init__()
        self.kwargs = kwargs

    def training_step(self, batch, batch_idx):
        self.log("value", batch[0].sum(), **self.kwargs)
        return cross_entropy(self(batch[0]), batch[1])


def values_of_steps(count=2, steps=2, batch_size=8):
    found = []
    for seed in range(count):
        site = Site(seed)
        site.setup("fit")
        batches = [*DataLoader(site.samples, batch_size)]
        found.append([float(batches[step % len(batches)][0].double().sum()) for step in range(steps)])
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("executor", [None, VectorizedExecutor(), RecordingExecutor()])
@pytest.mark.parametrize(
    ("settings", "reduced"),
    [
        ({}, torch.mean),
        ({"on_step": True, "on_epoch": True}, torch.mean),
        ({"on_step": True, "prog_bar": True}, torch.mean),
        ({"on_step": True, "on_epoch": False}, torch.mean),
        ({"reduce_fx": "sum"}, torch.sum),
        ({"reduce_fx": "max"}, torch.max),
        ({"reduce_fx": torch.min}, torch.min),
    ],
)
def test_a_logged_value_is_reduced_over_steps_and_clients(executor, settings, reduced, capsys):
    run = federated(Logs(**settings), rounds=1, executor=executor)
    told = capsys.readouterr().out.count("self.log(on_step=True): a round has one row")
    assert told == ("on_step" in settings)
    assert run.metrics["value"] == pytest.approx(float(reduced(values_of_steps())), abs=1e-12)
    assert float(run.fitted.callback_metrics["value"]) == pytest.approx(run.metrics["value"], rel=1e-6)
    both = "on_step" in settings and settings.get("on_epoch", False)
    assert ("value_epoch" in run.metrics) == both  # Lightning names a value of steps and epochs twice
    assert ("value" in run.fitted.progress_bar_metrics) == settings.get("prog_bar", False)


class LogsANumber(Lit):
    def training_step(self, batch, batch_idx):
        self.log("weight", 0.5)
        return super().training_step(batch, batch_idx)


class MeasuresEvaluations(Lit):
    def __init__(self):
        super().__init__()
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES)


def test_metrics_of_evaluations_do_not_make_graphs_new():
    recorded = RecordingExecutor()
    federated(MeasuresEvaluations(), rounds=4, local_steps=3, executor=recorded)
    assert recorded.recorded == 2  # two clients


@pytest.mark.parametrize("sizes", [(16, 16), (24, 16)])
def test_replayed_steps_log_what_computed_steps_log(sizes, caplog):
    """Clients with batches of other sizes have other graphs and other weights."""

    def trained(executor):
        data = FederatedDataModule(
            {f"site {seed}": Site(seed, size, size // 2) for seed, size in enumerate(sizes)}
        )
        return federated(deepcopy(start), data=data, rounds=4, local_steps=3, executor=executor)

    start = Lit()
    computed, replayed = trained(None), trained(RecordingExecutor())
    for name in ("train_loss", "train_loss_epoch", "train/loss"):
        assert computed.metrics[name] == replayed.metrics[name]
    assert all(torch.equal(x, replayed.state_dict()[n]) for n, x in computed.state_dict().items())
    assert "no CUDA graphs" not in caplog.text


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Lit(metrics=True), "training_step of Lit updates the metric object 'train_acc'"),
        (LogsANumber(), "training_step of LogsANumber logs 'weight', which is no tensor"),
    ],
)
def test_steps_that_need_their_python_code_are_not_replayed(module, reason, caplog):
    start = deepcopy(module)
    run = federated(module, executor=RecordingExecutor())
    assert f"VectorizedExecutor computes the local steps: {reason}" in caplog.text
    expected = federated(start, executor=VectorizedExecutor(where_possible=True)).metrics
    logged = {name for name in expected if not name.startswith(("time/", "system/"))}
    assert {n: run.metrics[n] for n in logged} == {n: expected[n] for n in logged}


def test_a_mean_counts_samples():
    """The clients' batches have 8 and 4 samples; a given batch_size overrides this number."""
    data = FederatedDataModule([Site(0), Site(1, batch_size=4)], server=Site(9))
    values = values_of_steps()[0], values_of_steps(batch_size=4)[1]
    run = federated(Logs(), data=data, rounds=1)
    assert run.metrics["value"] == pytest.approx(
        float(8 * values[0].sum() + 4 * values[1].sum()) / 24, abs=1e-12
    )
    run = federated(Logs(batch_size=1), data=data, rounds=1)
    assert run.metrics["value"] == pytest.approx(float(torch.cat(values).mean()), abs=1e-12)


@pytest.mark.parametrize("sizes", [(0, 8), (8, 0), (0, 1)])
def test_a_step_without_samples_that_count_has_no_weight(sizes):
    class Counts(Lit):
        def training_step(self, batch, batch_idx):
            self.log("step", float(batch_idx), batch_size=sizes[batch_idx])
            return super().training_step(batch, batch_idx)

    assert federated(Counts(), rounds=1).metrics["step"] == sizes.index(max(sizes))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reduce_fx": "median"}, r"self.log\('value', reduce_fx=median\): use mean, sum, max or min"),
        ({"reduce_fx": torch.std}, r"use mean, sum, max or min"),
    ],
)
def test_another_reduction_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        federated(Logs(**settings), rounds=1)


def test_a_name_with_two_reductions_is_refused():
    class Wrong(Lit):
        def training_step(self, batch, batch_idx):
            self.log("x", 1.0, reduce_fx=("mean", "max")[batch_idx])
            return super().training_step(batch, batch_idx)

    with pytest.raises(ConfigurationError, match=r"self.log\('x'\): logged with two reductions"):
        federated(Wrong(), rounds=1)


def test_the_number_of_the_round_is_no_logged_value():
    class Wrong(Lit):
        def on_train_epoch_end(self):
            self.log("round", 7.0)

    with pytest.raises(
        ConfigurationError, match=r"self.log\('round'\): each row has the number of its round"
    ):
        federated(Wrong(), rounds=1)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(3), r"self.log\('x'\): a tensor \[3\]; log a single number"),
        ("text", "could not convert"),
        ({"a": 1.0}, r"self.log\('x'\): a dict; log a number"),
        (
            torchmetrics.MeanMetric(),
            r"the metric MeanMetric is no attribute of the module; make it one in __init__",
        ),
    ],
)
def test_a_value_that_is_no_number_is_refused(value, message):
    class Wrong(Lit):
        def training_step(self, batch, batch_idx):
            self.log("x", value)
            return super().training_step(batch, batch_idx)

    with pytest.raises((ConfigurationError, ValueError), match=message):
        federated(Wrong(), rounds=1)


class WithMetrics(Lit):
    """Several metric objects: mergeable by sums, by lists, and in a collection with shared states."""

    def __init__(self):
        super().__init__(metrics=True)
        kinds = {"task": "multiclass", "num_classes": CLASSES}
        self.many = torchmetrics.MetricCollection(
            [torchmetrics.Precision(**kinds), torchmetrics.Recall(**kinds, average="macro")], prefix="train_"
        )
        self.auroc = torchmetrics.AUROC(**kinds)
        self.squares = torchmetrics.MeanSquaredError()
        self.seen = []

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        scores = self(inputs)
        self.seen.append((scores.detach().clone(), targets.clone()))
        self.many(scores, targets)
        self.log_dict(self.many, on_step=False, on_epoch=True)
        self.auroc.update(scores, targets)
        self.log("auroc", self.auroc)
        self.squares.update(scores[:, 0], targets.double())
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("rmse", self.squares.compute().sqrt())


@pytest.mark.parametrize("participation", [2, 1])
def test_metric_objects_are_pooled_over_the_clients_of_a_round(participation):
    module = WithMetrics()
    run = federated(module, rounds=2, participation=participation, check_first_steps=False)
    pairs = module.seen[-2 * participation :]
    scores, targets = (torch.cat([pair[i] for pair in pairs]) for i in range(2))
    kinds = {"task": "multiclass", "num_classes": CLASSES}
    expected = {
        "train_acc": torchmetrics.functional.accuracy(scores, targets, **kinds),
        "train_MulticlassPrecision": torchmetrics.functional.precision(scores, targets, **kinds),
        "train_MulticlassRecall": torchmetrics.functional.recall(scores, targets, **kinds, average="macro"),
        "auroc": torchmetrics.functional.auroc(scores, targets, **kinds),
        "rmse": torch.nn.functional.mse_loss(scores[:, 0], targets.double()).sqrt(),
    }
    for name, value in expected.items():
        assert run.metrics[name] == pytest.approx(float(value), abs=1e-6), name


def test_metric_objects_may_be_updated_after_a_step():
    class Later(Lit):
        def __init__(self):
            super().__init__()
            self.mean, self.steps = torchmetrics.MeanMetric(), torchmetrics.SumMetric()

        def on_train_batch_start(self, batch, batch_idx):
            self.steps(1)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.mean(outputs["loss"])
            self.steps(10)
            self.log("mean", self.mean)

        def on_train_epoch_end(self):
            self.log("steps", self.steps.compute())

    run = federated(Later(), rounds=2)
    assert run.metrics["mean"] == pytest.approx(run.metrics["train_loss"], abs=1e-6)
    assert run.metrics["steps"] == 44.0


def test_metrics_that_wrap_a_metric_are_pooled():
    class Wrapped(Lit):
        def __init__(self):
            super().__init__()
            recall = torchmetrics.Recall(task="multiclass", num_classes=CLASSES, average=None)
            self.by_class, self.seen = torchmetrics.ClasswiseWrapper(recall), []

        def training_step(self, batch, batch_idx):
            scores = self(batch[0])
            self.by_class.update(scores, batch[1])
            self.seen.append((scores.detach(), batch[1]))
            return cross_entropy(scores, batch[1])

        def on_train_epoch_end(self):
            self.log_dict(self.by_class.compute())

    module = Wrapped()
    run = federated(module, rounds=2, check_first_steps=False)
    scores, targets = (torch.cat([pair[i] for pair in module.seen[-4:]]) for i in range(2))
    expected = torchmetrics.functional.recall(
        scores, targets, "multiclass", num_classes=CLASSES, average=None
    )
    found = [run.metrics[f"multiclassrecall_{label}"] for label in range(CLASSES)]
    assert found == pytest.approx(expected.tolist(), abs=1e-6)


class AsksForLosses(FederatedCallback):
    """Computes losses outside of local steps, as methods do that measure statistics."""

    role = "observer"

    def ask(self, pl_module):
        pl_module.client.client_loss(
            pl_module.data.cohort_batch([1], [1]).map(pl_module.on_device).batches()[0]
        )

    def on_local_step_end(self, trainer, pl_module, cohort, step):
        self.ask(pl_module)

    def on_before_aggregate(self, trainer, pl_module, cohort):
        self.ask(pl_module)

    on_round_start = on_before_aggregate


def test_losses_that_a_method_asks_for_are_not_logged():
    start = Lit(metrics=True)
    plain, asked = (
        federated(deepcopy(start), *method, rounds=2).metrics for method in ([], [AsksForLosses()])
    )
    for name in ("train_acc", "train_loss", "val_acc", "val_loss"):
        assert plain[name] == asked[name]


def test_metric_objects_may_be_made_in_setup():
    class Later(Lit):
        def setup(self, stage):
            self.hparams.metrics = True
            for name in ("train_acc", "val_acc"):
                setattr(self, name, torchmetrics.Accuracy(task="multiclass", num_classes=CLASSES))

    start = Lit(metrics=True)
    module = Later()
    module.load_state_dict(start.state_dict())
    expected, found = (federated(each, rounds=1).metrics for each in (start, module))
    assert (found["train_acc"], found["val_acc"]) == (expected["train_acc"], expected["val_acc"])


class OnlyInValidation(Lit):
    def __init__(self):
        super().__init__(metrics=True)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("settings", "methods"), [({"executor": VectorizedExecutor()}, []), ({}, ["FedTAN"])]
)
def test_metric_objects_of_training_are_refused_where_clients_share_a_pass(settings, methods):
    with pytest.raises(ConfigurationError) as error:
        federated(Lit(metrics=True), *(getattr(callbacks, name)() for name in methods), rounds=1, **settings)
    assert str(error.value) == (
        "model: training_step of Lit updates the metric object 'train_acc', which cannot be done for several clients at once; use "
        "SequentialExecutor and no joint forward pass (FedTAN), or update it in validation_step only"
    )
    module = OnlyInValidation()
    run = federated(module, *(getattr(callbacks, name)() for name in methods), rounds=1, **settings)
    assert run.metrics["val_acc"] > 0


def test_a_metric_whose_states_do_not_add_up_is_refused():
    class Unmergeable(torchmetrics.MeanMetric):
        full_state_update = True

    class Module(Lit):
        def __init__(self):
            super().__init__()
            self.metric = Unmergeable()

        def training_step(self, batch, batch_idx):
            self.metric.update(batch[0])
            return super().training_step(batch, batch_idx)

    with pytest.raises(
        ConfigurationError, match=r"metric 'metric' \(Unmergeable\) cannot be merged; set full_state_update"
    ):
        federated(Module(), rounds=1)


def evaluated_alone(module, site, split="validate"):
    """The metrics of Lightning's own evaluation of a copy of a module."""
    trainer = L.Trainer(**TRAINER)
    found = getattr(trainer, split)(deepcopy(module), datamodule=site, verbose=False)
    return {name: value for of_loader in found for name, value in of_loader.items()}


@pytest.mark.parametrize("metrics", [False, True])
def test_evaluations_equal_lightnings(metrics):
    module = Lit(metrics=metrics)
    run = federated(module, rounds=2, **IN_FLOAT)
    for name, value in evaluated_alone(module, Site(99)).items():
        assert run.metrics[name] == value
    data = sites()
    tested = run.fitted.test(run, datamodule=data, verbose=False)[0]
    assert tested == evaluated_alone(module, Site(99), "test")


def test_without_a_server_the_clients_own_data_give_the_mean():
    module = Lit(metrics=True)
    data = FederatedDataModule({"north": Site(0), "south": Site(1, train=8)})
    run = federated(module, data=data, rounds=2, **IN_FLOAT)
    own = [evaluated_alone(module, site) for site in (Site(0), Site(1, train=8))]
    for name in ("val_loss", "val_acc"):
        assert run.metrics[name] == pytest.approx(sum(metrics[name] for metrics in own) / 2, abs=1e-12)
    assert data.client_names == ["north", "south"]


class Variant(VariantEvaluation):
    role = "observer"

    def variants(self, trainer, pl_module):
        return {"halved": {"net.3.weight": pl_module.model.net[3].weight.detach() / 2}}


def test_variants_are_evaluated_by_the_modules_own_steps():
    module = Lit(metrics=True)
    run = federated(module, Variant(), rounds=1, **IN_FLOAT)
    halved = deepcopy(module)
    halved.net[3].weight.data /= 2
    expected = evaluated_alone(halved, Site(99))
    assert {name: run.metrics[f"{name}_halved"] for name in expected} == expected
    assert expected["val_loss"] != run.metrics["val_loss"]


def test_values_that_a_module_keeps_over_an_evaluation_are_those_of_one_model():
    class Keeps(Lit):
        def on_validation_epoch_start(self):
            self.kept = []

        def validation_step(self, batch, batch_idx):
            self.kept.append(self.net(batch[0]).sum())

        def on_validation_epoch_end(self):
            self.log("batches", float(len(self.kept)))
            self.log("sum", torch.stack(self.kept).sum())
            self.kept.clear()

    run = federated(Keeps(), Variant(), rounds=1)
    assert run.metrics["batches"] == run.metrics["batches_halved"] == 3.0
    assert run.metrics["sum"] != run.metrics["sum_halved"]


@pytest.mark.parametrize("method", [Variant, callbacks.FedBN, callbacks.ClientEvaluation])
def test_attributes_that_an_evaluation_sets_are_those_of_the_server(method):
    class Threshold(Lit):
        def __init__(self):
            super().__init__()
            self.outputs, self.threshold = [], 0.0

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.outputs.append(self.net(batch[0]).max())

        def on_validation_epoch_end(self):
            self.threshold = float(torch.stack(self.outputs).max())
            self.outputs.clear()
            self.log("threshold", self.threshold)

        def on_train_epoch_end(self):
            self.log("used", self.threshold)

    run = federated(Threshold(), method(), rounds=2)
    assert run.metrics["used"] == pytest.approx(run.metrics["threshold"], rel=1e-6)


def test_a_name_of_training_and_of_evaluations_is_told(capsys):
    class Same(Lit):
        def training_step(self, batch, batch_idx):
            loss = cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("loss", 7.0)

    assert federated(Same(), rounds=2).metrics["loss"] < 7
    assert capsys.readouterr().out.count("self.log('loss'): logged in training and in evaluations") == 1


def test_each_clients_own_model_is_evaluated_by_the_modules_own_steps():
    module, method = Lit(metrics=True), callbacks.FedBN()
    run = federated(module, method, rounds=2, **IN_FLOAT)
    own, personal = [], []
    for client in range(2):
        model = deepcopy(module)
        model.load_state_dict(dict(method.variants(run.fitted, run)[str(client)]), strict=False)
        own.append(evaluated_alone(model, Site(client)))
        personal.append(evaluated_alone(model, Site(99)))
    for name in ("val_loss", "val_acc"):
        assert run.metrics[f"own_{name}"] == pytest.approx(sum(x[name] for x in own) / 2, abs=1e-12)
        assert run.metrics[f"personal_{name}"] == pytest.approx(sum(x[name] for x in personal) / 2, abs=1e-12)
    assert run.metrics["own_val_loss"] != run.metrics["personal_val_loss"]


class KeepsBest(Lit):
    """Logs the smallest loss of all evaluations, as templates of Lightning do."""

    def __init__(self):
        super().__init__(lr=3.0, optimizer="plain")
        self.mean, self.best = torchmetrics.MeanMetric(), torchmetrics.MinMetric()
        self.largest = torchmetrics.MaxMetric()

    def on_train_start(self):
        self.best.reset()

    def on_train_epoch_end(self):
        self.largest(10.0 - self.current_epoch)
        self.log("largest", self.largest.compute())

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.mean(cross_entropy(self(batch[0]), batch[1]), weight=len(batch[0]))

    def on_validation_epoch_end(self):
        self.best(self.mean.compute())
        self.mean.reset()
        self.log("val_best", self.best.compute())


@pytest.mark.parametrize("server", [True, False])
def test_a_best_value_is_that_of_all_rounds(server, tmp_path):
    def trained(rounds, **settings):
        torch.manual_seed(0)
        rows = Rows()
        return federated(KeepsBest(), rows, data=sites(server=server), rounds=rounds, **settings), rows.rows

    whole, rows = trained(5)
    losses, bests = ([row[name] for row in rows.values()] for name in ("val_loss", "val_best"))
    assert losses.index(min(losses)) < 4
    if server:
        assert bests == pytest.approx([min(losses[: number + 1]) for number in range(5)])
    assert sorted(bests, reverse=True) == bests

    half, _ = trained(3)
    half.fitted.save_checkpoint(tmp_path / "half.ckpt")
    resumed, _ = trained(5, ckpt_path=tmp_path / "half.ckpt")
    assert resumed.metrics["val_best"] == whole.metrics["val_best"] == bests[-1]
    assert resumed.metrics["largest"] == whole.metrics["largest"] == 10.0


class Reads(Callback):
    """Reads metrics and outputs as callbacks of Lightning do."""

    def __init__(self):
        self.train, self.outputs = [], []

    def on_train_epoch_end(self, trainer, pl_module):
        self.train.append(float(trainer.callback_metrics["train_loss"]))

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0):
        self.outputs.append(outputs)


@pytest.mark.parametrize("methods", [[], [callbacks.FedBN()]])
def test_hooks_and_callbacks_read_the_values_of_this_round(methods):
    class Own(Lit):
        read = ()

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            return {"batch_idx": batch_idx}

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking and len(self.read) < 2:
                self.read = (*self.read, float(self.trainer.callback_metrics["val_loss"]))

    module, reads, rows = Own(metrics=True), Reads(), Rows()
    run = federated(module, reads, rows, *methods, rounds=2, trainer={"num_sanity_val_steps": 0})
    assert reads.train == pytest.approx([row["train_loss"] for row in rows.rows.values()], rel=1e-6)
    assert module.read[0] == pytest.approx(rows.rows[1]["val_loss"], rel=1e-6)
    assert float(run.fitted.callback_metrics["val_loss"]) == pytest.approx(run.metrics["val_loss"], rel=1e-6)
    assert reads.outputs == [{"batch_idx": number} for number in (0, 1, 2)] * 2


def test_a_prefix_stays_in_front_of_the_name():
    class Slash(Lit):
        def validation_step(self, batch, batch_idx):
            self.log("val/loss", cross_entropy(self(batch[0]), batch[1]))

    run = federated(Slash(), callbacks.FedBN(), callbacks.ClientEvaluation(), Variant(), rounds=1)
    names = {
        "val/loss",
        "val/own_loss",
        "val/personal_loss",
        "val/client_loss",
        "val/client_loss_worst",
        "val/loss_halved",
    }
    assert names <= run.metrics.keys()


def test_several_loaders_have_lightnings_names():
    class Two(Site):
        def val_dataloader(self):
            return [super().val_dataloader(), DataLoader(self.held_out, batch_size=7)]

    class Module(Lit):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            super().validation_step(batch, batch_idx)
            self.log(f"plain_{dataloader_idx}", 1.0, add_dataloader_idx=False)

    module = Module()
    run = federated(module, data=FederatedDataModule([Site(0)], server=Two(99)), rounds=1, **IN_FLOAT)
    expected = evaluated_alone(module, Two(99))
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1", "plain_0", "plain_1"} == expected.keys()
    assert {name: run.metrics[name] for name in expected} == expected


def test_logged_names_can_be_monitored():
    stopping = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    assert federated(Lit(), stopping, rounds=9).fitted.current_epoch == 2
    stopping = EarlyStopping("train_loss_epoch", patience=1, min_delta=100.0)
    assert federated(Lit(), stopping, rounds=9).fitted.current_epoch == 2


def test_a_loss_with_class_weights_depends_on_the_batches_as_in_lightning():
    class Weighted(Lit):
        def __init__(self):
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0]))

        def training_step(self, batch, batch_idx):
            return self.criterion(self(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.criterion(self(batch[0]), batch[1]))

    class Batches(Site):
        def val_dataloader(self):
            return DataLoader(self.held_out, self.batch_size)

    start, losses = Weighted(), set()
    for size in (1, 7):
        data = FederatedDataModule([Site(0)], server=Batches(9, batch_size=size))
        run = federated(deepcopy(start), data=data, rounds=1, **IN_FLOAT)
        assert run.metrics["val_loss"] == evaluated_alone(run.model, Batches(9, batch_size=size))["val_loss"]
        losses.add(round(run.metrics["val_loss"], 6))
    assert len(losses) == 2


def test_a_refused_metric_object_keeps_no_tensor_of_vmap():
    """The end of a failed run moves the module, which fails for such tensors and would hide the message."""
    module = Lit(metrics=True)
    with pytest.raises(CannotVectorize, match="updates the metric object 'train_acc'"):
        federated(module, executor=VectorizedExecutor())
    assert not any(map(is_batchedtensor, module.train_acc.metric_state.values()))


def test_log_takes_the_arguments_of_lightning():
    ours, lightnings = (inspect.signature(x.log).parameters for x in (LogCollector, L.LightningModule))
    assert [(x.name, x.default) for x in ours.values()] == [(x.name, x.default) for x in lightnings.values()]


class Ill(Site):
    """A site with the labels 0 and 1, or with one label in its evaluation samples."""

    def __init__(self, seed, only=None):
        super().__init__(seed)
        self.only = only

    def setup(self, stage):
        super().setup(stage)
        for samples in (self.samples, self.held_out):
            samples.tensors[1].clamp_(max=1)
        if self.only is not None:
            self.held_out.tensors[1].fill_(self.only)


class Diagnosis(Lit):
    """Logs an AUROC as an object, the same from ``compute()``, and the loss."""

    def __init__(self):
        super().__init__()
        self.auroc, self.again = torchmetrics.AUROC(task="binary"), torchmetrics.AUROC(task="binary")

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        scores = self(batch[0]).softmax(1)[:, 1]
        for metric in (self.auroc, self.again):
            metric.update(scores, batch[1])
        self.log("val/auroc", self.auroc)

    def on_validation_epoch_end(self):
        self.log("val/again_auroc", self.again.compute())
        self.again.reset()


@pytest.mark.parametrize("only", [0, 1])
def test_the_auroc_of_a_client_with_one_class_is_no_value(only):
    """torchmetrics gives 0 with a warning. The mean of Lightning's loaders would contain it."""
    torch.manual_seed(0)
    clients = {"north": Ill(0), "one": Ill(1, only), "south": Ill(2)}
    observer, module = callbacks.ClientEvaluation(), Diagnosis()
    run = federated(module, observer, data=FederatedDataModule(clients), rounds=2)
    by_hand = {}
    for name in ("north", "south"):
        inputs, labels = clients[name].held_out.tensors
        with torch.no_grad():
            scores = run.model.eval()(inputs.double()).softmax(1)[:, 1]
        by_hand[name] = roc_auc_score(labels, scores)
    mean, worst = sum(by_hand.values()) / 2, min(by_hand.values())
    assert 0 < worst < mean
    for name in ("auroc", "again_auroc"):
        logged = [run.metrics[f"val/{kind}{name}"] for kind in ("", "client_", "own_")]
        assert logged == pytest.approx([mean] * 3, abs=1e-6), name
        assert run.metrics[f"val/client_{name}_worst"] == pytest.approx(worst, abs=1e-6)
    table = observer.tables()["clients"]
    column = [row[table.columns.index("val/auroc")] for row in table.rows]
    assert column == [
        pytest.approx(by_hand["north"], abs=1e-6),
        "",
        pytest.approx(by_hand["south"], abs=1e-6),
    ]
    words = "1 of 3 have no val/again_auroc or val/auroc (one), and are left out"
    assert observer.result_lines() == {"clients": words}
    assert module.auroc.compute.__name__ == "compute"  # the metric's own method again


@pytest.mark.parametrize("monitored", ["val/auroc", "val/again_auroc"])
def test_the_auroc_of_a_server_with_one_class_is_nan_and_never_the_best(monitored, tmp_path):
    data = FederatedDataModule({"north": Ill(0), "south": Ill(2)}, server=Ill(99, only=1))
    keepers = [
        RoundCheckpoint(monitor=monitored),
        ModelCheckpoint(tmp_path / "kept", monitor=monitored, mode="max"),
    ]
    for keeper in keepers:
        run = federated(Diagnosis(), keeper, data=data, rounds=2)
        assert torch.tensor(run.metrics[monitored]).isnan()
    assert keepers[0].best_score is None
    assert keepers[1].best_model_score in (None, -torch.inf)


def test_a_loss_that_is_nan_stays_in_the_mean_beside_an_undefined_metric():
    class Diverged(Diagnosis):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val/nan_loss", batch[0].sum() * torch.nan, on_step=True, on_epoch=True)

    data = FederatedDataModule({"one": Ill(1, only=1), "south": Ill(2)})
    run = federated(Diverged(), callbacks.ClientEvaluation(), data=data, rounds=1)
    for name in ("val/nan_loss", "val/nan_loss_epoch", "val/client_nan_loss"):
        assert torch.tensor(run.metrics[name]).isnan(), name
