"""Entry point of ``python -m fl_lightning``.

``--version`` and ``--help`` do not import torch.
"""

import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from fl_lightning import __version__
from fl_lightning.errors import ConfigurationError, nearest
from fl_lightning.launched import launched_rank

_RUNS = ("fit", "validate", "test")
_OTHERS = {
    "verify": "fl_lightning.cli.verify",
    "study": "fl_lightning.cli.study",
    "report": "fl_lightning.cli.report",
    "runs": "fl_lightning.cli.runs",
    "partition": "fl_lightning.cli.partition",
    "list": "fl_lightning.cli.listing",
    "dashboard": "fl_lightning.cli.dashboard",
}
_COMMANDS = (*_RUNS, "predict", "export", *_OTHERS)

_HELP = """\
usage: python -m fl_lightning {fit,validate,test,predict,export,verify,study,report,runs,partition,list,dashboard} --config FILE [--key value ...]

Batch Normalization in federated learning, on PyTorch Lightning.

commands:
  fit        train, print a table of results and write runs/NAME/...
  validate   evaluate a checkpoint on the validation data
  test       evaluate a checkpoint on the test data; test RUN FILE: a run's model on a new file with targets
  predict    write the predictions of a run's model: predict RUN on the run's test data, predict RUN FILE on a new file
  export     write a run's model as a file that needs no fl_lightning: export runs/NAME/HASH-s0
  verify     check the rules and equalities of methods: verify --callback FixBN, --callback methods.Mine, --all
  study      run the cells of a table or figure: study configs/studies/fixbn_table4.yaml; see study --help
  report     write one HTML page about studies and runs: report runs/studies/NAME-quick, report runs/A/* runs/B/*
  runs       show all runs below a folder in a table: runs --where state=finished --sort best
  partition  show the clients' sizes and classes in a table and a picture; --save FILE.json writes the partition
  list       list the names that a YAML accepts: list {methods,models,data,partitions,norms,aggregators,attacks}
             list the shipped files: list {configs,studies}
             list the tensors of a model and their treatments: list parameters --config FILE
  dashboard  make a Weights & Biases workspace with panels for runs: dashboard --project NAME runs/NAME/*

often used:
  --config configs/quickstart.yaml   a YAML file; several are merged, later ones win
  --seed_everything 1                the seed of all random numbers
  --trainer.max_epochs 200           the number of communication rounds
  --ckpt_path last                   resume (fit) or evaluate the newest run of this configuration
  --ckpt_path auto                   resume the newest run if it has a checkpoint, else start a new run
  --print_config                     print the resolved configuration and stop

  python -m fl_lightning fit --help all                   all settings, on about 2,000 lines
  python -m fl_lightning fit --trainer.callbacks.help FixBN   the settings of one class
  python -m fl_lightning --version
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: Arguments without the program's name; None for ``sys.argv[1:]``.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # escape characters that the terminal cannot show, instead of raising an error
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run(list(sys.argv[1:] if args is None else args))
    except ConfigurationError as error:
        # of a command that does not import torch, or of an incomplete package
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        # only for Ctrl-C during the import of torch, because commands handle Ctrl-C themselves
        if not launched_rank():
            print("stopped by Ctrl-C; nothing new is kept", file=sys.stderr)
        sys.exit(130)


def _run(arguments: list[str]) -> None:
    if arguments in ([], ["-h"], ["--help"]) or (
        arguments[0] in _RUNS and arguments[1:] in (["-h"], ["--help"])
    ):
        print(_HELP, end="")
        if not arguments:
            sys.exit(2)
    elif arguments == ["--version"]:
        print(f"fl_lightning {__version__}")
    elif arguments[0] in ("predict", "export") or (
        arguments[0] == "test" and arguments[1:] and arguments[1][0] != "-"
    ):
        import_module("fl_lightning.cli.predict").main(arguments)
    elif arguments[0] in _OTHERS:
        if arguments[0] in ("study", "partition"):
            _check_files(arguments)
        import_module(_OTHERS[arguments[0]]).main(arguments[1:])
    elif not set(arguments) & set(_COMMANDS):
        near = nearest(arguments[0], _COMMANDS)
        wrong = f"error: there is no command {arguments[0]!r}{near}; use one of {', '.join(_COMMANDS)}"
        print(wrong, file=sys.stderr)
        sys.exit(2)
    else:
        _check_files(arguments)
        if not (launched_rank() or any(x.startswith(("--print_config", "--help", "-h")) for x in arguments)):
            with suppress(OSError):  # printing to a full disk must not end the run
                print(f"fl_lightning {__version__}: loading PyTorch and Lightning", flush=True)
        from fl_lightning.cli.command_line import main as run

        run(arguments)


def _check_files(arguments: list[str]) -> None:
    """Exit with a one-line message if a configuration file has a mistake.

    This check does not import PyTorch. Errors other than ``ConfigurationError`` are ignored here.
    """
    if launched_rank() or os.environ.get("FL_LIGHTNING_TRACEBACK"):
        return
    from fl_lightning.cli.early_checks import check_files

    with suppress(Exception):
        try:
            check_files(arguments)
        except ConfigurationError as error:
            print("error:", *str(error).split(), file=sys.stderr)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    try:
        main()
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during exit prints no traceback
