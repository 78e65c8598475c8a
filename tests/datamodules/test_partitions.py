"""Each partition is disjoint and complete, and has the law that its paper states."""

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.datamodules import (
    IID,
    Digits,
    Dirichlet,
    ExtendedDirichlet,
    GammaSimilarity,
    HonestOnly,
    Natural,
    Partition,
    Shards,
)

PARTITIONS = {
    "iid": IID(),
    "dirichlet client": Dirichlet(0.1),
    "dirichlet class": Dirichlet(1.0, "class"),
    "extended dirichlet": ExtendedDirichlet(3, 2.0),
    "shards": Shards(0.2),
    "gamma": GammaSimilarity(0.3),
}


def balanced(num_classes, per_class):
    return torch.arange(num_classes * per_class) % num_classes


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def sizes(parts):
    return [len(part) for part in parts]


def histogram(labels, parts):
    return torch.stack([labels[part].bincount(minlength=int(labels.max()) + 1) for part in parts])


@pytest.fixture(params=PARTITIONS.values(), ids=PARTITIONS.keys())
def partition(request):
    return request.param


@pytest.mark.parametrize(("num_clients", "total"), [(5, 100), (7, 1003), (100, 50_000)])
def test_clients_are_disjoint_and_complete(partition, num_clients, total):
    labels = torch.randint(10, (total,), generator=rng())
    parts = partition(labels, num_clients, generator=rng())
    assert len(parts) == num_clients
    assert all(part.dtype == torch.int64 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(total))


