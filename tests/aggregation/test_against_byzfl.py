"""The rules on random rows against those of ByzFL 0.0.11, where it is installed."""

import pytest
import torch

from benchmarks.aggregation import part_of_byzfl
from fl_lightning import aggregation as ours

byzfl = part_of_byzfl("aggregators")
if byzfl is None:
    pytest.skip("byzfl is not installed", allow_module_level=True)

# ours and ByzFL's, of rows [n, d] and f. Its geometric median stops after three iterations: another number.
PAIRS = {
    "median": (lambda rows, f: ours.median(rows), lambda f: byzfl.Median()),
    "trimmed mean": (ours.trimmed_mean, byzfl.TrMean),
    "mean around median": (ours.mean_around_median, byzfl.Meamed),
    "krum": (ours.krum, byzfl.Krum),
    "multi-krum": (ours.multi_krum, byzfl.MultiKrum),
    "nnm": (ours.nearest_neighbor_mixing, byzfl.NNM),
    "nnm trimmed mean": (
        lambda rows, f: ours.TrimmedMean(f, ours.NNM())(rows),
        lambda f: lambda rows: byzfl.TrMean(f)(byzfl.NNM(f)(rows)),
    ),
    **{
        f"clipping {iterations}": (
            lambda rows, f, k=iterations: ours.centered_clipping(rows, 4.0, k, rows.new_zeros(rows.shape[1])),
            lambda f, k=iterations: byzfl.CenteredClipping(L=k, tau=4.0),
        )
        for iterations in (1, 5)
    },
    "buckets": (
        lambda rows, f: ours.Median(pre=ours.Bucketing(1, f))(rows),
        lambda f: lambda rows: byzfl.Median()(byzfl.Bucketing(1)(rows)),
    ),
}


@pytest.mark.parametrize(("n", "f"), [(4, 1), (5, 0), (10, 3), (10, 4), (17, 2), (33, 16)])
@pytest.mark.parametrize("name", PAIRS)
def test_rules_give_what_byzfl_gives(name, n, f):
    own, theirs = PAIRS[name]
    rows = torch.randn(n, 40, generator=torch.Generator().manual_seed(n)) * torch.linspace(1, 3, n)[:, None]
    torch.testing.assert_close(own(rows, f), theirs(f)(rows.clone()), rtol=1e-4, atol=1e-5)
