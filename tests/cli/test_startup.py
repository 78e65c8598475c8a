import ast
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import house
import pytest
import yaml

import fl_lightning
from fl_lightning.cli.early_checks import SETTINGS, check_files
from fl_lightning.errors import ConfigurationError
from fl_lightning.files import shipped
from tests.support.written_runs import write_run

HEAVY = {"torch", "lightning", "torchvision", "torchmetrics", "numpy", "sklearn", "wandb"}


def python(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def imported(code):
    """Top-level packages that a program imports, its output aside."""
    answer = python(
        "-c", f"import sys\n{code}\nprint('packages:', *{{name.split('.')[0] for name in sys.modules}})"
    )
    assert answer.returncode == 0, answer.stderr
    return set(answer.stdout.rpartition("packages: ")[2].split())


def test_neither_the_package_nor_its_version_and_help_import_a_heavy_package():
    code = """
import fl_lightning; dir(fl_lightning); fl_lightning.__version__
from fl_lightning.__main__ import main
for argument in ("--version", "--help", "-h"):
    main([argument])
"""
    packages = imported(code)
    assert "fl_lightning" in packages
    assert not packages & HEAVY


def test_runs_imports_pandas_and_no_other_heavy_package():
    write_run(Path("runs/bn/a-s0"))
    packages = imported("from fl_lightning.__main__ import main; main(['runs'])")
    assert packages & {*HEAVY, "pandas", "scipy", "matplotlib"} == {"numpy", "pandas"}


def imports_at_the_top(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("command", ["command_line", "verify", "listing", "partition", "dashboard"])
def test_packages_for_tables_and_pictures_are_imported_where_they_are_used(command):
    """Lightning imports torchmetrics, which imports SciPy and torchvision, so the test reads the files.

    torchmetrics also imports matplotlib's pyplot, in every version that Lightning allows.
    """
    modules = {house.module_name(path): path for package in house.PACKAGES for path in house.files(package)}
    reached, heavy, waiting = set(), set(), [f"fl_lightning.cli.{command}"]
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            names = [*imports_at_the_top(modules[module])]
            waiting += filter(None, (house._nearest(name, modules) for name in names))
            heavy |= {(module, name.partition(".")[0]) for name in names}
    assert len(reached) > 100
    packages = {name for module, name in heavy if ".datamodules." not in module}
    assert packages & {"scipy", "pandas", "wandb", "sklearn", "torchvision"} == set()


def test_public_names_are_all_there():
    for name in fl_lightning.__all__:
        assert getattr(fl_lightning, name).__name__ == name
    with pytest.raises(AttributeError, match="FederatedModul"):
        fl_lightning.FederatedModul  # noqa: B018  # the access is the test


def test_version_is_one_line():
    answer = python("-m", "fl_lightning", "--version")
    assert (answer.stdout, answer.returncode) == (f"fl_lightning {fl_lightning.__version__}\n", 0)


def test_top_level_help_names_every_command_and_no_argument_is_a_mistake(capsys):
    from fl_lightning.__main__ import main

    main(["--help"])
    shown = capsys.readouterr().out
    for command in ("fit", "validate", "test", "predict"):
        assert f"\n  {command} " in shown
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert capsys.readouterr().out == shown


def test_help_of_a_command_is_short_and_says_where_the_long_one_is(capsys):
    from fl_lightning.__main__ import main

    main(["fit", "--help"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) < 40
    assert "fit --help all" in shown
    assert "list {methods,models,data,partitions,norms,aggregators,attacks}" in shown
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--help", "all"])
    assert stop.value.code in (0, None)
    assert "--model.local_steps" in capsys.readouterr().out


def test_a_run_says_that_it_has_begun_before_it_imports_a_heavy_package():
    code = f"""
import sys
class Stop:
    def find_spec(self, name, *rest):
        if name in {HEAVY}:
            sys.exit("imports " + name)
sys.meta_path.insert(0, Stop())
from fl_lightning.__main__ import main
main(["fit", "--config", "configs/quickstart.yaml"])
"""
    answer = python("-c", code)
    assert answer.stdout == f"fl_lightning {fl_lightning.__version__}: loading PyTorch and Lightning\n"
    assert answer.stderr.startswith("imports ")


STUDY = "title: x\naxes: {method: {BN: {}}}\nscales: {quick: {base: configs/quickstart.yaml}}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("fit --config nowhere.yaml", "config: nowhere.yaml does not exist; give a file, such as configs/quickstart.yaml"),
        ("test --config odd.yaml", "config odd.yaml is not YAML: line 2: expected ',' or ']', but got ':'"),
        ("partition --config=odd.yaml", "config odd.yaml is not YAML: line 2: expected ',' or ']', but got ':'"),
        ("study good.yaml --config odd.yaml", "config odd.yaml is not YAML: line 2: expected ',' or ']', but got ':'"),
        ("fit --config names.yaml", "there is no setting 'trainer.max_epoch'; did you mean trainer.max_epochs? (names.yaml, line 3)"),
        ("test --config section.yaml", "there is no setting 'modell'; did you mean model? (section.yaml, line 1)"),
        ("study odd.yaml", "study: odd.yaml is not YAML: line 2: "),
        ("study bad.yaml", "bad.yaml: 2 mistakes: (1) axes is missing (2) there is no key 'axe'; did you mean axes?"),
        ("study good.yaml --scale large", "--scale: good.yaml has no scale 'large'"),
        ("study good.yaml --jobs 0", "--jobs: 0 must be at least 1"),
        ("study", "the following arguments are required: FILE"),
    ],
)  # fmt: skip
def test_mistakes_in_files_are_told_without_heavy_packages(arguments, line):
    Path("odd.yaml").write_text("a: [1\nb: }\n")
    Path("good.yaml").write_text(STUDY)
    Path("names.yaml").write_text("model:\n  local_steps: 1\ntrainer: {max_epoch: 3}\n")
    Path("section.yaml").write_text("modell: {local_steps: 1}\n")
    Path("bad.yaml").write_text(STUDY.replace("axes", "axe"))
    code = """
import sys, io
from fl_lightning.__main__ import main
sys.stderr = io.StringIO()
try:
    main(sys.argv[1:])
except SystemExit as stop:
    heavy = {"torch", "lightning", "torchvision", "torchmetrics", "scipy", "pandas", "matplotlib", "sklearn", "wandb"}
    print(stop.code, sorted(heavy & {*sys.modules}), sys.stderr.getvalue(), end="")
"""
    answer = python("-c", code, *arguments.split())
    assert answer.stdout.startswith(f"2 [] error: {line}"), answer


def test_the_list_of_settings_is_that_of_the_parsers(monkeypatch):
    """With WRITE_SETTINGS=1 the list is written anew."""
    from fl_lightning.cli.federated_cli import FederatedCLI
    from tests.support.command_line import main

    names = {
        "dataloaders",
        "datamodule",
        "verbose",
    }  # Lightning's own arguments of commands

    def stop(self, parser, args):
        names.update(parser.settings(), ("config", "data", "model.seed", "print_config"))
        raise KeyboardInterrupt

    monkeypatch.setattr(FederatedCLI, "parse_arguments", stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["--config", "configs/quickstart.yaml"])  # without a command: the settings of all commands
    sections = {name.partition(".")[0]: [] for name in sorted(names)}
    for name in sorted(names):
        section, _, rest = name.partition(".")
        sections[section] += [rest] if rest else []
    now = {"lightning": version("lightning"), "sections": sections}
    if os.environ.get("WRITE_SETTINGS"):
        SETTINGS.write_text(json.dumps(now, indent=1) + "\n")
    assert json.loads(SETTINGS.read_text()) == now, (
        f"{SETTINGS.name} is out of date; write it anew: WRITE_SETTINGS=1 pytest tests/cli/test_startup.py -k list_of_settings"
    )
    assert len(sections["trainer"]) > 20 < len(sections["model"])


def test_another_version_of_lightning_may_have_other_settings_of_the_trainer(monkeypatch):
    Path("names.yaml").write_text("trainer: {max_epoch: 3}\n")
    with pytest.raises(ConfigurationError, match=r"did you mean trainer\.max_epochs"):
        check_files(["fit", "--config", "names.yaml"])
    monkeypatch.setattr("fl_lightning.cli.early_checks.version", lambda package: "99")
    check_files(["fit", "--config", "names.yaml"])


@pytest.mark.parametrize("command", ["fit", "validate", "test"])
def test_help_of_every_command_names_the_settings_of_all_parts(command, capsys):
    from tests.support.command_line import main

    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code in (0, None)
    shown = capsys.readouterr().out
    for setting in ("--config", "--trainer.max_epochs", "--model.local_steps", "--data", "--seed_everything"):
        assert setting in shown


def test_help_of_one_class_names_its_settings(capsys):
    from tests.support.command_line import main

    with pytest.raises(SystemExit) as stop:
        main(["fit", "--trainer.callbacks.help", "FixBN"])
    assert stop.value.code in (0, None)
    assert "freeze_round" in capsys.readouterr().out


def test_the_early_check_the_messages_and_the_parser_read_a_file_once(monkeypatch):
    from fl_lightning.cli.command_line import resolve

    Path("once.yaml").write_text("# read once\n" + shipped("configs/quickstart.yaml").read_text())
    texts, load = [], yaml.load
    monkeypatch.setattr(yaml, "load", lambda text, loader: texts.append(text) or load(text, loader))
    check_files(["fit", "--config", "once.yaml"])
    assert resolve(["--config", "once.yaml"])["trainer"]["max_epochs"] > 1
    assert texts.count(Path("once.yaml").read_text()) == 1
