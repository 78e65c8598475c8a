"""The runs below ``runs/<name>`` that tables and figures are made of."""

import json
import re
import sys
from pathlib import Path


def finished(name: str) -> dict[int, tuple[Path, dict]]:
    """Folder and result of the newest finished attempt of each seed.

    Raises:
        SystemExit: There is none, or they are not of one configuration and length.
    """
    found = [
        (int(match[2]), int(match[3] or 1), match[1], folder)
        for folder in Path("runs", name).glob("*")
        if (match := re.fullmatch(r"([0-9a-f]{8})-s(\d+)(?:\.(\d+))?", folder.name))
        and (folder / "result.json").exists()
    ]
    hashes = sorted({stem for _, _, stem, _ in found})
    if len(hashes) != 1:
        sys.exit(
            f"runs/{name}: finished runs of one configuration are needed, found {', '.join(hashes) or 'none'}"
        )
    newest = {
        seed: (folder, json.loads((folder / "result.json").read_text()))
        for seed, _, _, folder in sorted(found)
    }
    rounds = sorted({result["rounds"] for _, result in newest.values()})
    if len(rounds) != 1:
        sys.exit(f"runs/{name}: runs of equally many rounds are needed, found {', '.join(map(str, rounds))}")
    return newest
