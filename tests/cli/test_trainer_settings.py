"""Settings of Lightning's trainer that a federated round cannot keep: one line each, and no run."""

import pytest
from command_line import attempts, message_of, run, write_config
from helpers import SGD, blobs, fit, small_cnn

from fl_lightning import ConfigurationError, FederatedModule

ROUNDS = "does not apply, as each batch is a round; leave it out, and use trainer.max_epochs for fewer rounds"
REFUSED = {
    ("max_epochs", 0): "0 trains nothing; use at least 1 round",
    ("strategy", "ddp"): "DDPStrategy would mix the gradients of clients; use strategy: cohort",
    ("sync_batchnorm", True): "True would turn FedAvg into FBN; leave it out, or use FBN",
    ("precision", "16-true"): "16-true scales losses; use bf16-mixed or 32-true",
    ("precision", "bf16-true"): "bf16-true would count and average in 8 bits; use bf16-mixed or 32-true",
    ("gradient_clip_val", 1.0): "1.0 would clip nothing; use ClientGradientClipping",
    ("limit_train_batches", 3): f"3 {ROUNDS}",
    ("val_check_interval", 0.5): "0.5 would be ignored; use trainer.check_val_every_n_epoch, in rounds",
    ("check_val_every_n_epoch", 0): "0 must be at least 1 round",
}
AVERAGING = "lightning.pytorch.callbacks.StochasticWeightAveraging"


@pytest.mark.parametrize(("setting", "line"), REFUSED.items(), ids=lambda x: x[0] if type(x) is tuple else "")
def test_setting_that_would_be_ignored_is_one_line(setting, line, capsys):
    name, value = setting
    message = message_of(capsys, lambda: run(f"--trainer.{name}", value))
    assert message == f"error: trainer.{name}: {line}\n"
    assert attempts() == []


def test_averaging_that_adds_a_round_is_refused(capsys):
    write_config(
        {"trainer.callbacks": [{"class_path": AVERAGING, "init_args": {"swa_lrs": 0.1, "device": None}}]}
    )
    assert message_of(capsys, run) == (
        "error: trainer.callbacks: StochasticWeightAveraging adds an extra round; use a server optimizer with "
        "momentum\n"
    )


@pytest.mark.parametrize("setting", [{"limit_train_batches": 3}, {"val_check_interval": 0.5}])
def test_a_script_gets_the_same_line(setting):
    ((name, value),) = setting.items()
    with pytest.raises(ConfigurationError) as caught:
        fit(FederatedModule(small_cnn(), SGD, local_steps=1), blobs(), 2, **setting)
    assert str(caught.value) == f"trainer.{name}: {REFUSED[name, value]}"
