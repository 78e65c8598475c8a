"""Walking over the columns of rows ``[n, d]`` in chunks, so that extra memory does not grow with d."""

from collections.abc import Iterator

from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 2**18}
"""Elements of a chunk by device type: what a core's cache holds; elsewhere (``_LARGE_CHUNK``), few launches count."""

_LARGE_CHUNK = 2**24


def chunks(rows: Tensor) -> Iterator[slice]:
    """Consecutive slices of the columns of ``rows [n, d]``.

    Whoever works on one slice at a time holds, beyond its results, a few copies of at most ``CHUNK_ELEMENTS`` numbers:
    about 10 MB on a CPU, half a GB elsewhere.
    """
    n, d = rows.shape
    width = max(CHUNK_ELEMENTS.get(rows.device.type, _LARGE_CHUNK) // max(n, 1), 1)
    for start in range(0, d, width):
        yield slice(start, min(start + width, d))
