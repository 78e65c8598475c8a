"""What the scripts of this folder share: the code looked at, commands in forked processes, records and their comparison."""

import argparse
import contextlib
import io
import json
import os
import platform
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT = 1800  # wall seconds after which a command is ended


class Ended(NamedTuple):
    """What a command left: its exit status, what it printed, and its wall seconds."""

    status: int
    out: str
    err: str
    seconds: float


def use(code: Path) -> None:
    """Take fl_lightning from this folder, here and in processes started from here."""
    sys.path.insert(0, str(code))
    settings = {
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "WANDB_MODE": "disabled",
        "COLUMNS": "200",
    }
    os.environ.update(settings, PYTHONPATH=str(code), JSONARGPARSE_DEPRECATION_WARNINGS="off")


def warm_up() -> None:
    """Import once what every command imports, so that forks need not."""
    arguments = ["fit", "--config", "configs/quickstart.yaml", "--print_config"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        _as_main(arguments)
    import torch

    torch.set_num_threads(1)


def _as_main(arguments: list[str]) -> None:
    """Do what ``python -m fl_lightning ARGUMENTS`` does."""
    sys.argv = ["fl_lightning", *arguments]
    runpy.run_module("fl_lightning", run_name="__main__", alter_sys=True)


def fork(
    function: Callable[[], Any],
    folder: Path,
    prepare: Callable[[], None] = lambda: None,
    limit: float = LIMIT,
    texts_in: Path | None = None,
) -> Ended:
    """Call a function in a fork of this process in a folder; its exit status is 1 after an exception.

    What the function prints is kept in the folder ``texts_in``, the folder's parent if it is left out.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    paths = [(texts_in or folder.parent) / f"{folder.name}.{end}" for end in ("out", "err")]
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setsid()
            prepare()
            os.chdir(folder)
            for number, path in enumerate(paths, 1):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            status = function() or 0
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:  # noqa: BLE001  # as Python does at the end of a process
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(status)
    status = _wait(child, started + limit)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the command has started
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in paths]
    return Ended(status, texts[0], texts[1], round(time.monotonic() - started, 2))


def _wait(child: int, end: float) -> int:
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
        time.sleep(0.02)


def command(arguments: list[str], folder: Path) -> Ended:
    """Run ``python -m fl_lightning ARGUMENTS`` in a folder, as a fork of this process."""

    def run() -> None:
        sys.path.insert(1, str(folder))  # where a user's own modules are
        _as_main(arguments)

    return fork(run, folder)


def command_of_its_own(arguments: list[str], folder: Path) -> Ended:
    """Run ``python -m fl_lightning ARGUMENTS`` in a folder, as a new process."""
    started = time.monotonic()
    words = [sys.executable, "-m", "fl_lightning", *arguments]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT)
    return Ended(ended.returncode, ended.stdout, ended.stderr, round(time.monotonic() - started, 2))


def machine(code: Path) -> dict[str, str]:
    """Return what a record's floats depend on, and the commit that it is of."""
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    git = ["git", "-C", str(code), "log", "-1", "--format=%h"]
    others = ["--", ".", ":!tools"]  # all but these scripts
    changed = subprocess.run([*git[:3], "status", "--porcelain", *others], capture_output=True, check=False)
    commit = subprocess.run([*git, *others], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "commit": commit + (" with changes" if changed.stdout else ""),
        "cpu": names[0] if names else platform.processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def write(path: Path, machine: dict[str, str], values: dict[str, Any]) -> None:
    """Write a record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "values": values}
    path.write_text(text_of(record))


def text_of(record: Any) -> str:
    """Return a record as JSON with a list of plain values on one line."""
    text = json.dumps(record, indent=1, sort_keys=True, ensure_ascii=False)
    plain = re.compile(r"\[[^\[\]{}\"]*\]")
    return plain.sub(lambda found: " ".join(found[0].split()), text) + "\n"


def leaves(node: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a record by their place in it; a list of plain values is a leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{place} / {key}" if place else str(key))
    elif isinstance(node, list) and any(isinstance(value, dict | list) for value in node):
        for number, value in enumerate(node):
            yield from leaves(value, f"{place} / {number}" if place else str(number))
    else:
        yield place, node


def show(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print where two records differ, and return in how many places."""
    first, second = dict(leaves(before)), dict(leaves(after))
    differing = [place for place in {**first, **second} if first.get(place, "-") != second.get(place, "-")]
    for place in differing:
        print(f"{place}\n  before  {first.get(place, '-')}\n  after   {second.get(place, '-')}")
    print(f"{len(before)} entries, {len(first)} values before, {len(second)} after: {len(differing)} differ")
    return len(differing)


def main(
    text: str | None,
    look: Callable[[str, Path], dict[str, Any]],
    show: Callable[[dict[str, Any], dict[str, Any]], int] = show,
) -> None:
    """Run a script's command line.

    Args:
        text: What the script says of itself.
        look: Returns what is recorded of the entries whose name contains a text, in an empty folder.
        show: Prints the differences of two records, and returns their number.
    """
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path, help="the record to write, or the one before")
    parser.add_argument("after", type=Path, nargs="?", help="the record to compare it with; else made now")
    parser.add_argument("--code", type=Path, default=REPOSITORY, help="a checkout; this one if left out")
    parser.add_argument("--only", default="", help="part of an entry's name")
    given = parser.parse_args()
    use(given.code.resolve())
    found = json.loads(given.after.read_text()) if given.after else None
    if found is None:
        warm_up()
        with TemporaryDirectory() as folder:
            found = {"machine": machine(given.code), "values": look(given.only, Path(folder))}
    if given.command == "record":
        write(given.file, found["machine"], found["values"])
        return
    before = json.loads(given.file.read_text())
    for key, value in before["machine"].items():
        if found["machine"][key] != value and key != "commit":
            print(f"another machine: {key} was {value}, now {found['machine'][key]}; floats may differ")
    kept = {name: value for name, value in before["values"].items() if given.only in name}
    found = json.loads(json.dumps(found))
    sys.exit(int(show(kept, {k: v for k, v in found["values"].items() if given.only in k}) > 0))
