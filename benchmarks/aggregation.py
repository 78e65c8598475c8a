"""Speed of aggregation rules, compared with ByzFL's if ByzFL is installed, and their memory."""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks.stopwatch import Spread, peak_memory_mb
from fl_lightning import aggregation as ours

Rule = Callable[[Tensor, int], Tensor]

RULES: dict[str, Rule] = {
    "median": lambda rows, f: ours.Median()(rows),
    "trimmed_mean": lambda rows, f: ours.TrimmedMean(f)(rows),
    "mean_around_median": lambda rows, f: ours.MeanAroundMedian(f)(rows),
    "nnm": lambda rows, f: ours.NNM()([rows], f)[0],
    "krum": lambda rows, f: ours.Krum(f)(rows),
    "multi_krum": lambda rows, f: ours.MultiKrum(f)(rows),
    "geometric_median": lambda rows, f: ours.GeometricMedian()(rows),
    "centered_clipping": lambda rows, f: ours.CenteredClipping(100.0)(rows),
}
CLIENTS = (10, 100)

# ByzFL's geometric median (three iterations) and its clipping (starts at 0) are missing: their
# results differ from ours.
_BYZFL = {
    "median": "Median",
    "trimmed_mean": "TrMean",
    "mean_around_median": "Meamed",
    "nnm": "NNM",
    "krum": "Krum",
    "multi_krum": "MultiKrum",
}


def compare(
    rules: Sequence[str], columns: int, memory_columns: int, repeats: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Time our and ByzFL's rules in turn for 10 and 100 clients, and measure our rules' memory.

    Args:
        rules: Names of ``RULES``.
        columns: Numbers in each client's vector when time is measured.
        memory_columns: Numbers in each client's vector when memory is measured.
        repeats: Number of repetitions.
        say: Function that prints a line of progress.

    Returns:
        A dict with these keys.

        - ``byzfl``: ByzFL's version, or None if ByzFL is missing.
        - ``times``: an entry for each rule and number of clients, with the milliseconds and threads
          of both libraries and our speed-up.
        - ``memory``: peak memory in MB of a process that runs one rule, by rule.
    """
    say(f"memory, 100 x {memory_columns:,}, a process each")
    memory = {rule: _peak_of_process(rule, memory_columns) for rule in ["nothing", *rules]}
    times = []
    for n in CLIENTS:
        rows = torch.randn(n, columns, generator=torch.Generator().manual_seed(0))
        for name in rules:
            times.append({"rule": name, "clients": n, "columns": columns, **_time(name, rows, repeats)})
            taken = ", ".join(f"{side} {spread} ms" for side, spread in times[-1]["milliseconds"].items())
            say(f"  {name} {n} x {columns:,}: {taken}")
    return {
        "byzfl": _byzfl_version(),
        "repeats": repeats,
        "times": times,
        "memory_columns": memory_columns,
        "memory": memory,
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of two Markdown tables of the results."""
    byzfl = f"byzfl {result['byzfl']}" if result["byzfl"] else "byzfl (not installed)"
    yield f"| rule | clients x columns | ours, ms | threads | {byzfl}, ms | threads | byzfl / ours |"
    yield "|---" * 7 + "|"
    for row in result["times"]:
        cells = [row["rule"], f"{row['clients']} x {row['columns']:,}"]
        for side in ("ours", "byzfl"):
            measured = side in row["milliseconds"]
            cells += [str(row["milliseconds"][side]), str(row["threads"][side])] if measured else ["-", "-"]
        yield f"| {' | '.join(cells)} | {row.get('speedup', '-')} |"
    yield ""
    yield f"| rule, 100 x {result['memory_columns']:,} | peak memory of the process, MB |"
    yield "|---|---|"
    for name, megabytes in result["memory"].items():
        yield f"| {name if name != 'nothing' else '(only the rows)'} | {megabytes:.0f} |"


def _time(name: str, rows: Tensor, repeats: int) -> dict[str, Any]:
    """Time our rule and ByzFL's in turn, with 1 and 2 threads; report the faster number of each."""
    f = 3 * len(rows) // 10
    sides = {"ours": RULES[name]}
    if name in _BYZFL and _byzfl_version():
        made = getattr(part_of_byzfl("aggregators"), _BYZFL[name])
        rule = made() if name == "median" else made(f)
        sides["byzfl"] = lambda rows, f: rule(rows)
        torch.testing.assert_close(sides["byzfl"](rows, f), sides["ours"](rows, f), rtol=1e-4, atol=1e-5)
    threads_of = range(1, min(os.cpu_count() or 1, 2) + 1)
    taken: dict[tuple[str, int], list[float]] = {(side, count): [] for count in threads_of for side in sides}
    try:
        for _ in range(repeats):
            for (side, count), measured in taken.items():
                torch.set_num_threads(count)
                started = time.perf_counter()
                sides[side](rows, f)
                measured.append(1000 * (time.perf_counter() - started))
    finally:
        torch.set_num_threads(1)
    spreads = {key: Spread.of(measured) for key, measured in taken.items()}
    best = {side: min((spreads[side, count].median, count) for count in threads_of)[1] for side in sides}
    found: dict[str, Any] = {
        "f": f,
        "milliseconds": {side: spreads[side, best[side]] for side in sides},
        "threads": best,
    }
    if "byzfl" in sides:
        pairs = zip(taken["byzfl", best["byzfl"]], taken["ours", best["ours"]], strict=True)
        found["speedup"] = Spread.of([theirs / own for theirs, own in pairs])
    return found


def part_of_byzfl(name: str) -> ModuleType | None:
    """Return a submodule of ByzFL, or None if ByzFL is missing.

    The submodule is imported without ``byzfl/__init__.py``. That file would import models with the
    same names as our models, and these names would then be ambiguous.
    """
    if _byzfl_version() is None:
        return None
    if (loaded := sys.modules.get(f"byzfl.{name}")) is not None:
        return loaded
    known = "byzfl" in sys.modules
    if not known:
        spec = importlib.util.find_spec("byzfl")
        assert spec is not None
        sys.modules["byzfl"] = importlib.util.module_from_spec(spec)
    try:
        return importlib.import_module(f"byzfl.{name}")
    finally:
        if not known:
            del sys.modules["byzfl"]


def _byzfl_version() -> str | None:
    try:
        return importlib.metadata.version("byzfl")
    except importlib.metadata.PackageNotFoundError:
        return None


def _peak_of_process(rule: str, columns: int) -> float:
    """Start a process that applies a rule to 100 clients, and return its peak memory in MB."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.aggregation", rule, str(columns)],
        cwd=Path(__file__).resolve().parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout)


def _print_peak(rule: str, columns: int) -> None:
    torch.set_num_threads(1)
    rows = torch.randn(100, columns)
    if rule in RULES:
        RULES[rule](rows, 30)
    print(peak_memory_mb())


if __name__ == "__main__":
    _print_peak(sys.argv[1], int(sys.argv[2]))
