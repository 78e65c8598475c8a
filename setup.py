"""Packages of the project. The folders at its top are packages in ``fl_lightning``, with or without links."""

from setuptools import find_packages, setup

folders = ("callbacks", "datamodules", "configs")
inner = [name for folder in folders for name in find_packages(include=[folder, f"{folder}.*"])]
setup(
    packages=sorted({*find_packages(include=["fl_lightning*"]), *(f"fl_lightning.{name}" for name in inner)}),
    package_dir={f"fl_lightning.{folder}": folder for folder in folders},
)
