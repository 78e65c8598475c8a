"""Blocks of a cohort: what stands side by side, and that a group's settings reach all of it."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import ConfigurationError
from fl_lightning.cohort.round_cohort import RoundCohort
from fl_lightning.cohort.rows import buffer_layout, parameter_layout
from fl_lightning.ranks import Ranks
from tests.support.helpers import small_cnn

POLICY = {"weight": "averaged", "affine": "frozen", "mean": "averaged", "var": "averaged", "counter": "max"}


class TwoTypes(nn.Module):
    """Biases in single and in double precision."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 3), nn.Linear(3, 2, dtype=torch.float64)


def test_a_block_knows_its_kind_its_group_its_type_and_its_shapes():
    layout = parameter_layout(TwoTypes(), {"bias": {"lr_scale": 0.5}})
    assert list(layout) == ["weights", "bias", "weights torch.float64", "bias torch.float64"]
    second = layout["bias torch.float64"]
    assert (second.kind, second.group, second.dtype) == ("weight", "bias", torch.float64)
    assert second.shapes == {"second.bias": torch.Size([2])}
    kinds = {name: block.kind for name, block in buffer_layout(small_cnn()).items()}
    assert kinds == {"mean": "mean", "var": "var", "counter": "counter"}


def test_settings_of_a_group_hold_for_its_parameters_of_every_type():
    cohort = RoundCohort(TwoTypes(), 2, {"bias": {"lr_scale": 0.5}})
    cohort.broadcast(
        round_number=1,
        client_ids=[0, 1],
        weights=torch.full((2,), 0.5),
        local_steps=[1, 1],
        policy=POLICY,
        optimizer=partial(torch.optim.SGD, lr=0.2),
    )
    rates = {
        block: group["lr"]
        for block, group in zip(cohort.params.blocks, cohort.optimizer.param_groups, strict=True)
    }
    assert rates == {"weights": 0.2, "bias": 0.1, "weights torch.float64": 0.2, "bias torch.float64": 0.1}


def test_the_policy_treats_a_block_by_its_kind():
    cohort = RoundCohort(small_cnn(), 1)
    cohort.policy = POLICY
    assert {name: cohort.treatment(name) for name in (*cohort.params.blocks, *cohort.buffers.blocks)} == {
        "weights": "averaged",
        "batch_norm": "frozen",
        "mean": "averaged",
        "var": "averaged",
        "counter": "max",
    }


def test_ranks_share_the_memory_of_a_machine_or_a_container(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("fl_lightning.cohort.rows._LIMIT", limit)
    rows = RoundCohort(small_cnn(), 10)
    size = sum(
        rows.nbytes for part in (rows.params, rows.grads, rows.buffers) for rows in part.blocks.values()
    )
    for bytes_, ranks, fits in (
        (size, 1, True),
        (size - 1, 1, False),
        (2 * size, 3, False),
        (3 * size, 3, True),
    ):
        limit.write_text(f"{bytes_}\n")
        if fits:
            RoundCohort(small_cnn(), 10, ranks=Ranks(0, ranks, here=ranks))
        else:
            with pytest.raises(ConfigurationError, match=f"on each of {ranks} ranks here, but cpu memory is"):
                RoundCohort(small_cnn(), 10, ranks=Ranks(0, ranks, here=ranks))


def test_a_cohort_that_no_memory_holds_is_refused_in_one_line():
    with pytest.raises(
        ConfigurationError, match=r"a round of 1,000,000,000,000 clients takes [\d,.]+ GB .*; lower"
    ):
        RoundCohort(small_cnn(), 10**12)


class WithCopy(nn.Module):
    """A network beside an untrained copy, such as a moving average."""

    def __init__(self):
        super().__init__()
        self.net = small_cnn()
        self.ema = small_cnn().requires_grad_(False)


def test_names_of_a_kind_are_keys_also_beside_an_untrained_copy():
    cohort = RoundCohort(WithCopy(), 2)
    affine = ["net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"]
    copied = [name.replace("net", "ema") for name in affine]
    assert cohort.names("affine") == affine
    assert cohort.names("affine", untrained=True) == affine + copied
    assert cohort.names("mean") == [f"{part}.{i}.running_mean" for part in ("net", "ema") for i in (1, 4)]
    assert {*cohort.names("affine", "weight")} == {*cohort.params}
    assert {*cohort.names("mean", "var", "counter")} == {*cohort.buffers}
    assert {*cohort.names("affine", "weight", untrained=True)} == {*cohort.server_parameters}
    with pytest.raises(
        ConfigurationError, match=r"cohort\.names: 'gamma' must be one of weight, affine, mean"
    ):
        cohort.names("gamma")


@pytest.mark.parametrize(
    "of", ["params", "grads", "buffers", "server_buffers", "server_parameters", "server"]
)
def test_an_assignment_to_a_name_writes_into_the_tensor(of):
    model = small_cnn()
    cohort = RoundCohort(model, 2)
    tensors, name = getattr(cohort, of), "1.running_mean" if "buffers" in of else "1.weight"
    view = tensors[name].detach()
    view.zero_()
    with torch.no_grad():
        tensors[name] += 2
        tensors[name] *= torch.full((4,), 3.0)
    assert view.eq(6).all()
    tensors[name] = tensors[name] + torch.arange(4)
    assert view.eq(6 + torch.arange(4)).all()
    if "server" in of:
        tensors.update({name: torch.ones(4)})
        assert view.eq(1).all()
        tensors |= {name: torch.zeros(4)}
        assert view.eq(0).all()
    tensors[name] = 0.5
    assert view.eq(0.5).all()
    assert tensors[name].data_ptr() == view.data_ptr()
    if of.startswith("server_"):
        assert model.state_dict()[name].eq(0.5).all()
    with pytest.raises(KeyError, match="nothing"):
        tensors["nothing"] = view
    assert "nothing" not in tensors


def test_an_assignment_to_a_block_writes_into_its_tensors():
    cohort = RoundCohort(small_cnn(), 2)
    cohort.grads.blocks["batch_norm"] = 1
    cohort.grads.blocks["batch_norm"] += torch.ones(2, 1)
    assert all(cohort.grads[name].eq(2).all() for name in cohort.names("affine"))
    taken = deepcopy(cohort.server_buffers)
    assert type(taken) is dict
    taken["1.running_mean"] += 1
    assert cohort.server_buffers["1.running_mean"].eq(0).all()
