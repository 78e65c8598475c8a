import json
import math

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from fl_lightning.errors import ConfigurationError
from fl_lightning.experiments.run_directory.metrics_log import JSONLinesLogger, lines_until, read_metrics
from fl_lightning.files import write_json


def cut_back(path, round_number):
    """As a resume does."""
    path.write_bytes(b"".join(lines_until(path, round_number)))


def write(folder, rounds):
    logger = JSONLinesLogger(folder)
    for number in rounds:
        logger.log_metrics({"train/loss": 1 / (number + 1), "round": number}, step=number)
    return logger.path


def refuse(number):
    raise ValueError(f"{number} is not JSON")


@pytest.mark.parametrize(
    "value", [0.1, 1 / 3, 5e-324, -0.0, 1.7976931348623157e308, 2**60 + 1, True, "resnet20"]
)
def test_values_read_back_bit_for_bit_with_their_type(tmp_path, value):
    JSONLinesLogger(tmp_path).log_metrics({"round": 3, "x": value})
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert repr(row) == repr({"round": 3, "x": value})


@pytest.mark.parametrize("value", [torch.tensor(0.1), np.float32(0.1)])
def test_single_precision_scalar_reads_back_as_the_double_of_the_same_value(tmp_path, value):
    JSONLinesLogger(tmp_path).log_metrics({"round": 3, "x": value})
    read = read_metrics(tmp_path / "metrics.jsonl")[0]["x"]
    assert read == float(value) != 0.1
    assert np.float32(read) == np.float32(0.1)


def test_nan_and_infinity_are_valid_json_and_read_back_as_floats(tmp_path):
    values = {
        "nan": math.nan,
        "up": torch.tensor(math.inf),
        "down": -math.inf,
        "list": torch.tensor([1.0, math.nan]),
    }
    JSONLinesLogger(tmp_path).log_metrics({"round": 0, **values})
    strict = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert math.isnan(float(strict["nan"]))
    assert float(strict["down"]) == -math.inf
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["nan"])
    assert math.isnan(row["list"][1])
    assert (row["up"], row["down"], row["list"][0]) == (math.inf, -math.inf, 1.0)


def test_round_comes_first_and_other_keys_keep_their_order(tmp_path):
    JSONLinesLogger(tmp_path).log_metrics({"b": 1, "a": 2, "round": torch.tensor(7)})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"round": 7, "b": 1, "a": 2}\n'


def test_rows_without_a_round_write_nothing_and_create_nothing(tmp_path):
    logger = JSONLinesLogger(tmp_path / "run")
    logger.log_metrics({"epoch": 0, "train/loss": 1.0}, step=0)
    logger.log_hyperparams({"lr": 1.0})
    logger.save()
    logger.finalize("success")
    assert not (tmp_path / "run").exists()


def test_other_processes_than_the_first_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    write(tmp_path, [0])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("lost", range(1, 40))
def test_half_written_last_line_is_left_out_wherever_it_was_cut(tmp_path, lost):
    path = write(tmp_path, [0, 1, 2])
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    whole = 3 if lost == 1 else 2 if lost <= len(content.splitlines(keepends=True)[-1]) + 1 else 1
    assert [row["round"] for row in read_metrics(path)] == list(range(whole))
    cut_back(path, whole - 1)
    assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:whole])


def test_cut_back_and_the_rounds_computed_again_give_the_uninterrupted_file(tmp_path):
    whole = write(tmp_path / "whole", range(6)).read_bytes()
    path = write(tmp_path, range(5))
    with path.open("ab") as file:
        file.write(b'{"round": 5, "train/l')
    cut_back(path, 2)
    assert [row["round"] for row in read_metrics(path)] == [0, 1, 2]
    write(tmp_path, range(3, 6))
    assert path.read_bytes() == whole
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["metrics.jsonl", "whole"]


@pytest.mark.parametrize(("rounds", "missing"), [([], 3), ([0, 1, 2], 3), ([0, 2, 3], 1), ([0, 4], 1)])
def test_cut_back_refuses_rows_that_do_not_reach_the_checkpoint_and_leaves_them(tmp_path, rounds, missing):
    path = write(tmp_path, rounds)
    path.touch()
    before = path.read_bytes()
    with pytest.raises(ConfigurationError, match=rf"has no row of round {missing}, .* of round 3; restore"):
        cut_back(path, 3)
    assert path.read_bytes() == before


def test_cut_back_of_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl does not exist"):
        cut_back(tmp_path / "metrics.jsonl", 3)
    assert not any(tmp_path.iterdir())


def test_rows_may_start_at_a_later_round(tmp_path):
    path = write(tmp_path, [5, 6, 7])
    cut_back(path, 6)
    assert [row["round"] for row in read_metrics(path)] == [5, 6]


def test_damaged_line_in_the_middle_is_named(tmp_path):
    path = write(tmp_path, [0, 1, 2])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"oops\n" + lines[2])
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl line 2 is not a row"):
        read_metrics(path)
    with pytest.raises(ConfigurationError, match="line 2"):
        cut_back(path, 1)


def test_reading_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl does not exist"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"file/run/metrics\.jsonl cannot be written"):
        write(tmp_path / "file" / "run", [0])


def test_trainer_works_with_it_as_its_only_logger(tmp_path):
    logger = JSONLinesLogger(tmp_path / "run")
    trainer = L.Trainer(
        logger=logger, accelerator="cpu", enable_progress_bar=False, enable_checkpointing=False
    )
    assert trainer.log_dir == logger.save_dir == str(tmp_path / "run")


def test_no_json_file_holds_what_json_lacks(tmp_path):
    write_json(tmp_path / "result.json", {"loss": math.nan, "all": [math.inf, {"x": -math.inf}], "n": 3})
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": "NaN",
        "all": ["Infinity", {"x": "-Infinity"}],
        "n": 3,
    }
