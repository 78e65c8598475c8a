"""The data of the FBN paper's toy: one Gaussian per client, new points at every step."""

import lightning as L
import pytest
import torch

from fl_lightning import ClientDataModule, ConfigurationError
from fl_lightning.datamodules import Gaussians
from fl_lightning.models import BNProbe


def test_centres_lie_on_the_circle_at_the_angles_of_the_paper():
    data = Gaussians(radius=4.0)
    i = torch.arange(1, 11)
    expected = 4 * torch.stack(
        [torch.cos((2 * torch.pi * i - 1) / 10), torch.sin((2 * torch.pi * i - 1) / 10)], 1
    )
    torch.testing.assert_close(data.centres, expected)


def test_points_have_the_mean_and_deviation_of_their_component():
    data = Gaussians(num_clients=5, radius=3.0, std=0.5, samples_per_client=20_000)
    for client, centre in zip(data.clients, data.centres, strict=True):
        points, labels = client.train_batch(4)
        assert labels.unique().tolist() == [client.client_id]
        torch.testing.assert_close(points.mean(0), centre, atol=0.02, rtol=0)
        torch.testing.assert_close(points.T.cov(), 0.25 * torch.eye(2), atol=0.01, rtol=0)


def test_a_point_lies_near_the_centre_of_its_label():
    data = Gaussians(gamma=0.5, std=0.1)
    points, labels = data.clients[3].train_batch(0)
    assert (points - data.centres[labels]).norm(dim=1).max() < 1


@pytest.mark.parametrize(("gamma", "own"), [(0.0, 1.0), (0.3, 0.73), (1.0, 0.1)])
def test_gamma_is_the_share_of_points_from_the_mixture_of_all(gamma, own):
    _, labels = Gaussians(gamma=gamma, samples_per_client=10_000).clients[7].train_batch(0)
    shares = labels.bincount(minlength=10) / len(labels)
    expected = torch.full((10,), gamma / 10)
    expected[7] = own
    torch.testing.assert_close(shares, expected, atol=0.015, rtol=0)


def test_every_step_client_and_seed_has_points_of_its_own():
    def points(client=0, step=0, seed=0):
        return Gaussians(gamma=1.0, seed=seed).clients[client].train_batch(step)[0]

    assert torch.equal(points(), points())
    others = [points(client=1), points(step=1), points(seed=1)]
    assert not any(torch.isin(other, points()).any() for other in others)


def test_clients_are_data_modules_whose_loaders_yield_their_train_batches():
    data = Gaussians(gamma=0.5)
    data.setup("fit")
    for client in data.clients:
        assert isinstance(client, L.LightningDataModule)
        assert isinstance(client, ClientDataModule)
        loader = client.train_dataloader()
        assert len(loader) == client.steps_per_epoch == 1
        assert client.num_examples == data.batch_size == 30
        for epoch in (0, 3):
            loader.sampler.set_epoch(epoch)
            ((points, labels),) = loader
            assert torch.equal(points, client.train_batch(epoch)[0])
            assert torch.equal(labels, client.train_batch(epoch)[1])


def test_a_cohort_batch_is_the_stack_of_its_clients_batches():
    data = Gaussians(gamma=0.5)
    points, labels = data.cohort_batch([2, 0], [9, 3]).stack()
    assert points.shape == (2, 30, 2)
    for row, (client, step) in enumerate([(2, 9), (0, 3)]):
        expected = data.clients[client].train_batch(step)
        assert torch.equal(points[row], expected[0])
        assert torch.equal(labels[row], expected[1])


def test_evaluation_data_hold_every_class_alike_and_other_points_for_validation_and_test():
    data = Gaussians(num_clients=4, eval_samples_per_class=50)
    ((points, labels),), ((test, _),) = data.val_dataloader(), data.test_dataloader()
    assert labels.bincount().tolist() == [50] * 4
    assert (points - data.centres[labels]).norm(dim=1).mean() < 2
    assert not torch.isin(test, points).any()
    assert torch.equal(next(iter(data.val_dataloader()))[0], points)


def test_the_record_tells_the_clients_by_their_first_batch():
    record = Gaussians(num_clients=3, gamma=0.5, seed=4).partition_record()
    assert record["partition"] == "gamma=0.5, 3 clients"
    assert (record["sizes"], record["seed"]) == ([30] * 3, 4)
    for client, counts in enumerate(record["class_histogram"]):
        assert sum(counts) == 30
        assert counts[client] >= 15


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("num_clients", 1),
        ("samples_per_client", 0),
        ("eval_samples_per_class", 0),
        ("gamma", 1.1),
        ("gamma", float("nan")),
    ],
)
def test_a_setting_out_of_its_range_is_refused_at_once(setting, value):
    with pytest.raises(ConfigurationError, match=rf"^{setting} must be .*found {value}$"):
        Gaussians(**{setting: value})


def test_the_probe_normalises_its_inputs_and_is_linear():
    torch.manual_seed(0)
    model = BNProbe(num_classes=4, in_features=3)
    points = 5 + 2 * torch.randn(50, 3)
    normalised = (points - points.mean(0)) / (points.var(0, correction=0) + 1e-5).sqrt()
    torch.testing.assert_close(model(points), model.classifier(normalised))
    with pytest.raises(ConfigurationError, match="in_features must be at least 1, found 0"):
        BNProbe(in_features=0)
