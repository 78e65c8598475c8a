"""What an installation must hold."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_folder_of_code_is_a_package_that_is_installed():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    tops = [pattern.removesuffix("*") for pattern in settings["packages"]["find"]["include"]]
    assert sorted(tops) == ["callbacks", "configs", "datamodules", "fl_lightning"]
    folders = {path.parent for top in tops for path in (ROOT / top).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
