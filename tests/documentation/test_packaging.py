"""What an installation holds, and how it lives beside a user's own packages of the same names."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.command_line import TINY

ROOT = Path(__file__).parents[2]

MINE = """\
from fl_lightning.callbacks import FixBN
class Mine(FixBN):
    pass
"""

IN_A_PROJECT = """\
import fl_lightning, fl_lightning.callbacks, fl_lightning.datamodules
import callbacks, callbacks.mine, datamodules
assert callbacks.__file__ == datamodules.__file__.replace("datamodules", "callbacks"), callbacks.__file__
assert not hasattr(callbacks, "FixBN")
assert callbacks.mine.FixBN is fl_lightning.callbacks.FixBN
print(fl_lightning.__file__, fl_lightning.callbacks.__file__, fl_lightning.datamodules.__file__)
"""

ALONE = """\
import fl_lightning.callbacks, fl_lightning.datamodules, fl_lightning.configs
from fl_lightning.callbacks.fixbn import FixBN
assert FixBN is fl_lightning.callbacks.FixBN
assert FixBN.__module__ == "fl_lightning.callbacks.fixbn"
"""

IN_A_CHECKOUT = """\
from callbacks import FixBN
import callbacks.fixbn, callbacks.observers, datamodules.digits, configs
import fl_lightning.callbacks, fl_lightning.datamodules
assert FixBN is callbacks.fixbn.FixBN is fl_lightning.callbacks.FixBN
assert datamodules.digits.Digits is fl_lightning.datamodules.Digits
"""


def tracked():
    """The files of the repository; a copy without git has no list of them."""
    found = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("a copy without git")
    return [name for name in found.stdout.split("\0") if name and os.path.lexists(ROOT / name)]


def copied(copy, links):
    """Copy what git tracks. In place of its links, some systems write files, and some nothing."""
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        if links == "links" or not (ROOT / name).is_symlink():
            shutil.copyfile(ROOT / name, copy / name, follow_symlinks=False)
        elif links == "files":
            (copy / name).write_text(os.readlink(ROOT / name))
    return copy


@pytest.fixture(scope="module", params=["links", "files", "nothing"])
def checkout(request, tmp_path_factory):
    return copied(tmp_path_factory.mktemp("checkout"), request.param)


def build(what, source, out):
    """Let the build backend make a wheel, an editable wheel or a source distribution."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{what}({str(out)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (made,) = out.iterdir()
    return made


KINDS = [
    ("links", "checkout"),
    ("links", "editable"),
    ("links", "wheel of the source distribution"),
    ("nothing", "checkout"),
    ("files", "editable"),
    ("files", "wheel"),
    ("nothing", "wheel of the source distribution"),
]


@pytest.fixture(scope="module", params=KINDS, ids=" ".join)
def installed(request, tmp_path_factory):
    """The folder that Python finds an installation in."""
    links, kind = request.param
    source = copied(tmp_path_factory.mktemp("source"), links)
    place, out = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("out")
    if kind == "checkout":
        return source
    if "source" in kind:
        with tarfile.open(build("sdist", source, tmp_path_factory.mktemp("sdist"))) as archive:
            archive.extractall(tmp := tmp_path_factory.mktemp("unpacked"), filter="data")
        (source,) = tmp.iterdir()
    with zipfile.ZipFile(build("editable" if kind == "editable" else "wheel", source, out)) as wheel:
        if "wheel" in kind:
            shipped = {
                f"fl_lightning/{name}".replace("fl_lightning/fl_lightning/", "fl_lightning/")
                for name in tracked()
                if name.startswith(("fl_lightning/", "callbacks/", "datamodules/", "configs/"))
                and name.endswith((".py", ".pyi", ".yaml", ".json", ".html", "py.typed"))
            }
            assert {name for name in wheel.namelist() if ".dist-info/" not in name} == shipped
        wheel.extractall(place)
    return place


BARE_PYTHON = """\
import json, os, site, sys
sys.path.append(sys.argv[1])
import lightning.pytorch.cli, pandas, torchvision
for line in sys.stdin:
    code, place, folder, log = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        sys.path[:0] = ["", place]
        site.addsitedir(place)
        exec(code, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
"""A process that has imported libraries, and runs each code in a copy of itself."""


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Run code in a folder with an installation, and return its exit status and what it prints."""
    libraries = sysconfig.get_paths()["purelib"]  # -S: without what is installed there in editable form
    command = [sys.executable, "-S", "-c", BARE_PYTHON, libraries]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    log, pipe = tmp_path_factory.mktemp("log") / "log.txt", subprocess.PIPE
    folder = tmp_path_factory.mktemp("elsewhere")
    with subprocess.Popen(command, cwd=folder, env=clean, stdin=pipe, stdout=pipe, text=True) as process:

        def run(*where):
            print(json.dumps([*map(str, where), str(log)]), file=process.stdin, flush=True)
            return int(process.stdout.readline()), log.read_text()

        yield run


@pytest.fixture
def python(started):
    """Run code in a folder with an installation, and return what it prints."""

    def run(code, place, folder):
        status, printed = started(code, place, folder)
        assert status == 0, printed
        return printed

    return run


@pytest.fixture
def failure(started):
    """Run code that fails, and return the last line of the message."""

    def run(code, place, folder):
        status, printed = started(code, place, folder)
        assert status != 0
        return printed.splitlines()[-1]

    return run


