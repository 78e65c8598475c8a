"""Damaged checkpoints, which must be refused in one line or load with their original content."""

import random
from collections import Counter
from pathlib import Path

from benchmarks.faults.contents import same
from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.checkpoint_io import load_checkpoint


def damaged(path: Path, damages: int, draw: random.Random) -> Counter[str]:
    """Damage a checkpoint, load it, and count the outcomes.

    Args:
        path: The checkpoint; it is restored at the end.
        damages: Number of damaged copies to load.
        draw: Random number generator of the damage.
    """
    whole, intact = path.read_bytes(), load_checkpoint(path)
    counts: Counter[str] = Counter()
    for _ in range(damages):
        content = bytearray(whole)
        # half of the damage hits the directory of the zip archive, a short part at its end
        first = len(whole) - 3000 if draw.random() < 0.5 else 0
        place = draw.randrange(max(first, 0), len(whole))
        kind = draw.choice(["a bit", "bytes", "a cut", "a gap"])
        if kind == "a bit":
            content[place] ^= 1 << draw.randrange(8)
        elif kind == "bytes":
            content[place : place + 16] = draw.randbytes(len(content[place : place + 16]))
        elif kind == "a cut":
            del content[place:]
        else:
            del content[place : place + draw.randrange(1, 64)]
        path.write_bytes(content)
        try:
            loaded = load_checkpoint(path)
        except ConfigurationError:
            counts["refused in one line"] += 1
            continue
        counts["loaded as they were" if same(loaded, intact) else "loaded as other numbers"] += 1
    path.write_bytes(whole)
    return counts
