"""``search-freeze``: T* of FixBN by validation over a grid, whose runs share one stage I."""

import io
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.cli.command_line import main as run
from fl_lightning.cli.messages import command, refuse
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import folder_below, write_json, write_text
from fl_lightning.optimizers.milestones import in_run, round_at
from fl_lightning.run_directory.checkpoint_io import load_run
from fl_lightning.run_directory.checkpoints import kept_name
from fl_lightning.run_directory.console import print_table
from fl_lightning.run_directory.directory import Attempt, class_name, config_hash, directory_of

_DESCRIPTION = """\
Search FixBN's T* over a grid, by validation accuracy after the last round. The run of the largest T* is trained first, and the
others go on from its checkpoints. The same command again goes on where it was stopped; another grid adds to the table.
All other options are those of fit, such as --seed_everything 1 or --trainer.max_epochs 200."""


@command()
def main(args: Sequence[str]) -> None:
    """Train a run for each T*, choose one and print the table.

    Args:
        args: Arguments after ``search-freeze``.
    """
    parser = ArgumentParser(
        prog="python -m fl_lightning search-freeze",
        usage="%(prog)s --config FILE --freeze_rounds T,T,... [options of fit]",
        description=_DESCRIPTION,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.error = refuse  # type: ignore[assignment]  # without pages of usage
    parser.add_argument("--config", action="append", required=True, help="a YAML with FixBN; may be repeated")
    grid = "rounds (100,200,300) or fractions (0.25,0.5)"
    parser.add_argument("--freeze_rounds", metavar="T,T,...", required=True, help=grid)
    own, fit_options = parser.parse_known_args(args)
    config = resolve([*(f"--config={path}" for path in own.config), *fit_options])
    config["name"] = config["name"] or Path(own.config[-1]).stem
    # a T* that diverges is an answer, not the end of the search
    config["model"]["on_divergence"] = "record"
    check(config)
    asked = freeze_rounds(own.freeze_rounds, config["trainer"]["max_epochs"])
    folder = search_folder(config)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "search.json"
    known = json.loads(path.read_text())["branches"] if path.is_file() else []
    rounds = sorted({*asked, *(row["freeze_round"] for row in known)})
    branches = [Branch(config, freeze_round, rounds) for freeze_round in rounds]
    for branch in reversed(branches):
        _train(branch, branches, folder / f"freeze_round_{branch.freeze_round}.yaml")
    found = summary(branches)
    write_json(path, found)
    print_search(found, path)


class Branch:
    """The run with one T*; it keeps checkpoints for those of a smaller one.

    Args:
        config: The resolved configuration of a run with FixBN, its name too.
        freeze_round: T*.
        grid: All values of T*.
    """

    def __init__(self, config: Mapping[str, Any], freeze_round: int, grid: Sequence[int]) -> None:
        self.freeze_round, self.config = freeze_round, deepcopy(dict(config))
        fixbn_settings(self.config).update(freeze_round=freeze_round, freeze_fraction=None)
        self.config["checkpoint"]["keep_rounds"] = [other for other in grid if 0 < other < freeze_round]

    @property
    def attempt(self) -> Attempt | None:
        """Its newest attempt."""
        return next(iter(directory_of(self.config).attempts()), None)

    @property
    def result(self) -> dict[str, Any]:
        """Its ``result.json``, empty until it has been trained for all rounds."""
        if self.attempt is None or not self.attempt.result.is_file():
            return {}
        found: dict[str, Any] = json.loads(self.attempt.result.read_text())
        all_rounds = found["rounds"] == found["planned_rounds"] == self.config["trainer"]["max_epochs"]
        return found if all_rounds else {}


def _train(branch: Branch, branches: Sequence[Branch], file: Path) -> None:
    """Train a branch that is not finished, from the latest checkpoint that it shares with one of the branches."""
    if branch.result:
        print(f"T* = {branch.freeze_round}: finished in {branch.result['directory']}", flush=True)
        return
    write_text(file, yaml.safe_dump(branch.config, sort_keys=False))
    reached, source = 0, None
    for other in branches:
        shared = range(1, min(branch.freeze_round, other.freeze_round) + 1)
        names = ["last.ckpt"] * (other is branch) + [kept_name(round_number) for round_number in shared]
        for path in [other.attempt.checkpoints / name for name in names] if other.attempt else []:
            checkpoint = load_run(path) if path.is_file() else {}
            if (
                checkpoint.get("global_step", 0) > reached
                and checkpoint["fl_lightning"]["total_rounds"] == branch.config["trainer"]["max_epochs"]
            ):
                reached, source = checkpoint["global_step"], path
    print(f"T* = {branch.freeze_round}" + (f", from {source}" if source else ""), flush=True)
    run(["fit", f"--config={file}", *([f"--ckpt_path={source}"] if source else [])])


def fixbn_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the one FixBN of a resolved configuration, to be read and written.

    Raises:
        ConfigurationError: There is none, or more than one.
    """
    callbacks = config["trainer"]["callbacks"] or []
    found: list[dict[str, Any]] = [
        callback["init_args"] for callback in callbacks if class_name(callback) == "FixBN"
    ]
    if len(found) != 1:
        raise ConfigurationError(f"trainer.callbacks: search-freeze needs one FixBN and found {len(found)}")
    return found[0]


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
        ConfigurationError: No validation data, no number of rounds, or a setting that the search decides.
    """
    if not (config["data"].get("init_args") or {}).get("val_fraction"):
        raise ConfigurationError(
            "data.val_fraction: search-freeze chooses T* on validation data and there are none; set "
            "--data.val_fraction 0.1, say"
        )
    if config["trainer"]["max_epochs"] < 1:
        raise ConfigurationError("trainer.max_epochs: search-freeze needs the number of rounds; set it")
    for setting, value in {
        "ckpt_path": config["ckpt_path"],
        "checkpoint.dirpath": config["checkpoint"]["dirpath"],
        "trainer.fast_dev_run": config["trainer"]["fast_dev_run"],
    }.items():
        if value:
            raise ConfigurationError(f"{setting}: {value} cannot be used in search-freeze; leave it out")


def freeze_rounds(grid: str, total_rounds: int) -> set[int]:
    """The values of T* in a grid of rounds or fractions, separated by commas.

    Raises:
        ConfigurationError: A value is neither a round of the run nor a fraction in [0, 1].
    """
    found = set()
    for text in grid.split(","):
        try:
            moment = float(text) if "." in text else int(text)
        except ValueError:
            moment = -1
        if not in_run(moment, ends=True) or round_at(moment, total_rounds) > total_rounds:
            raise ConfigurationError(
                f"freeze_rounds: {text.strip()!r} must be a round (0, 1, ..., {total_rounds}) or a fraction in [0.0, 1.0]"
            )
        found.add(round_at(moment, total_rounds))
    return found


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
    best = max(range(len(branches)), key=lambda index: results[index]["val/accuracy"])
    shown = ("val/accuracy", "diverged", "directory")
    return {
        "branches": [
            {"freeze_round": branch.freeze_round, **{name: result[name] for name in shown}}
            for branch, result in zip(branches, results, strict=True)
        ],
        "chosen": branches[best].freeze_round,
        "test/accuracy": results[best].get("test/accuracy"),
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
    rows["file"] = str(path)
    print_table("Search of T*", rows)
