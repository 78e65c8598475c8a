"""Mistakes in a study's file. Each must be refused in a line that names it, before any cell."""

import contextlib
import io
import random
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from benchmarks.faults.runs import configuration

FILE: dict[str, Any] = {
    "title": "When to freeze",
    "paper": "A paper, Table 1",
    "settings": {"model.local_steps": 2, "trainer.max_epochs": 6},
    "axes": {
        "method": {
            "BN": {},
            "GN": {"model.model.norm": "gn"},
            "FixBN": {"trainer.callbacks": ["FixBN"], "model.client_optimizer.lr": 0.1},
        },
        "model.client_optimizer.lr": [0.05, 0.1],
        "E": {"E2": {"model.local_steps": 2}, "E4": {"model.local_steps": 4}},
    },
    "metrics": {"test/accuracy": "accuracy", "test/loss": "loss"},
    "spread": "E",
    "difference": "GN - BN",
    "without": [{"method": "GN", "E": "E4"}],
    "choose": [{"axis": "model.client_optimizer.lr", "by": ["method"], "metric": "val/accuracy"}],
    "published": [{"method": "GN", "E": "E2", "value": 0.5}],
    "claims": ["FixBN > BN at E=E2", "GN ~ BN within 0.05 at E=E2"],
    "scales": {
        "quick": {
            "base": "base.yaml",
            "seeds": [0, 1],
            "cell_seconds": 3.0,
            "settings": {"data.batch_size": 8},
        },
        "full": {"base": ["base.yaml"], "seeds": [0, 1, 2], "axes": {"method": ["BN", "GN"]}},
    },
}
"""Content of a study's file with every key and without mistakes."""

_WRONG: dict[str, list[Any]] = {
    "text": [7, 1.5, True, None, ["a"], {"a": 1}],
    "number": ["x", [1], {"a": 1}, True, float("nan"), float("inf")],
    "mapping": [3, "x", True, [1], 1.5],
    "seeds": [["a"], [1.5], [-1], [True], [[0]], {"a": 1}, 0, "0", [], [3, 3]],
}
"""Wrong values, by the type that the file needs instead."""

_TYPES: dict[tuple[Any, ...], str] = {
    ("title",): "text", ("claims", 0): "text", ("claims", 1): "text",
    ("metrics", "test/loss"): "text", ("choose", 0, "axis"): "text",
    ("scales", "full", "base", 0): "text",
    ("published", 0, "value"): "number", ("scales", "quick", "cell_seconds"): "number",
    ("settings",): "mapping", ("axes",): "mapping", ("axes", "method", "GN"): "mapping", ("metrics",): "mapping",
    ("scales",): "mapping", ("scales", "quick"): "mapping", ("scales", "quick", "settings"): "mapping",
    ("without", 0): "mapping", ("choose", 0): "mapping", ("published", 0): "mapping", ("scales", "full", "axes"): "mapping",
    ("scales", "quick", "seeds"): "seeds", ("scales", "full", "seeds"): "seeds",
}  # fmt: skip
"""Types that values of ``FILE`` need, by the path of keys to the value."""

_KEYS: list[tuple[Any, ...]] = [
    ("title",), ("settings",), ("axes",), ("metrics",), ("spread",), ("difference",), ("without",), ("choose",), ("published",), ("claims",),
    ("scales",), ("choose", 0, "axis"), ("choose", 0, "by"), ("choose", 0, "metric"), ("published", 0, "method"),
    ("without", 0, "method"), ("without", 0, "E"), ("scales", "quick", "base"), ("scales", "quick", "seeds"), ("scales", "quick", "settings"),
    ("scales", "full", "axes"), ("settings", "model.local_steps"), ("settings", "trainer.max_epochs"),
    ("axes", "method", "GN", "model.model.norm"), ("axes", "method", "FixBN", "trainer.callbacks"), ("axes", "E", "E4", "model.local_steps"),
    ("axes", "model.client_optimizer.lr"), ("scales", "quick", "settings", "data.batch_size"),
]  # fmt: skip
"""Paths of keys whose last key can be misspelt."""

