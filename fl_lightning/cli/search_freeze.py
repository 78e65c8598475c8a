"""``search-freeze``: T* of FixBN by validation over a grid, whose runs share one stage I."""

import io
import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fl_lightning.cli.command_line import main as run
from fl_lightning.cli.freeze_branches import Branch, fixbn_settings, make_branches, train_branches
from fl_lightning.cli.messages import fail
from fl_lightning.console import print_table
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import folder_below, write_json, write_text
from fl_lightning.milestones import in_run, round_at
from fl_lightning.run.interruption import Stopped, command
from fl_lightning.run_directory.directory import config_hash

_PROGRAM = "python -m fl_lightning search-freeze"
_DESCRIPTION = """\
Search FixBN's T* over a grid, by validation accuracy after the last round.

Until T* FixBN is FedAvg with BN. So the run of the largest T* is trained first and keeps a checkpoint of every other
one; each of these goes on from its checkpoint, bit for bit as if it had been trained alone. All are ordinary runs. The
table is also written to runs/NAME/search-.../search.json. Test data play no part in the choice. The same command again
goes on where it was stopped and trains nothing that is finished; another grid adds to the table."""
_EPILOG = "All other options are those of fit, such as --seed_everything 1 or --trainer.max_epochs 200."


class _Parser(ArgumentParser):
    """Prints its errors without pages of usage."""

    def error(self, message: str) -> NoReturn:
        """Print one line to stderr and exit with status 2."""
        self.exit(2, f"error: {message}\n")


@command()
def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: Arguments after ``search-freeze``.
    """
    parser = _Parser(
        prog=_PROGRAM,
        usage="%(prog)s --config FILE --freeze_rounds T,T,... [options of fit]",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="append", required=True, help="a YAML with FixBN; may be repeated")
    grid = "rounds (100,200,300) or fractions (0.25,0.5)"
    parser.add_argument("--freeze_rounds", metavar="T,T,...", required=True, help=grid)
    own, fit_options = parser.parse_known_args(args)
    try:
        search(own.config, own.freeze_rounds, fit_options)
    except Exception as error:  # noqa: BLE001  # whatever it is, the user gets one line
        fail(error)


def search(configs: Sequence[str], grid: str, fit_options: Sequence[str]) -> None:
    """Train a run for each T* and choose one.

    Args:
        configs: YAML files, later ones win.
        grid: The values of T*, separated by commas.
        fit_options: Further options of ``fit``.

    Raises:
        ConfigurationError: A value of T* or a setting of the run is not fit for a search.
    """
    config = resolve([*(f"--config={path}" for path in configs), *fit_options])
    config["name"] = config["name"] or Path(configs[-1]).stem
    # a T* that diverges is an answer, not the end of the search
    config["model"]["on_divergence"] = "record"
    check(config)
    rounds = freeze_rounds(grid, config["trainer"]["max_epochs"])
    folder = search_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "search.json"
    known = json.loads(path.read_text())["branches"] if path.is_file() else []
    branches = make_branches(config, sorted({*rounds, *(row["freeze_round"] for row in known)}), folder)
    for branch in branches:
        write_text(branch.yaml, yaml.safe_dump(branch.config, sort_keys=False))
    try:
        train_branches(branches)
    except SystemExit as stop:
        kept = f"{folder} keeps what is finished; the same search-freeze command goes on from there"
        if isinstance(stop, Stopped):
            stop.kept = kept
        else:
            print(kept, file=sys.stderr)
        raise
    found = summary(branches)
    write_json(path, found)
    print_search(found, path)


def resolve(fit_options: Sequence[str]) -> dict[str, Any]:
    """The resolved configuration of a fit, every default filled in."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            run(["fit", *fit_options, "--print_config"])
    except SystemExit as stop:
        if stop.code:
            raise
    config: dict[str, Any] = yaml.safe_load(printed.getvalue())
    return config


