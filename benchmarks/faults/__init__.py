"""``python -m benchmarks faults``: kill runs, ranks and studies, damage checkpoints and files.

- A killed run is started again with the same command (``--ckpt_path auto``) until it ends. Its
  metrics, weights, optimizers and methods' state must then equal those of an uninterrupted run bit
  for bit. Only times may differ.
- If one rank is killed, the other ranks must end.
- A study that was killed and restarted must not train a finished cell again.
- A damaged checkpoint must be refused in one line, or load with its original content.
- A mistake in a study's file must be refused in one line that names the mistake.
"""

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults import checkpoints, mistakes, ranks, runs, studies
from benchmarks.faults.contents import same

__all__ = ["main", "same"]

_WRONG = (
    "other bits", "loaded as other numbers", "left a process behind", "ended well unfinished", "a finished cell trained again", "accepted",
    "several lines", "refused without its name", "a traceback",
)  # fmt: skip
"""Outcomes that count as failures of the framework."""


def main(args: Sequence[str]) -> int:
    """Run the command.

    Args:
        args: Arguments after ``faults``.

    Returns:
        The exit status: 1 if any outcome is a failure, 0 otherwise.
    """
    parser = argparse.ArgumentParser("python -m benchmarks faults", description=__doc__.partition("\n\n")[2])
    add = parser.add_argument
    add(
        "--kills",
        type=int,
        default=108,
        help="kills of all runs together, 108: six for each configuration with each executor",
    )
    add("--rank-kills", type=int, default=60, help="kills of single ranks, 60")
    add("--study-kills", type=int, default=60, help="kills of studies or of their cells, 60")
    add("--damages", type=int, default=3000, help="damaged copies of a checkpoint, 3000")
    add("--mistakes", type=int, default=200, help="mistakes in a study's file, 200")
    add("--rounds", type=int, default=40, help="communication rounds of a run, 40")
    add("--configurations", nargs="+", choices=list(runs.CONFIGURATIONS), default=list(runs.CONFIGURATIONS))
    add("--executors", nargs="+", choices=list(runs.EXECUTORS), default=list(runs.EXECUTORS))
    add("--seed", type=int, default=0, help="seed of the moments, the damage and the mistakes, 0")
    add("--json", type=Path, help="write the counts to this file as well")
    options = parser.parse_args(args)
    cells = [(name, executor) for name in options.configurations for executor in options.executors]
    kills: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for index, (name, executor) in enumerate(cells):
            share = options.kills * (index + 1) // len(cells) - options.kills * index // len(cells)
            draw = random.Random(f"{options.seed} {name} {executor}")
            place = Path(folder, str(index))
            kills[f"{name}; {executor}"] = runs.killed(name, executor, share, options.rounds, draw, place)
            _say(f"{name}; {executor}", kills[f"{name}; {executor}"])
        counts = {"kills of runs": sum(kills.values(), Counter[str]())}
        last = next(Path(folder, "0", "whole").glob("runs/faults/*/checkpoints/last.ckpt"))
        counts["damaged checkpoints"] = checkpoints.damaged(
            last, options.damages, random.Random(options.seed)
        )
        for what, count, tried in (
            ("kills of ranks", options.rank_kills, ranks.killed),
            ("kills of studies", options.study_kills, studies.killed),
        ):
            draw = random.Random(f"{options.seed} {what}")
            counts[what] = tried(count, options.rounds, draw, Path(folder, what)) if count else Counter()
        draw = random.Random(f"{options.seed} mistakes")
        counts["mistakes"] = mistakes.refused(options.mistakes, draw, Path(folder, "mistakes"))
    for what, found in counts.items():
        _say(what, found)
    if options.json is not None:
        told = {**counts, "kills by run": kills, "rounds": options.rounds, "seed": options.seed}
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    return int(any(found[wrong] for found in counts.values() for wrong in _WRONG))


def _say(what: str, counts: Counter[str]) -> None:
    print(
        f"{what}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items()) or 'none'}",
        flush=True,
    )
