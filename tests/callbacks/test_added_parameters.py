"""Layers with further trainable parameters, which a method adds to the model."""

import pytest
import torch
from test_heads import BODY, EVALUATED, EXECUTORS, HEAD, MOMENTUM, ROUNDS, STEPS, run, separate_models
from torch import nn

from fl_lightning import ConfigurationError, FederatedCallback, SwappedBatchNorm, swap_batch_norm
from fl_lightning.__main__ import main
from fl_lightning.round.hooks import extend_model
from fl_lightning.verification import certify
from tests.support.added_layers import Adapters, Gates, OwnGates, gated
from tests.support.command_line import run as run_command
from tests.support.command_line import write_config
from tests.support.helpers import Received, SaveRounds, distance, small_cnn

pytestmark = pytest.mark.first_steps

FACTORS = ("1.factor", "4.factor")
NAMES = tuple(name for name, _ in gated(small_cnn()).named_parameters())
MAKES = pytest.mark.parametrize(("make", "kept"), [(Gates, ()), (OwnGates, FACTORS)])


@EXECUTORS
@MAKES
def test_added_parameters_are_trained_as_those_of_separate_models(make, kept, executor):
    method = make()
    module = run(method, executor=executor(), client_optimizer=MOMENTUM).module
    server, clients = separate_models(kept, [(NAMES, STEPS)], MOMENTUM, make=lambda: gated(small_cnn()))
    assert distance(server, module.state_dict()) < 1e-10
    assert all(distance({name: torch.ones(1)}, server) > 1e-3 for name in FACTORS)
    for client, state in enumerate(clients if kept else ()):
        found = method.variants(None, module)[str(client)]
        assert sorted(found) == [*FACTORS]
        assert distance(state, {**module.state_dict(), **found}) < 1e-10


@MAKES
def test_added_parameters_resume_bit_for_bit_and_two_ranks_are_one(make, kept, tmp_path):
    whole = run(make(), SaveRounds(tmp_path), trainer=EVALUATED).module
    resumed = run(make(), ckpt_path=tmp_path / "2.ckpt", trainer=EVALUATED).module
    shared = run(make(), trainer={**EVALUATED, "devices": 2, "strategy": "cohort"}).module
    for other in (resumed, shared):
        assert distance(whole.state_dict(), other.state_dict()) == 0
        for name in ("val/loss", "val/own_accuracy") if kept else ("val/loss",):
            assert whole.metrics[name] == other.metrics[name]


def test_added_parameters_are_sent_unless_they_are_local():
    """Floats of 8 bytes: 413 of the model with statistics, 10 factors, of two clients."""
    for method, floats in ((Gates(), 423), (OwnGates(), 413)):
        seen = Received()
        run(method, seen)
        assert seen.received == [(2 * 8 * floats, 2 * 8 * floats)] * ROUNDS


def test_adapters_alone_are_sent_beside_statistics():
    seen = Received()
    result = run(Adapters(), seen)
    first, *_, last = result.states
    assert seen.received == [(2 * 8 * (20 + 54), 2 * 8 * (20 + 54))] * ROUNDS
    assert all(torch.equal(first[name], last[name]) for name in BODY)
    assert not torch.equal(first["8.up.weight"], last["8.up.weight"])
    assert (
        distance({name: first[f"8.layer.{name[2:]}"] for name in HEAD}, small_cnn().double().state_dict())
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [OwnGates, Adapters])
def test_verify_checks_added_parameters(make):
    certificate = certify(make, references=False)
    assert certificate.failed == []
    status = {finding.line: finding.status for finding in certificate.rules}
    assert status["model comes back"] == status["resume"] == "PASSED"
    assert status["local state"] == ("PASSED" if make is OwnGates else "does not apply")
    assert certificate.beside_fedavg.startswith("clients move")


class LateGate(SwappedBatchNorm):
    method, scratch = "Late", ("factor",)

    def prepare(self):
        self.factor = nn.Parameter(torch.ones_like(self.running_mean))


class Late(FederatedCallback):
    def configure_batch_norm(self, pl_module):
        swap_batch_norm(pl_module.model, LateGate)


def test_parameters_that_the_model_would_lose_after_the_run_are_refused():
    with pytest.raises(
        ConfigurationError,
        match=r"^Late\.configure_batch_norm adds the parameters 1\.factor, 4\.factor, .*; add them in extend_model\(model\)$",
    ):
        run(Late())


def test_a_method_adds_its_layers_once_to_a_model():
    result = run(OwnGates())
    result.trainer.test(result.module, datamodule=result.trainer.datamodule, verbose=False)
    assert {name for name, _ in result.module.model.named_parameters()} == {*NAMES}


@pytest.mark.slow
def test_commands_know_added_parameters(capsys):
    write_config({"trainer.callbacks": ["tests.support.added_layers.OwnGates"], "trainer.max_epochs": 2})
    norm = ("--model.model.norm", "bn")
    main(["list", "parameters", "--config", "tiny.yaml", *norm])
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert rows["features.2.factor"].split() == ["[32]", "weight", "local"]
    assert rows["features.2.norm.weight"].split() == ["[32]", "affine", "averaged"]
    fitted = run_command(*norm)
    factor = fitted.model.state_dict()["features.2.factor"].clone()
    assert float((factor - 1).abs().max()) > 0
    tested = run_command(*norm, "--ckpt_path", "last", command="test")
    assert torch.equal(tested.model.state_dict()["features.2.factor"], factor)
    further = run_command(*norm, "--ckpt_path", "last", "--trainer.max_epochs", "3")
    assert not torch.equal(further.model.state_dict()["features.2.factor"], factor)


class Scaled(FederatedCallback):
    """A learnable factor after one layer."""

    def __init__(self, layer):
        self.layer = layer

    def extend_model(self, model):
        model[self.layer].scale = nn.Parameter(torch.ones(1))


def test_two_objects_of_a_class_and_two_classes_of_a_name_each_add_their_layers():
    model = small_cnn()
    other = type("Scaled", (Scaled,), {"__module__": "elsewhere"})
    for _ in range(2):  # with new objects and the same model: nothing is added again
        extend_model(model, [Scaled(1), Scaled(4), other(8)], seed=0)
        assert [name for name, _ in model.named_parameters() if "scale" in name] == [
            "1.scale",
            "4.scale",
            "8.scale",
        ]
    kept = model[1].scale
    extend_model(model, [Scaled(1)], seed=0)
    assert model[1].scale is kept
