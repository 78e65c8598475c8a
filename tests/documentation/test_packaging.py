"""What an installation must hold."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_listed_for_installation():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("fl_lightning", "callbacks", "datamodules", "configs")
        for path in (ROOT / top).rglob("__init__.py")
    }
    assert set(listed) == found