_NAMED: list[tuple[Any, ...]] = [
    ("without", 0, "method"), ("without", 0, "E"), ("published", 0, "method"), ("published", 0, "E"), ("choose", 0, "axis"),
    ("choose", 0, "by", 0), ("spread",), ("scales", "full", "axes", "method", 1),
    ("axes", "method", "GN", "model.model.norm"), ("axes", "method", "FixBN", "trainer.callbacks", 0), ("scales", "quick", "base"),
]  # fmt: skip
"""Paths of keys to names in ``FILE`` that can be misspelt: labels, axes, classes and files."""

_SETTINGS = [
    ("model.local_steps", "many"), ("model.local_steps", 1.5), ("model.local_steps", 0), ("trainer.max_epochs", "x"), 
    ("model.client_optimizer", "SDG"), ("model.aggregator", "Mean2"), ("data.partition", "Shard"), ("data.num_clients", -1), ("data.batch_size", None),
    ("trainer.callbacks", ["FixBM"]), ("trainer.callbacks", "x.y"), ("model.executor", 3), ("trainer.precision", "bf15"),
    ("model.model", "ResNet21"), ("model.client_optimizer.lr", "fast"), ("checkpoint.every_n_rounds", "x"), ("seed_everything", 3), ("name", "x"),
]  # fmt: skip
"""Settings with values that are invalid for every data set."""

_TEXTS = [
    ("title: When", "title: [When"), ("axes:", "axes:\n\t- x"), ("claims:", "claims: &a [*a]\nclaims2:"), ("paper:", "paper: !!python/name:os.system x\nx:"),
    ("scales:", "scales: {"), ("method:", "method: *nothing\n  m:"), ("E2:", "E2: {}\n    E2:"), ("BN: {}", "BN: {}\n    BN: {}"),
    ("title:", "title: a\ntitle:"), ("spread: E", "spread: 2026-01-01"), ("test/loss: loss", "? [a, b]\n  : c"), ("difference:", "difference: \"\\u2028\"\nx:"),
    ("GN ~ BN", "GN ~~ BN"), ("FixBN > BN", "FixBN > BN ~ GN"), ("within 0.05", "within inf"), ("> BN at", "> FixBN at"), ("at E=E2", "at E="),
]  # fmt: skip
"""Pairs of an old and a new text; each replacement makes the file invalid."""


def refused(count: int, draw: random.Random, folder: Path) -> Counter[str]:
    """Make mistakes in a study's file, one at a time, and count the outcomes.

    Args:
        count: Number of mistakes.
        draw: Random number generator of the mistakes.
        folder: Folder for the files; it must not exist.
    """
    folder.mkdir(parents=True)
    base = configuration([], {}, "SequentialExecutor", 1, 6, 1)
    (folder / "base.yaml").write_text(yaml.safe_dump({key: x for key, x in base.items() if key != "name"}))
    file = folder / "study.yaml"
    counts: Counter[str] = Counter()
    file.write_text(_text(FILE))
    outcome, said = _outcome(file, "")
    if outcome != "accepted":
        raise AssertionError(f"the file without a mistake is refused: {said}")
    kinds = [_typed, _misspelt, _unknown, _unfit, _spoilt]
    for index in range(count):
        content, name = kinds[index % len(kinds)](draw)
        file.write_bytes(content)
        outcome, said = _outcome(file, name)
        counts[outcome] += 1
        if outcome != "refused in one line that names it":
            print(f"{outcome}: {name}: {said}"[:500], flush=True)
    return counts