@pytest.fixture
def project(tmp_path):
    """A folder as the usual template of a Lightning project lays it out."""
    for name in ("callbacks", "datamodules"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "callbacks" / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.slow
def test_each_kind_of_installation_gives_one_package_beside_the_users_own(
    installed, python, project, tmp_path_factory
):
    assert str(ROOT) not in python(IN_A_PROJECT, installed, project)
    python(ALONE, installed, tmp_path_factory.mktemp("empty"))


IN_CI = [("nothing", "checkout"), ("files", "wheel")]
MY_STUDY = {
    "title": "FixBN and BN",
    "axes": {"method": {"BN": {}, "FixBN": {"config": "configs/overlays/fixbn.yaml"}}},
    "scales": {"quick": {"base": "configs/digits_fedavg_bn.yaml", "settings": {"trainer.max_epochs": 4}}},
}


@pytest.mark.slow
def test_shipped_configurations_are_found_from_an_empty_folder(installed, python, tmp_path):
    commands = (["list", "configs"], ["list", "studies"])
    code = f"from fl_lightning.__main__ import main\nfor command in {commands}: main(command)"
    printed = python(code, installed, tmp_path)
    for line in ("configs/quickstart.yaml", "configs/studies/methods.yaml"):
        assert line in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "installed",
    [
        pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.nightly, id=" ".join(kind))
        for kind in KINDS
    ],
    indirect=True,
)
def test_a_study_of_shipped_configurations_can_be_started_in_an_empty_folder(installed, python, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(MY_STUDY))
    code = "from fl_lightning.__main__ import main\nmain(['study', 'mine.yaml', '--dry-run'])"
    assert "0 of 2 cells are done" in python(code, installed, tmp_path)


@pytest.mark.slow
def test_a_checkout_imports_its_folders_as_the_same_objects(checkout, python):
    python(IN_A_CHECKOUT, checkout, checkout)


@pytest.mark.slow
def test_half_a_checkout_is_one_line_and_never_takes_another_copy(checkout, failure, tmp_path):
    half = shutil.copytree(checkout, tmp_path / "half", symlinks=True)
    shutil.rmtree(half / "callbacks")
    finder = f"import sys; sys.path.append({str(ROOT)!r})\n"
    code = finder + "import fl_lightning.callbacks"
    line = f"fl_lightning in {half} is incomplete: its folder callbacks is missing; copy the whole repository"
    assert failure(code, half, tmp_path) == f"fl_lightning.errors.ConfigurationError: {line}"
    code = finder + "from fl_lightning.__main__ import main; main(['list', 'methods'])"
    assert failure(code, half, tmp_path) == f"error: {line}"


def command(*arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "fl_lightning", *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_project_with_callbacks_of_its_own_trains_them_beside_the_shipped_ones(project, monkeypatch):
    monkeypatch.chdir(project)
    methods = [
        {"class_path": "callbacks.mine.Mine", "init_args": {"freeze_round": 1}},
        "fl_lightning.callbacks.FedProx",
    ]
    config = {**TINY, "name": "mine", "trainer": {**TINY["trainer"], "callbacks": methods}}
    Path("mine.yaml").write_text(yaml.safe_dump(config))
    done = command("fit", "--config", "mine.yaml")
    assert done.returncode == 0, done.stderr
    (saved,) = Path("runs/mine").glob("*/config.yaml")
    found = [one["class_path"] for one in yaml.safe_load(saved.read_text())["trainer"]["callbacks"]]
    assert found == ["callbacks.mine.Mine", "fl_lightning.callbacks.FedProx"]
    assert torch.load(saved.parent / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 4
    checked = command("verify", "--callback", "callbacks.mine.Mine")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_packages_of_the_readmes_command_suffice_to_collect_the_tests():
    """What tests import at their top is of packages that the installation names, whatever else is installed here."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    installs = {canonicalize_name(Requirement(text).name) for text in named}
    packages = packages_distributions()
    imports = {
        (path.name, name.split(".")[0])
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [x.name for x in node.names])
    }
    other = {
        (path, name)
        for path, name in imports
        if name in packages and not installs & {canonicalize_name(package) for package in packages[name]}
    }
    # pytest needs packaging; Opacus installs its own packages examples and benchmarks
    assert {name for _, name in other if not (ROOT / name).is_dir()} == {"packaging"}


@pytest.mark.parametrize("version", ["2.6.1", "2.6.2", "2.6.3", "2.6.5"])
def test_versions_with_malware_or_code_in_checkpoints_are_excluded(version):
    lightning = requirements()["lightning"]
    assert not lightning.contains(version)
    assert lightning.contains("2.6.6")


def test_the_page_on_reliability_states_the_bounds_of_the_requirements():
    rows = re.findall(r"(?m)^\| `([\w-]+)` \| ([\d.]+) \|", (ROOT / "docs" / "reliability.md").read_text())
    assert len(rows) == 6
    assert {name: f">={bound}" for name, bound in rows} == {
        name: str(requirements()[name]) for name, _ in rows
    }


def requirements():
    """The versions that ``pyproject.toml`` accepts, by package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = settings["project"]["optional-dependencies"].values()
    lines = [*settings["build-system"]["requires"], *settings["project"]["dependencies"], *chain(*extras)]
    return {line.name: line.specifier for line in map(Requirement, lines)}
