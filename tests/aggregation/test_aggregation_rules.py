"""Aggregation rules: hand-computed values, plain loops, symmetries, outliers and numbers that are none."""

import pytest
import torch

from fl_lightning import ConfigurationError
from fl_lightning.aggregation import (
    NNM,
    CenteredClipping,
    GeometricMedian,
    Krum,
    MeanAroundMedian,
    MultiKrum,
    TrimmedMean,
    coordinates,
    distances,
    median,
)


def mixed_by_nnm(rows, f):
    return NNM()([rows], f)[0]


F = 3
RULES = {
    "median": median,
    "trimmed_mean": TrimmedMean(F),
    "mean_around_median": MeanAroundMedian(F),
    "centered_clipping": CenteredClipping(8.0, 3),
    "nnm": lambda rows: mixed_by_nnm(rows, F),
    "krum": Krum(F),
    "krum_blanchard": Krum(F, score="blanchard"),
    "multi_krum": MultiKrum(F),
    "geometric_median": GeometricMedian(),
    "nnm_trimmed_mean": TrimmedMean(F, NNM()),
}
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
SQUARE = [[0, 0], [1, 0], [0, 1], [1, 1], [100, -100]]


def normal(n=10, d=37, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, d, generator=generator, dtype=torch.float64).to(dtype)


def rows_of(*values):
    return torch.tensor(values, dtype=torch.float64).reshape(len(values), -1)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# The same rules as loops over plain numbers


def by_distance(rows, i):
    return sorted(range(len(rows)), key=lambda j: (float((rows[i] - rows[j]).square().sum()), j))