def _outcome(file: Path, name: str) -> tuple[str, str]:
    """Run the study with ``--dry-run``; return the kind of outcome, and the printed text.

    Args:
        file: The study's file.
        name: The name that the error message must contain.
    """
    from fl_lightning.__main__ import main as run

    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run(["study", str(file), "--dry-run", "--run_root", str(file.parent / "runs")])
        except SystemExit as end:
            status = end.code
        except Exception as error:  # noqa: BLE001  # the outcome is counted
            return "a traceback", repr(error)
    said = err.getvalue().strip()
    if not status:
        return "accepted", out.getvalue()[-200:]
    if said.count("\n") or "Traceback" in said or not said.startswith("error: ") or out.getvalue():
        return "several lines", said + out.getvalue()
    return ("refused in one line that names it" if name in said else "refused without its name"), said


def _text(content: Any) -> str:
    return yaml.safe_dump(content, sort_keys=False)


def _changed(place: tuple[Any, ...], change: Callable[[Any, Any], None]) -> bytes:
    """Return the text of ``FILE`` after one change.

    Args:
        place: Path of keys to the changed value.
        change: Function that makes the change, given the innermost container and the last key.
    """
    content = deepcopy(FILE)
    inside = content
    for key in place[:-1]:
        inside = inside[key]
    change(inside, place[-1])
    return _text(content).encode()


def _typed(draw: random.Random) -> tuple[bytes, str]:
    """Return a file with a value of a wrong type, and the name that the error must contain."""
    place = draw.choice([*_TYPES])
    value = draw.choice(_WRONG[_TYPES[place]])
    return _changed(place, lambda inside, key: inside.__setitem__(key, value)), str(
        next(key for key in reversed(place) if isinstance(key, str))
    )


def _misspelt(draw: random.Random) -> tuple[bytes, str]:
    """Return a file with a misspelt key, and the misspelt name."""
    place = draw.choice(_KEYS)
    name = _letter(place[-1], draw)

    def rename(inside: Any, key: str) -> None:
        renamed = {name if old == key else old: x for old, x in inside.items()}
        inside.clear()
        inside.update(renamed)

    parts = zip(name.split("."), place[-1].split("."), strict=True)
    return _changed(place, rename), next(new for new, old in parts if new != old)


def _unknown(draw: random.Random) -> tuple[bytes, str]:
    """Return a file with a name that does not exist, and the name."""
    place = draw.choice(_NAMED)
    names: list[str] = []

    def rename(inside: Any, key: Any) -> None:
        names.append(_letter(str(inside[key]), draw))
        inside[key] = names[0]

    return _changed(place, rename), names[0]


def _unfit(draw: random.Random) -> tuple[bytes, str]:
    """Return a file with an invalid value of a setting, and the last part of the setting's name."""
    name, value = draw.choice(_SETTINGS)
    places: list[tuple[Any, ...]] = [("settings",), ("scales", "quick", "settings"), ("axes", "method", "GN")]
    # elsewhere in the file, another entry would override these settings
    only = {"model.local_steps": ("axes", "E", "E4"), "data.batch_size": ("scales", "quick", "settings")}
    place = (*only.get(name, draw.choice(places)), name)
    return _changed(place, lambda inside, key: inside.__setitem__(key, value)), name.rpartition(".")[2]


def _spoilt(draw: random.Random) -> tuple[bytes, str]:
    """Return a file with invalid YAML, a repeated name or an invalid claim, and the file's name."""
    text = _text(FILE)
    if draw.random() < 0.3:
        content = bytearray(text.encode())
        place = draw.randrange(len(content) // 2)
        content[place : place + 1] = draw.choice([b"\xff", b"\x00", b"\t{", b"\x1b"])
        return bytes(content), "study.yaml"
    old, new = draw.choice(_TEXTS)
    assert old in text, old
    return text.replace(old, new, 1).encode(), "study.yaml"


def _letter(name: str, draw: random.Random) -> str:
    """Return a name with one letter doubled, dropped or replaced."""
    return draw.choice([*_misspellings(name)])


def _misspellings(name: str) -> Iterator[str]:
    for place, letter in enumerate(name):
        if letter.isalpha():
            for changed in (letter * 2, "", "q"):
                yield name[:place] + changed + name[place + 1 :]
