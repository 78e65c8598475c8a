"""What the user gave is read from files and arguments as they are, before anything is made of it."""

from pathlib import Path

import pytest

from fl_lightning.cli.given import given_settings
from fl_lightning.errors import ConfigurationError


def test_files_and_arguments_by_plain_name_the_later_over_the_earlier():
    Path("a.yaml").write_text("data:\n  class_path: Digits\n  init_args:\n    seed: 1\nseed_everything: 1\n")
    given = given_settings(["fit", "--config", "a.yaml", "--data.init_args.seed=2", "--name", "a"])
    assert given == {"data": "Digits", "data.seed": 2, "seed_everything": 1, "name": "a"}


@pytest.mark.parametrize("text", ["2025-02-30", "[1, ", "0x_"])
def test_text_that_is_no_yaml_stays_text(text):
    assert given_settings(["fit", "--name", text]) == {"name": text}


def test_a_file_below_the_home_is_found_where_the_shell_leaves_the_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.yaml").write_text("model:\n  seed: 5\n")
    assert given_settings(["fit", "--config=~/x.yaml"]) == {"model.seed": 5}
    (tmp_path / "x.yaml").write_text("date: 2025-02-30\n")
    with pytest.raises(ConfigurationError, match=r"x\.yaml is not YAML"):
        given_settings(["fit", "--config=~/x.yaml"])