def naive_median(rows):
    n = len(rows)
    return torch.tensor([sum(sorted(c)[(n - 1) // 2 : n // 2 + 1]) / (2 - n % 2) for c in rows.t().tolist()])


def naive_trimmed_mean(rows):
    n = len(rows)
    return torch.tensor([sum(sorted(c)[F : n - F]) / (n - 2 * F) for c in rows.t().tolist()])


def naive_mean_around_median(rows):
    middle = naive_median(rows).tolist()
    kept = len(rows) - F
    ranked = [
        sorted(c, key=lambda x: (abs(x - m), x)) for c, m in zip(rows.t().tolist(), middle, strict=True)
    ]
    return torch.tensor([sum(c[:kept]) / kept for c in ranked])


def naive_centered_clipping(rows):
    point = naive_median(rows)
    for _ in range(3):
        moves = [(row - point) * min(1.0, 8 / float((row - point).norm())) for row in rows]
        point = point + sum(moves) / len(rows)
    return point


def naive_nnm(rows):
    return torch.stack([rows[by_distance(rows, i)[: len(rows) - F]].mean(0) for i in range(len(rows))])


def naive_krum_order(rows, neighbours):
    def score(i):
        others = [j for j in by_distance(rows, i) if j != i][:neighbours]
        return float((rows[i] - rows[others]).square().sum(1).mean())

    return sorted(range(len(rows)), key=score)


def naive_geometric_median(rows):
    point = rows.mean(0)
    for _ in range(2000):
        weights = 1 / (rows - point).norm(dim=1)
        point = weights @ rows / weights.sum()
    return point


NAIVE = {
    "median": naive_median,
    "trimmed_mean": naive_trimmed_mean,
    "mean_around_median": naive_mean_around_median,
    "centered_clipping": naive_centered_clipping,
    "nnm": naive_nnm,
    "krum": lambda rows: rows[naive_krum_order(rows, len(rows) - F - 1)[0]],
    "krum_blanchard": lambda rows: rows[naive_krum_order(rows, len(rows) - F - 2)[0]],
    "multi_krum": lambda rows: rows[naive_krum_order(rows, len(rows) - F - 1)[: len(rows) - F]].mean(0),
    "geometric_median": naive_geometric_median,
    "nnm_trimmed_mean": lambda rows: naive_trimmed_mean(naive_nnm(rows)),
}


@pytest.fixture(autouse=True)
def numbers_are_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("n", [7, 8, 23])
@pytest.mark.parametrize("name", RULES)
def test_rules_agree_with_plain_loops(name, n):
    for seed in range(3):
        rows = normal(n, seed=seed) * torch.linspace(1, 3, n)[:, None] + 5
        close(RULES[name](rows), NAIVE[name](rows))
        close(RULES[name](rows.float()), NAIVE[name](rows).float(), 1e-5)
        close(RULES[name](rows.t().contiguous().t()), NAIVE[name](rows))


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        (lambda rows: rows.median(0).values, "median"),  # the lower of two middle values
        (lambda rows: rows.sort(0).values[F:].mean(0), "trimmed_mean"),  # one end only
        (lambda rows: rows.mean(0), "trimmed_mean"),
        (MeanAroundMedian(F - 1), "mean_around_median"),
        (TrimmedMean(F), "mean_around_median"),
        (CenteredClipping(8.0, 2), "centered_clipping"),
        (lambda rows: mixed_by_nnm(rows, F - 1), "nnm"),
        (lambda rows: (8 * naive_nnm(rows) - rows) / 7, "nnm"),  # without itself
        (lambda rows: Krum(F)(rows.flip(0).cumsum(0)), "krum"),
        (MultiKrum(F - 1), "multi_krum"),
        (lambda rows: rows.mean(0), "geometric_median"),
    ],
)
def test_a_wrong_formula_is_seen_by_these_loops(broken, name):
    rows = normal(10, seed=5) * torch.linspace(1, 3, 10)[:, None] + 5
    assert float((broken(rows) - NAIVE[name](rows)).abs().max()) > 1e-2


def test_values_computed_by_hand():
    square, scalars = rows_of(*SQUARE), rows_of(0, 1, 2, 3, 10)
    mixed = mixed_by_nnm(square, 1)
    close(mixed, rows_of(*[[0.5, 0.5]] * 4, [25.5, -24.75]))
    close(median(mixed), torch.tensor([0.5, 0.5]))
    mixed = mixed_by_nnm(scalars, 1)
    close(mixed, rows_of(1.5, 1.5, 1.5, 1.5, 4))
    assert median(mixed) == TrimmedMean(1)(mixed) == 1.5
    assert median(rows_of(0, 1, 2, 9)) == 1.5
    assert TrimmedMean(3)(rows_of(*range(9), 1000)) == 4.5
    # 2 is the median; of 0 and 4, equally far, the lower one
    assert MeanAroundMedian(1)(scalars) == MeanAroundMedian(1)(rows_of(0, 1, 2, 3, 4)) == 1.5
    assert MeanAroundMedian(1)(rows_of(0, 1, 2, 9)) == 1
    # from 1.5 by (-1.5 - 0.5 + 0.5 + 3) / 4, and then by a quarter of that
    assert CenteredClipping(3.0)(rows_of(0, 1, 2, 10)) == 1.875
    assert CenteredClipping(3.0, 2)(rows_of(0, 1, 2, 10)) == 1.96875
    # squared distances to the three closest others: 1 + 4 + 9, 1 + 1 + 4, 1 + 1 + 4, ...
    assert Krum(1)(scalars) == 1
    assert MultiKrum(1)(scalars) == 1.5
    # the corner of a flat triangle, and the centre of a regular one
    close(GeometricMedian()(rows_of([0, 0], [9, 1], [-9, 1])), torch.zeros(2), 1e-8)
    close(GeometricMedian()(rows_of([1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)])), torch.zeros(2))


def test_equal_distances_and_scores_go_to_the_lower_index():
    close(mixed_by_nnm(rows_of(0, 1, -1, -1), 1)[0], torch.zeros(1))
    assert Krum(1)(rows_of(5, 5, 7, 7)) == 5
    assert Krum(1)(rows_of(7, 7, 5, 5)) == 7


@EVERY_RULE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_width_of_a_chunk_does_not_matter(rule, dtype, monkeypatch):
    rows = normal(11, 101, dtype)
    expected = rule(rows)
    for elements in (1, 11 * 7, 11 * 100):
        monkeypatch.setitem(coordinates.CHUNK_ELEMENTS, "cpu", elements)
        close(rule(rows), expected, 1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
@EVERY_RULE
def test_a_gpu_gives_what_the_cpu_gives(rule):
    rows = normal(11, 1000)
    rows[0] = torch.nan
    torch.testing.assert_close(rule(rows.cuda()).cpu(), rule(rows), rtol=0, atol=1e-10, equal_nan=True)


@EVERY_RULE
@pytest.mark.parametrize("shape", [(8, 1), (8, 3), (7, 0)])
def test_the_rows_stay_as_they_were(rule, shape):
    for dtype in (torch.float32, torch.float64):
        rows = normal(*shape, dtype).requires_grad_()
        before = rows.detach().clone()
        result = rule(rows)
        assert torch.equal(rows, before)
        assert result.dtype == dtype
        assert result.shape[-1] == shape[1]
        assert not result.requires_grad


@pytest.mark.parametrize("n", [1, 2])
def test_one_or_two_clients_are_enough(n):
    rows = normal(n)
    for rule in (median, TrimmedMean(0), MultiKrum(0), GeometricMedian()):
        close(rule(rows), rows.mean(0))
    close(mixed_by_nnm(rows, 0), rows.mean(0).expand(n, -1))
    assert torch.equal(Krum(0)(rows), rows[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixed_variances_are_never_negative(dtype):
    lowest = []
    for zeros in range(2, 40):
        rows = normal(1, 200, dtype, seed=zeros).abs().repeat(2 * zeros + 1, 1)
        rows[:zeros] = 0  # the centre is the others' value, and so has to cancel
        shares = torch.zeros(1, len(rows))
        shares[0, :zeros] = 1 / zeros
        lowest.append(
            float(distances.mix([rows], shares, *distances.measure_distances([rows])[:1:-1])[0].min())
        )
    assert min(lowest) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_distances_are_those_of_differences_in_float64(dtype):
    rows = normal(9, 300, dtype)
    direct = (rows.double()[:, None] - rows.double()).square().sum(2)
    close(distances.measure_distances([rows]).squared, direct, 1e-12)
    close(distances.squared_distances([rows[:, :7], rows[:, 7:]]), direct, 1e-12)


@pytest.mark.parametrize(("dtype", "place"), [(torch.float32, 1e3), (torch.float64, 1e6)])
def test_distances_of_close_clients_are_exact_whatever_the_outliers(dtype, place, monkeypatch):
    rows = normal(9, 500, torch.float64) * 1e-3 + place
    rows[-2:] += 1e9
    rows = rows.to(dtype)
    honest = rows[:-2].double()
    direct = (honest[:, None] - honest).square().sum(2)

    def error():
        found = distances.measure_distances([rows[:, :100], rows[:, 100:]]).squared[:-2, :-2]
        return float(((found - direct).abs() / direct.clamp(min=1e-30)).max())

    assert error() < 1e-10
    pairs = distances.squared_distances([rows[:, :100], rows[:, 100:]])[:-2, :-2]
    close(pairs, direct, 1e-12)
    for centre in (lambda block: torch.zeros(block.shape[1]), lambda block: block.mean(0)):
        monkeypatch.setattr(distances, "median", centre)
        assert error() > 1e-8


@pytest.mark.parametrize("n", [15, 16, 17])
def test_up_to_sixteen_clients_are_subtracted_and_more_are_multiplied(n):
    rows = normal(n, 20) * 1e-3
    rows[: n // 2] += 1e6  # far from the median, where a matrix product cancels
    direct = (rows[:, None] - rows).square().sum(2)
    found = distances.squared_distances([rows])
    if n > 16:
        assert torch.equal(found, distances.measure_distances([rows]).squared)
        assert float((found - direct).abs().max()) > 1e-3
    else:
        close(found, direct, 1e-12)


def test_a_geometric_median_may_be_a_client():
    rows = normal(9, 20)
    point = GeometricMedian()(rows)
    close(GeometricMedian()(torch.cat([rows, point[None]])), point, 1e-14)
    rows[4] = (
        point  # the pull of the row that went is all that the others lack: the edge of the iteration's reach
    )
    close(GeometricMedian()(rows), point, 1e-14)
    close(GeometricMedian()(rows_of(8, 1, 3, 0)), torch.tensor([2.0]))


def test_a_geometric_median_balances_the_directions_to_all_clients():
    for seed in range(5):
        rows = normal(9, 20, seed=seed) * torch.linspace(0.1, 10, 9)[:, None]

        def pull(point, rows=rows):
            return float(torch.nn.functional.normalize(rows - point).sum(0).norm())

        assert pull(GeometricMedian()(rows)) < 1e-8
        assert pull(rows.mean(0)) > 0.1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda rows: TrimmedMean(5)(rows),
         "TrimmedMean.f: 5 must be less than half of a round's 10 clients; use at most 4, or at least 11 clients in a round"),
        (lambda rows: Krum(0.3)(rows), "Krum.f: 0.3 must be a whole number of at least 0"),
        (lambda rows: MultiKrum(True)(rows), "MultiKrum.f: True must be a whole number of at least 0"),
        (lambda rows: Krum(1, score="blanchard")(rows[:3]),
         "Krum.score: blanchard needs at least f + 3 = 4 clients in a round, not 3; use byzfl"),
    ],
)  # fmt: skip
def test_impossible_settings_are_refused_in_one_line(call, message):
    with pytest.raises(ConfigurationError) as refused:
        call(normal())
    assert str(refused.value) == message
