"""Command ``python -m benchmarks``.

It times communication rounds against a naive FedAvg loop and other frameworks, and aggregation
rules against the library ByzFL.
"""

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import aggregation, chart, clients, compare, faults, gpu, memory, overhead, scale, starts
from benchmarks.options import parse
from benchmarks.stopwatch import Spread, machine, peak_memory_mb

_PROCEDURES: dict[str, Any] = {
    "compare": compare,
    "overhead": overhead,
    "aggregation": aggregation,
    "memory": memory,
    "scale": scale,
    "gpu": gpu,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments without the program's name. Default: the arguments of this process.
    """
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and arguments[0] in (own := {"clients": clients, "faults": faults, "starts": starts}):
        sys.exit(own[arguments[0]].main(arguments[1:]))
    options = parse(arguments)
    torch.set_num_threads(1)
    if options.command == "chart":
        _draw(options)
        return
    results = _results(options)
    about: dict[str, Any] = {
        "command": options.command,
        "machine": machine(options.device),
        "peak_memory_mb": peak_memory_mb(),
    }
    tables = aggregation.table(results[0]) if options.command == "aggregation" else None
    print("\n".join(tables or _PROCEDURES[options.command].table(results)))
    print(f"{_machine_line(about)}; peak memory {about['peak_memory_mb']:.0f} MB")
    if options.json:
        options.json.write_text(json.dumps({**about, "results": results}, default=_plain, indent=1) + "\n")


def _results(options: Namespace) -> list[dict[str, Any]]:
    names, images, repeats, rounds = options.contenders, options.images, options.repeats, options.rounds
    if options.command == "aggregation":
        return [aggregation.compare(options.rules, options.columns, options.memory_columns, repeats, _say)]
    if options.command == "scale":
        settings = names, images, repeats, options.budget
        return [scale.scale(options.factors, model, *settings, _say) for model in options.models]
    if options.command == "gpu":
        return [
            gpu.gpu(model, names, images, repeats, rounds, _say, options.device) for model in options.models
        ]
    measure: Callable[[str, str], dict[str, Any]] = {
        "compare": lambda w, m: compare.compare(
            w, m, names, options.threads, images, repeats, rounds, _say, options.device
        ),
        "memory": lambda w, m: memory.memory(w, m, names, images, rounds or 2, _say),
        "overhead": lambda w, m: overhead.overhead(w, m, images, repeats, rounds, _say),
    }[options.command]
    return [measure(workload, model) for model in options.models for workload in options.workloads]


def _draw(options: Namespace) -> None:
    read = [json.loads(path.read_text()) for path in options.results]
    draw = chart.draw_scale if read[0]["command"] == "scale" else chart.draw_speedups
    results = [result for each in read for result in each["results"]]
    draw(options.picture, results, _machine_line(read[0]))
    _say(f"drawn: {options.picture}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _machine_line(about: dict[str, Any]) -> str:
    on = about["machine"]
    cores = f"{on['cores']} core" + ("s" if on["cores"] != 1 else "")
    gpu_name = f"{on['gpu']}, " if "gpu" in on else ""
    return f"{gpu_name}{on['cpu']}, {cores}, Python {on['python']}, torch {on['torch']}"


def _plain(value: object) -> dict[str, Any]:
    assert isinstance(value, Spread)
    return dataclasses.asdict(value)


if __name__ == "__main__":
    main()