def check(config: Mapping[str, Any]) -> None:
    """Refuse a run in which T* cannot be searched.

    Raises:
        ConfigurationError: No FixBN, no validation data, or a setting that the search decides.
    """
    fixbn_settings(config)
    if not (config["data"].get("init_args") or {}).get("val_fraction"):
        raise ConfigurationError(
            "data.val_fraction: search-freeze chooses T* on validation data and there are none; set "
            "--data.val_fraction 0.1, say"
        )
    for setting, value in (
        ("ckpt_path", config["ckpt_path"]),
        ("checkpoint.dirpath", config["checkpoint"]["dirpath"]),
        ("trainer.fast_dev_run", config["trainer"]["fast_dev_run"]),
    ):
        if value:
            raise ConfigurationError(f"{setting}: {value} cannot be used in search-freeze; leave it out")


def freeze_rounds(grid: str, total_rounds: int) -> list[int]:
    """The values of T* in a grid, in increasing order.

    Args:
        grid: Rounds or fractions, separated by commas.
        total_rounds: The number of rounds, -1 where only the data tell it.

    Raises:
        ConfigurationError: A value is neither a round of the run nor a fraction in [0, 1].
    """
    found = set()
    for text in grid.split(","):
        try:
            moment = float(text) if "." in text else int(text)
        except ValueError:
            moment = -1
        if isinstance(moment, float) and total_rounds < 0:
            raise ConfigurationError(
                f"freeze_rounds: {text} is a fraction of trainer.max_epochs, which is not set; give rounds"
            )
        if not in_run(moment, ends=True) or 0 <= total_rounds < round_at(moment, total_rounds):
            within = f"0, 1, ..., {total_rounds}" if total_rounds >= 0 else "0, 1, 2, ..."
            raise ConfigurationError(
                f"freeze_rounds: {text.strip()!r} must be a round ({within}) or a fraction in [0.0, 1.0]"
            )
        found.add(round_at(moment, total_rounds))
    return sorted(found)


def search_folder(config: Mapping[str, Any]) -> Path:
    """The search's own folder, ``runs/<name>/search-<config hash>-s<seed>``: the same for every grid."""
    bare = deepcopy({key: config[key] for key in ("model", "data", "trainer")})
    fixbn_settings(bare).update(freeze_round=None, freeze_fraction=None)
    hashed = config_hash({**bare, "rounds": config["trainer"]["max_epochs"]})
    return folder_below(config["run_root"], config["name"]) / f"search-{hashed}-s{config['seed_everything']}"


def summary(branches: Sequence[Branch]) -> dict[str, Any]:
    """What ``search.json`` holds: every branch, all of them finished, and the chosen T* with its test accuracy.

    Of equal validation accuracies the smallest T* is chosen.
    """
    results = [branch.result for branch in branches]
    rows = [
        {
            "freeze_round": branch.freeze_round,
            # the round of stage I that it went on from
            "first_round": max((place["round"] for place in result["continued_from"]), default=0),
            "val/accuracy": result["val/accuracy"],
            "diverged": result["diverged"],
            "directory": result["directory"],
        }
        for branch, result in zip(branches, results, strict=True)
    ]
    best = max(range(len(branches)), key=lambda index: results[index]["val/accuracy"])
    total = sum(result["rounds"] for result in results)
    return {
        "branches": rows,
        "chosen": branches[best].freeze_round,
        "test/accuracy": results[best].get("test/accuracy"),
        "rounds_trained": total - sum(row["first_round"] for row in rows),
        "rounds_of_separate_runs": total,
    }


def print_search(found: Mapping[str, Any], path: Path) -> None:
    """Print the table of a finished search."""
    rows = {"T*": "val/accuracy  test/accuracy  files"}
    for branch in found["branches"]:
        test = ""
        if branch["freeze_round"] == found["chosen"]:
            test = f"{found['test/accuracy']:.4f}" if found["test/accuracy"] is not None else "no test data"
        rows[str(branch["freeze_round"])] = (
            f"{branch['val/accuracy']:<12.4f}  {test:<13}  {branch['directory']}"
            f"{'  (diverged)' if branch['diverged'] else ''}"
        )
    rows["chosen"] = f"T* = {found['chosen']}, by validation accuracy after the last round"
    rows["rounds"] = (
        f"{found['rounds_trained']:,} trained; separate runs: {found['rounds_of_separate_runs']:,}"
    )
    rows["file"] = str(path)
    print_table("Search of T*", rows)