def test_a_partition_is_a_function_of_the_generator_state(partition):
    labels = balanced(10, 100)
    parts, same, other = (partition(labels, 10, generator=rng(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(parts, same, strict=True))
    assert not torch.equal(torch.cat(parts), torch.cat(other))


@pytest.mark.parametrize("name", ["iid", "dirichlet client", "gamma"])
@pytest.mark.parametrize("num_clients", [3, 7, 11, 64])
def test_sizes_differ_by_at_most_one(name, num_clients):
    labels = torch.randint(10, (1009,), generator=rng())
    found = sizes(PARTITIONS[name](labels, num_clients, generator=rng()))
    assert max(found) - min(found) <= 1


def test_iid_clients_have_nearly_the_prior():
    labels = balanced(10, 5000)
    counts = histogram(labels, IID()(labels, 10, rng()))
    assert (counts - 500).abs().max() < 5 * 500**0.5


# Dirichlet


def test_dirichlet_clients_approach_the_prior_as_alpha_grows():
    labels = torch.cat([torch.zeros(8000), torch.ones(2000)]).long()
    for balance in ("client", "class"):
        counts = histogram(labels, Dirichlet(1e7, balance)(labels, 10, rng()))
        assert (counts[:, 0] / counts.sum(1) - 0.8).abs().max() < 0.06


def test_dirichlet_gives_nearly_one_class_per_client_as_alpha_vanishes():
    labels = balanced(10, 500)
    counts = histogram(labels, Dirichlet(1e-4)(labels, 5, rng()))
    assert counts.sum(1).tolist() == [1000] * 5
    # A client of two classes' size fills up with the next class where its first is exhausted.
    assert (counts > 0).sum(1).tolist() == [2] * 5
    counts = histogram(labels, Dirichlet(1e-4, balance="class")(labels, 2, rng(3)))
    assert set(counts.flatten().tolist()) == {0, 500}


def test_dirichlet_client_proportions_have_the_mean_and_variance_of_alpha_times_the_prior():
    labels = torch.cat([torch.zeros(6000), torch.ones(3000), torch.full((1000,), 2)]).long()
    prior = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    alpha = 2.0
    # The first of ten clients exhausts no class: its proportions are q, but for drawing 1000 samples from it.
    first = torch.stack(
        [labels[Dirichlet(alpha)(labels, 10, rng(seed))[0]].bincount(minlength=3) for seed in range(800)]
    ).double()
    first /= 1000
    variance = prior * (1 - prior) / (alpha + 1)
    torch.testing.assert_close(first.mean(0), prior, atol=0.03, rtol=0)
    torch.testing.assert_close(first.var(0), variance, atol=0, rtol=0.15)


def test_dirichlet_class_shares_have_the_variance_of_a_symmetric_dirichlet():
    labels = torch.arange(300_000) % 300
    alpha, num_clients = 0.5, 5
    shares = histogram(labels, Dirichlet(alpha, balance="class")(labels, num_clients, rng())).double() / 1000
    expected = (1 / num_clients) * (1 - 1 / num_clients) / (num_clients * alpha + 1)
    assert shares.var().item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("alpha", [1e-300, 1e-8, 1e300])
@pytest.mark.parametrize("num_clients", [1, 9])
def test_dirichlet_accepts_every_positive_alpha(alpha, num_clients):
    labels = balanced(10, 30)
    parts = Dirichlet(alpha)(labels, num_clients, rng())
    assert sum(sizes(parts)) == 300
    assert max(sizes(parts)) - min(sizes(parts)) <= 1


def test_dirichlet_by_class_refuses_to_leave_a_client_without_samples():
    with pytest.raises(ConfigurationError, match=r"alpha=0.01.* of 100 clients without a sample"):
        Dirichlet(0.01, balance="class")(balanced(10, 100), 100, rng())


# Extended Dirichlet


@pytest.mark.parametrize("num_clients", [4, 25])
def test_extended_dirichlet_with_all_classes_is_dirichlet_by_class(num_clients):
    labels = torch.randint(10, (3000,), generator=rng())
    all_classes = ExtendedDirichlet(10, alpha=2.0)(labels, num_clients, rng(3))
    dirichlet = Dirichlet(2.0, balance="class")(labels, num_clients, rng(3))
    assert all(torch.equal(one, other) for one, other in zip(all_classes, dirichlet, strict=True))


@pytest.mark.parametrize(("own", "num_clients"), [(2, 5), (3, 40), (9, 2)])
def test_every_class_has_an_owner_and_no_client_owns_more_classes_than_set(own, num_clients):
    labels = balanced(10, 2000)
    for seed in range(20):
        counts = histogram(labels, ExtendedDirichlet(own, 5.0)(labels, num_clients, rng(seed)))
        assert ((counts > 0).sum(1) == own).all()
        assert (counts.sum(0) == 2000).all()
        assert (counts > 0).any(0).all()


def test_every_pair_of_classes_is_drawn_alike():
    pairs, labels = torch.zeros(4, 4), balanced(4, 50)
    for seed in range(600):
        counts = histogram(labels, ExtendedDirichlet(2, 5.0)(labels, 4, rng(seed)))
        held = (counts > 0).float()
        pairs += held.T @ held
    apart = pairs[~torch.eye(4, dtype=torch.bool)] / 600  # 4 clients choose 1 of 6 pairs each
    torch.testing.assert_close(apart, torch.full((12,), 4 / 6), atol=0.08, rtol=0)


def test_fewer_owners_than_classes_are_drawn_alike_too():
    pairs, labels = torch.zeros(3, 3), balanced(3, 20)
    for seed in range(300):
        held = (histogram(labels, ExtendedDirichlet(2, 5.0)(labels, 2, rng(seed))) > 0).float()
        pairs += held.T @ held
    apart = pairs[~torch.eye(3, dtype=torch.bool)] / 300  # 2 clients choose 1 of 3 pairs each
    torch.testing.assert_close(apart, torch.full((6,), 2 / 3), atol=0.1, rtol=0)


def test_shares_among_the_owners_have_the_variance_of_a_symmetric_dirichlet():
    labels, alpha = torch.arange(400_000) % 200, 0.5
    counts = histogram(labels, ExtendedDirichlet(100, alpha)(labels, 6, rng())).double() / 2000
    by_owners = {k: [c[c > 0] for c in counts.T if (c > 0).sum() == k] for k in (2, 3, 4)}
    for k, shares in by_owners.items():
        found = torch.stack(shares).var(correction=0).item()
        assert found == pytest.approx((1 / k) * (1 - 1 / k) / (k * alpha + 1), rel=0.3)


def test_extended_dirichlet_says_how_many_classes_can_be_owned():
    labels = balanced(10, 30)
    for own, message in (
        (2, "3 clients with 2 classes each cannot divide 10 classes; use 4 to 10"),
        (11, "use 4 to 10"),
    ):
        with pytest.raises(ConfigurationError, match=f"ExtendedDirichlet.classes_per_client: .*{message}"):
            ExtendedDirichlet(own, 1.0)(labels, 3, rng())
    with pytest.raises(
        ConfigurationError, match=r"ExtendedDirichlet\(classes_per_client=1, alpha=0.01\) leaves \d+ of 100"
    ):
        ExtendedDirichlet(1, 0.01)(balanced(10, 100), 100, rng())


# Shards


def test_five_clients_with_a_fifth_of_the_classes_hold_two_exclusive_classes_each():
    labels = balanced(10, 5000)
    counts = histogram(labels, Shards(0.2)(labels, 5, rng()))
    assert (counts > 0).sum(1).tolist() == [2] * 5
    assert (counts > 0).sum(0).tolist() == [1] * 10
    assert counts.sum(1).tolist() == [10_000] * 5


def test_ten_clients_with_a_fifth_of_200_classes_hold_40_each_and_every_class_has_two_holders():
    labels = balanced(200, 500)
    counts = histogram(labels, Shards(0.2)(labels, 10, rng()))
    assert (counts > 0).sum(1).tolist() == [40] * 10
    assert (counts > 0).sum(0).tolist() == [2] * 200
    assert set(counts.unique().tolist()) == {0, 250}


@pytest.mark.parametrize("num_clients", [15, 17, 33, 100])
@pytest.mark.parametrize(
    ("num_classes", "fraction", "held"), [(10, 0.2, 2), (100, 0.07, 7), (7, 0.5, 4), (3, 1.0, 3)]
)
def test_every_client_holds_exactly_the_fraction_and_holders_differ_by_at_most_one(
    num_clients, num_classes, fraction, held
):
    labels = torch.cat([torch.full((101 + 3 * label,), label) for label in range(num_classes)])
    counts = histogram(labels, Shards(fraction)(labels, num_clients, rng()))
    assert ((counts > 0).sum(1) == held).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    for column in counts.T:
        assert column[column > 0].max() - column[column > 0].min() <= 1


@pytest.mark.parametrize("per_class", [40, 41, 43, 57])
@pytest.mark.parametrize(
    ("num_clients", "num_classes", "held"), [(15, 10, 2), (20, 5, 2), (8, 20, 5), (10, 3, 3)]
)
def test_shards_of_balanced_classes_with_equally_many_holders_are_equal_in_size(
    num_clients, num_classes, held, per_class
):
    for seed in range(5):
        parts = Shards(held / num_classes)(balanced(num_classes, per_class), num_clients, rng(seed))
        assert max(sizes(parts)) - min(sizes(parts)) <= 1


def test_the_generator_permutes_the_classes_of_shards():
    labels = balanced(10, 10)
    held = {tuple(labels[Shards(0.2)(labels, 5, rng(seed))[0]].unique().tolist()) for seed in range(20)}
    assert len(held) > 5


def test_shards_that_cannot_hold_every_class_name_a_fraction_that_can():
    labels = balanced(10, 10)
    with pytest.raises(ConfigurationError, match=r"class_fraction >= 0.4 or num_clients >= 5$"):
        Shards(0.2)(labels, 3, rng())
    Shards(0.4)(labels, 3, rng())
    Shards(0.2)(labels, 5, rng())


def test_shards_refuse_a_class_with_fewer_samples_than_holders():
    labels = torch.tensor([0] * 50 + [7] * 2)
    with pytest.raises(ConfigurationError, match="class 7 4 holders but it has 2 samples"):
        Shards(1.0)(labels, 4, rng())


@pytest.mark.parametrize("assignment", ["random", "consecutive", "modulo"])
@pytest.mark.parametrize(("num_clients", "fraction"), [(5, 0.2), (2, 0.5), (1, 1.0), (10, 0.1)])
def test_the_classes_of_an_assignment_are_those_of_its_rule(assignment, num_clients, fraction):
    labels = balanced(10, 12)[torch.randperm(120, generator=rng())]
    parts = Shards(fraction, assignment)(labels, num_clients, rng())
    held = [labels[part].unique().tolist() for part in parts]
    rule = {
        "random": held,
        "consecutive": [[c for c in range(10) if c * num_clients // 10 == i] for i in range(num_clients)],
        "modulo": [[c for c in range(10) if c % num_clients == i] for i in range(num_clients)],
    }
    assert held == rule[assignment]
    assert sorted(label for own in held for label in own) == list(range(10))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(120))


def test_consecutive_classes_go_on_with_the_first_after_the_last():
    labels = torch.tensor([3, 5, 8]).repeat(8)
    held = [labels[part].unique().tolist() for part in Shards(0.6, "consecutive")(labels, 4, rng())]
    assert held == [[3, 5], [3, 8], [5, 8], [3, 5]]
    with pytest.raises(
        ConfigurationError, match=r"gives 4 clients 2 classes each, but there are 3 .* that divide 3"
    ):
        Shards(0.6, "modulo")(labels, 4, rng())


@pytest.mark.parametrize("assignment", ["random", "consecutive", "modulo"])
def test_a_tail_adds_samples_of_every_class_that_a_client_does_not_hold(assignment):
    labels = balanced(10, 40)
    pure = Shards(0.2, assignment)(labels, 5, rng())
    tailed = Shards(0.2, assignment, 3)(labels, 5, rng())
    for own, part in zip(pure, tailed, strict=True):
        assert torch.equal(part, part.unique())
        assert torch.isin(own, part).all()
        counts = labels[part].bincount(minlength=10)
        assert torch.equal(counts, labels[own].bincount(minlength=10).where(counts == 40, 3))
    # the samples differ between clients and seeds
    foreign = [set(part.tolist()) - set(own.tolist()) for own, part in zip(pure, tailed, strict=True)]
    assert len(set.union(*foreign)) > 80
    other = Shards(0.2, "consecutive", 3)(labels, 5, rng(1))
    assert not torch.equal(other[0], Shards(0.2, "consecutive", 3)(labels, 5, rng(2))[0])


def test_a_class_with_fewer_samples_than_the_tail_is_named():
    labels = torch.tensor([4] * 9 + [7] * 2)
    with pytest.raises(ConfigurationError, match=r"^tail=3 samples of every class, but class 7 has 2"):
        Shards(0.5, tail=3)(labels, 2, rng())


# Similarity and natural groups


def test_gamma_zero_gives_one_class_per_client():
    labels = balanced(10, 5000)[torch.randperm(50_000, generator=rng())]
    counts = histogram(labels, GammaSimilarity(0.0)(labels, 10, rng()))
    assert torch.equal(counts, 5000 * torch.eye(10, dtype=torch.int64))


def test_gamma_deals_its_share_equally_and_cuts_the_rest_in_order_of_class():
    labels = balanced(10, 1000)
    counts = histogram(labels, GammaSimilarity(0.4)(labels, 10, rng())).float()
    own = counts.diagonal()
    others = (counts.sum(1) - own) / 9
    # 400 of a client's 1000 samples are homogeneous, 40 of each class; 600 come from its chunk.
    assert (own - 640).abs().max() < 60
    assert (others - 40).abs().max() < 10


def test_gamma_one_is_homogeneous():
    labels = balanced(10, 5000)
    counts = histogram(labels, GammaSimilarity(1.0)(labels, 10, rng()))
    assert (counts - 500).abs().max() < 5 * 500**0.5


def test_natural_makes_every_group_a_client_in_sorted_order():
    expected = [[1, 4], [0, 2], [3]]
    for groups in (torch.tensor([5, 2, 5, 9, 2]), ["jena", "aachen", "jena", "ulm", "aachen"]):
        assert [part.tolist() for part in Natural()(torch.zeros(5), 3, rng(), groups)] == expected


# Mistakes and classes


@pytest.mark.parametrize("num_clients", [-1, 0, 11])
def test_the_number_of_clients_lies_between_one_and_the_number_of_samples(partition, num_clients):
    with pytest.raises(ConfigurationError, match=rf"num_clients must be in \[1, 10\].*found {num_clients}$"):
        partition(torch.arange(10), num_clients, generator=rng())


@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (lambda: Dirichlet(0.0), "alpha"),
        (lambda: Dirichlet(float("nan")), "alpha"),
        (lambda: Dirichlet(1.0, balance="both"), "balance"),
        (lambda: Shards(0.0), "class_fraction"),
        (lambda: Shards(1.1), "class_fraction"),
        (lambda: GammaSimilarity(-0.1), "gamma"),
        (lambda: GammaSimilarity(1.1), "gamma"),
        (
            lambda: Shards(0.2, "sorted"),
            "Shards.assignment: 'sorted' must be one of random, consecutive, modulo",
        ),
        (lambda: Shards(0.2, tail=-1), "tail must be at least 0, found -1"),
        (lambda: Shards(0.2, tail=1.5), "tail must be at least 0 and a whole number, found 1.5"),
        (lambda: HonestOnly(IID(), 0.5), "attackers must be at least 0 and a whole number, found 0.5"),
        (lambda: Digits(num_clients=2.5), "num_clients must be at least 1 and a whole number, found 2.5"),
        (lambda: Digits(batch_size=8.0), "batch_size must be at least 1 and a whole number, found 8.0"),
        (lambda: Natural()(torch.arange(10), 2, rng()), "groups"),
    ],
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_the_setting(build, setting):
    with pytest.raises(ConfigurationError, match=setting) as raised:
        build()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("partition", "text"),
    [
        (IID(), "IID()"),
        (Dirichlet(2, "class"), "Dirichlet(alpha=2, balance='class')"),
        (Shards(0.2), "Shards(class_fraction=0.2)"),
        (Shards(0.2, "modulo", 3), "Shards(class_fraction=0.2, assignment='modulo', tail=3)"),
        (ExtendedDirichlet(2, 0.3), "ExtendedDirichlet(classes_per_client=2, alpha=0.3)"),
        (GammaSimilarity(0.3), "GammaSimilarity(gamma=0.3)"),
    ],
)
def test_partitions_print_their_arguments(partition, text):
    assert str(partition) == text


def test_the_base_class_says_what_to_define():
    with pytest.raises(NotImplementedError, match=r"Partition must define __call__"):
        Partition()(torch.arange(3), 1, rng())
