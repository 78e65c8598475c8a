"""A fit that an exception has ended leaves nothing behind that the next one takes for the user's wish."""

from functools import partial

import pytest

from fl_lightning import FederatedCallback, FederatedModule
from fl_lightning.callbacks import FixBN
from tests.support.helpers import SGD, SaveRounds, blobs, distance, fit, small_cnn, train


class Interrupt(FederatedCallback):
    """Ends a fit by an exception, in an evaluation or in the middle of a round."""

    def __init__(self, where):
        self.where = where

    def on_validation_epoch_start(self, trainer, pl_module):
        if self.where == "evaluation" and pl_module.round == 3:
            raise RuntimeError("stop")

    def on_before_aggregate(self, trainer, pl_module, cohort):
        if self.where == "frozen round" and cohort.round == 3:
            raise RuntimeError("stop")


@pytest.mark.parametrize("where", ["evaluation", "frozen round"])
def test_a_fit_after_one_that_an_exception_ended_has_its_layers_in_the_mode_they_came_in(where, tmp_path):
    freezing = partial(FixBN, freeze_round=2 if where == "frozen round" else 5)
    whole = train(small_cnn(), blobs(), 4, [freezing(), SaveRounds(tmp_path)])
    module = FederatedModule(small_cnn(), SGD, local_steps=1)
    with pytest.raises(RuntimeError, match="stop"):
        fit(module, blobs(), 4, [freezing(), Interrupt(where)], limit_val_batches=1)
    fit(module, blobs(), 4, [freezing()], tmp_path / "1.ckpt")
    assert distance(whole, module.state_dict()) == 0
