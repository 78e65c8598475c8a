"""Ranks share work, and tell each other results and errors."""

from copy import deepcopy
from itertools import chain

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.errors import doing
from fl_lightning.ranks import Ranks, checksums, is_shared
from tests.support.in_ranks import in_ranks

SIZES = pytest.mark.parametrize("size", [2, 3])


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [0, 1, 4, 7])
def test_shares_are_neighbours_of_nearly_equal_number(size, count):
    shares = [list(Ranks(rank, size).share(count)) for rank in range(size)]
    assert list(chain(*shares)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert [list(Ranks(0, size).share(count, rank)) for rank in range(size)] == shares


@SIZES
def test_map_computes_every_item_once_and_keeps_their_order(size, tmp_path):
    def mapped(ranks):
        computed, found = [], []
        for count in (0, 1, 2, 7):  # less than ranks, too
            found.append(ranks.map(lambda item: computed.append(item) or -item, range(count)))
        return found, computed

    results = in_ranks(size, mapped, tmp_path)
    assert [found for found, _ in results] == [[[], [0], [0, -1], [-item for item in range(7)]]] * size
    everything = chain(*(computed for _, computed in results))
    assert sorted(everything) == [0, 0, 0, 1, 1, 2, 3, 4, 5, 6]


def test_exchange_tells_everybody_what_each_rank_has(tmp_path):
    def exchanged(ranks):
        return ranks.exchange(lambda: torch.full((2,), ranks.rank))

    for found in in_ranks(3, exchanged, tmp_path):
        assert torch.equal(torch.stack(found), torch.tensor([[0, 0], [1, 1], [2, 2]]))


@pytest.mark.parametrize("size", [4095, 4096, 50_000])
def test_long_and_short_tales_arrive_together(size, tmp_path):
    def exchanged(ranks):
        return ranks.exchange(lambda: bytes([ranks.rank]) * (size if ranks.rank == 1 else 1))

    for found in in_ranks(3, exchanged, tmp_path):
        assert found == [b"\0", b"\1" * size, b"\2"]


def test_an_error_beside_an_exchange_within_another_one_is_everyones(tmp_path):
    def exchanged(ranks):
        def compute():
            if ranks.rank == 2:
                raise ConfigurationError("lr: -1 must be positive")
            ranks.exchange(lambda: ranks.rank)

        for _ in range(2):  # and all meet at the same place after it
            with pytest.raises(ConfigurationError, match="lr: -1"):
                ranks.exchange(compute)
        return ranks.exchange(lambda: ranks.rank)

    assert in_ranks(3, exchanged, tmp_path) == [[0, 1, 2]] * 3


def test_exchanges_at_different_places_are_noticed(tmp_path):
    def exchanged(ranks):
        def compute():
            return ranks.exchange(lambda: 1) if ranks.rank == 1 else None

        with pytest.raises(
            ConfigurationError, match="ranks are at different places: a custom layer, loss or hook"
        ):
            ranks.exchange(compute)
        return ranks.exchange(lambda: ranks.rank)

    assert in_ranks(3, exchanged, tmp_path) == [[0, 1, 2]] * 3


def test_who_hears_of_an_error_in_another_rank_adds_nothing_of_what_it_did_itself(tmp_path):
    def exchanged(ranks):
        def compute():
            with doing(f"computing on rank {ranks.rank}"):
                if ranks.rank == 1:
                    raise ConfigurationError("lr: -1 must be positive")
                ranks.exchange(lambda: None)

        with pytest.raises(ConfigurationError) as failure:
            ranks.exchange(compute)
        return failure.value.__notes__

    assert in_ranks(2, exchanged, tmp_path) == [["computing on rank 1"]] * 2


STATES = {
    "order": (torch.arange(5.0), torch.arange(5.0).roll(1)),
    "sign of zero": (torch.zeros(2), -torch.zeros(2)),
    "type": (torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)),
    "complex": (torch.ones(2, dtype=torch.complex128), torch.ones(2, dtype=torch.complex128) * 1j),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3).roll(1).to_sparse()),
    "set": ({"a", "b"}, {"a", "c"}),
    "text": ("a", "b"),
}


@pytest.mark.parametrize("kind", STATES)
def test_another_state_of_any_kind_has_another_checksum_and_an_equal_one_the_same(kind):
    first, second = (checksums({"kept": {"value": value}}) for value in STATES[kind])
    assert first.keys() == second.keys() == {"kept['value']"}
    assert first != second
    assert first == checksums({"kept": {"value": deepcopy(STATES[kind][0])}})


class OfATest(Exception):
    """An exception whose class other processes need not be able to make."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def failures(size, fail, folder):
    """What each rank sees where the last one fails."""

    def failing(ranks):
        def compute():
            if ranks.rank == size - 1:
                error = fail()
                error.add_note("computing client 7")
                raise error

        try:
            ranks.exchange(compute)
        except (ConfigurationError, OfATest, RuntimeError) as error:
            return type(error).__name__, str(error), error.__notes__, is_shared(error), str(error.__cause__)
        return None

    return in_ranks(size, failing, folder)


def test_a_mistake_that_one_rank_finds_is_one_of_all(tmp_path):
    found = failures(3, lambda: ConfigurationError("lr: -1 must be positive"), tmp_path)
    assert [x[:4] for x in found] == [
        ("ConfigurationError", "lr: -1 must be positive", ["computing client 7"], True)
    ] * 3
    assert all(cause.startswith("in rank 2:\nTraceback") for *_, cause in found[:2])


def test_any_other_error_of_one_rank_is_told_by_its_name(tmp_path):
    *others, own = failures(2, lambda: OfATest(3, 4), tmp_path)
    assert own[:2] == ("OfATest", "3 and 4")
    assert [x[:3] for x in others] == [
        ("RuntimeError", f"{__name__}.OfATest: 3 and 4", ["computing client 7"])
    ]


def test_the_ranks_go_on_together_after_an_error(tmp_path):
    def again(ranks):
        with pytest.raises(ConfigurationError):
            ranks.map(lambda item: [] if item else _refuse(), range(4))
        return ranks.map(str, range(4))

    assert in_ranks(2, again, tmp_path) == [["0", "1", "2", "3"]] * 2


def _refuse():
    raise ConfigurationError("no")


@pytest.mark.parametrize("size", [1, 2])
def test_whoever_draws_in_an_exchange_all_go_on_with_the_same_generators(size, tmp_path):
    def drawing(ranks):
        torch.manual_seed(0)
        ranks.map(lambda item: torch.rand(item), range(5))
        return torch.get_rng_state()

    torch.manual_seed(0)
    expected = torch.get_rng_state()
    assert all(torch.equal(state, expected) for state in in_ranks(size, drawing, tmp_path))


def test_an_exchange_leaves_a_gpu_that_is_not_used_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("uses the GPU"))
    assert Ranks().exchange(lambda: 7) == [7]


@SIZES
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_complete_fills_in_the_rows_of_others(size, dtype, tmp_path):
    def completed(ranks):
        found = []
        for clients, columns in ((1, 3), (2, 3), (7, 3), (7, 250_000)):  # the last one travels by itself
            whole = torch.arange(columns * clients).view(clients, columns).remainder(2).to(dtype)
            own, losses = torch.zeros_like(whole), torch.zeros(clients)
            for row in ranks.share(clients):
                own[row], losses[row] = whole[row], row
            ranks.complete([own, losses, torch.zeros(clients, 0)])
            found.append(torch.equal(own, whole) and losses.tolist() == list(range(clients)))
        return found

    assert in_ranks(size, completed, tmp_path) == [[True] * 4] * size
