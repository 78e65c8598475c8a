"""The rules on random rows against those of ByzFL 0.0.11, where it is installed."""

import pytest
import torch

from benchmarks.aggregation import part_of_byzfl
from fl_lightning import aggregation as ours

byzfl = part_of_byzfl("aggregators")
if byzfl is None:
    pytest.skip("byzfl is not installed", allow_module_level=True)


def from_the_median(rows):
    return rows - ours.median(rows)


# ours and ByzFL's, of rows [n, d] and f. Its geometric median stops after three iterations: another number.
PAIRS = {
    "median": (lambda rows, f: ours.median(rows), lambda f: byzfl.Median()),
    "trimmed mean": (lambda rows, f: ours.TrimmedMean(f)(rows), byzfl.TrMean),
    "mean around median": (lambda rows, f: ours.MeanAroundMedian(f)(rows), byzfl.Meamed),
    "krum": (lambda rows, f: ours.Krum(f)(rows), byzfl.Krum),
    "multi-krum": (lambda rows, f: ours.MultiKrum(f)(rows), byzfl.MultiKrum),
    "nnm": (lambda rows, f: ours.NNM()([rows], f)[0], byzfl.NNM),
    "nnm trimmed mean": (
        lambda rows, f: ours.TrimmedMean(f, ours.NNM())(rows),
        lambda f: lambda rows: byzfl.TrMean(f)(byzfl.NNM(f)(rows)),
    ),
    **{
        f"clipping {iterations}": (
            # ByzFL starts from 0, and our rule from the median
            lambda rows, f, k=iterations: ours.CenteredClipping(4.0, k)(from_the_median(rows)),
            lambda f, k=iterations: lambda rows: byzfl.CenteredClipping(L=k, tau=4.0)(from_the_median(rows)),
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
