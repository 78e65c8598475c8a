"""Peak memory of contenders, each in a new process, minus the memory of the imports."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.process_tree import pss_mb
from benchmarks.roster import enter, import_packages, present
from benchmarks.workloads import WORKLOADS, SyntheticImages

_EVERY = 0.05  # seconds between two measurements


def memory(
    workload_name: str,
    model_name: str,
    names: Sequence[str],
    num_images: int,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the memory of contenders, one after the other, on one thread.

    Memory is the proportional set size (PSS). If several processes share a page, each process
    counts only its part of the page.

    Args:
        workload_name: A name of ``WORKLOADS``.
        model_name: A name of ``recipe.MODELS``.
        names: Names of ``roster.NAMES``. The naive loop is always measured first.
        num_images: Training images of all clients together.
        rounds: Rounds of each contender.
        say: Function that prints a line of progress.

    Returns:
        A dict with the settings and these keys. All memory is in MB.

        - ``mb[contender]["imports"]``: memory after all imports.
        - ``mb[contender]["peak"]``: largest memory of all processes together while rounds run.
        - ``mb[contender]["more"]``: the difference of the two.
        - ``data``: memory of the images as uint8, which every contender needs.
        - ``missing``: the frameworks that are not installed.
    """
    found: dict[str, dict[str, float]] = {}
    for name in ["naive", *(name for name in names if name != "naive" and present(name))]:
        found[name] = _measure([name, workload_name, model_name, str(num_images), str(rounds)])
        say(f"  {workload_name} {model_name} {name:<10} {found[name]['more']:6.0f} MB")
    return {
        "workload": workload_name,
        "model": model_name,
        "rounds": rounds,
        "data": num_images * 3 * 32 * 32 / 1e6,
        "missing": [name for name in names if not present(name)],
        "mb": found,
    }


def table(results: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table of the results."""
    yield "| workload | model | | imports, MB | peak, MB | peak - imports, MB | this / naive |"
    yield "|---" * 7 + "|"
    for result in results:
        start, naive = f"| {result['workload']} | {result['model']} |", result["mb"]["naive"]["more"]
        for name, mb in result["mb"].items():
            cells = " | ".join(f"{mb[key]:.0f}" for key in ("imports", "peak", "more"))
            yield f"{start} {name} | {cells} | {mb['more'] / naive:.2f} |"
        for name in result["missing"]:
            yield f"{start} {name} | not installed | | | |"


def _measure(arguments: Sequence[str]) -> dict[str, float]:
    """Start a process; measure its memory after the imports, and its peak from then to its end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.memory", *arguments],
        cwd=Path(__file__).resolve().parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        imports = pss_mb(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        process.stdout.readline()
        process.stdin.close()
        peak = imports
        while process.poll() is None:
            peak = max(peak, pss_mb(process.pid))
            time.sleep(_EVERY)
    finally:
        process.kill()
        process.stdout.close()
    if process.wait() != 0:
        raise RuntimeError(f"measuring memory: the process for {' '.join(arguments)} failed, see above")
    return {"imports": imports, "peak": peak, "more": peak - imports}


def _serve(name: str, workload_name: str, model_name: str, num_images: str, rounds: str) -> None:
    torch.set_num_threads(1)
    import_packages(name)
    _wait("imported")
    workload = WORKLOADS[workload_name]
    data = SyntheticImages(int(num_images), workload.num_clients)
    data.setup("fit")
    contender = enter(name, workload, model_name, data)
    # the benchmark's copy of the images would otherwise count as memory of the contender
    del data.pixels, data
    _wait("entered")
    contender.run(int(rounds))


def _wait(reached: str) -> None:
    print(reached, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
