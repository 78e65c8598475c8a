"""``partition``: who the clients are, seen, drawn and saved, without a model and without training."""

import json
from pathlib import Path

import pytest
from PIL import Image

from fl_lightning.__main__ import main
from tests.support.command_line import message_of, run, write_config
from tests.support.street_scenes import write_scenes

NO_MODEL = """
from torch import nn


class Broken(nn.Module):
    def __init__(self):
        raise AssertionError("a model was made")
"""


def table(capsys, *arguments):
    """The rows that the command prints, by their names."""
    main(["partition", *map(str, arguments)])
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "Clients"
    return dict(line.split("  ", 1) for line in lines)


def test_it_shows_the_clients_of_a_configuration_of_fit_without_its_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken_model.py").write_text(NO_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    write_config({"model.model": {"class_path": "broken_model.Broken"}})
    found = table(
        capsys, "--config", "tiny.yaml", "--data.num_clients", 5, "--data.partition.class_fraction", 0.2
    )
    assert {name: text.strip() for name, text in found.items() if name != "SHA-256"} == {
        "partition": "Shards(class_fraction=0.2), 5 clients",
        "examples": "240 of 5 clients",
        "examples per client": "min 47, median 48, max 49",
        "classes per client": "min 2, median 2, max 2 of 10",
        "effective classes": "min 2, median 2, max 2 (exp of the entropy)",
        "distance to the union": "mean 0.8, max 0.8042 (total variation, in [0, 1])",
        "server": "60 validation and 359 test examples",
        "picture": "partition.png",
    }  # fmt: skip
    with Image.open("partition.png") as picture:
        assert len(picture.convert("L").getcolors()) > 10
    assert not Path("runs").exists()


def test_no_model_needs_to_be_given(capsys):
    found = table(capsys, "--data", "Digits", "--data.num_clients", 3)
    assert found["partition"].strip() == "IID(), 3 clients"
    message = message_of(capsys, lambda: main(["partition", "--threads", "1"]))
    assert message == "error: the following arguments are required: data\n"


def test_clients_smaller_than_a_batch_are_named(capsys):
    write_config()
    main(["partition", "--config", "tiny.yaml", "--data.partition", "IID", "--data.batch_size", "81"])
    assert capsys.readouterr().out.splitlines()[-1] == (
        "3 of 3 clients have fewer samples than batch_size=81, and train on all their samples as one batch: "
        "client 0: 80, client 1: 80, client 2: 80"
    )


@pytest.mark.slow
def test_a_saved_partition_trains_the_same_clients(capsys):
    write_config()
    shown = table(capsys, "--config", "tiny.yaml", "--save", "kept/clients.json", "--output", "pictures")
    assert shown["saved"].strip() == "kept/clients.json"
    assert Path("pictures/partition.png").is_file()
    file = ["--data.partition", "FromFile", "--data.partition.path", "kept/clients.json"]
    again = table(capsys, "--config", "tiny.yaml", *file)
    assert again["SHA-256"] == shown["SHA-256"]
    of_file, drawn = run(*file).attempt, run().attempt
    records = [json.loads(attempt.partition.read_text()) for attempt in (of_file, drawn)]
    assert records[0].pop("partition") == "FromFile(path='kept/clients.json'), 3 clients"
    records[1].pop("partition")
    assert records[0] == records[1]
    assert records[0]["sha256"]["total"] == shown["SHA-256"].strip()
    assert records[0]["heterogeneity"]["classes"]["max"] == 4
    values = [
        {
            name: x
            for name, x in json.loads(attempt.result.read_text()).items()
            if "accuracy" in name or "loss" in name
        }
        for attempt in (of_file, drawn)
    ]
    assert values[0] == values[1]


def test_values_that_are_not_known_have_no_row(capsys):
    write_scenes(Path("scenes"), {"train/a": 3, "train/b": 2, "val/c": 1})
    write_config({"data": {"class_path": "Cityscapes", "init_args": {"data_dir": "scenes", "batch_size": 2}}})
    found = table(capsys, "--config", "tiny.yaml")
    assert found["examples per client"].strip() == "min 2, median 2.5, max 3"
    assert set(found) == {"partition", "examples", "examples per client", "picture"}
    message = message_of(capsys, lambda: main(["partition", "--config", "tiny.yaml", "--save", "x.json"]))
    assert message.startswith("error: save: Cityscapes does not number its samples")


def test_of_a_thousand_small_clients_a_few_are_named(capsys):
    write_config({"data.init_args.partition": {"class_path": "IID"}, "data.init_args.max_examples": None})
    main(["partition", "--config", "tiny.yaml", "--data.num_clients", "1000"])
    note = capsys.readouterr().out.splitlines()[-1]
    assert note.startswith("1000 of 1000 clients have fewer samples than batch_size=10")
    assert note.endswith("client 9: 2 and 990 more")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.num_client", "3"], "did you mean num_clients"),
        (["--model.local_steps", "x"], "model.local_steps: x is not valid"),
        (["--outputs", "x"], "there is no setting 'outputs'"),
        (["--data.partition", "FromFile", "--data.partition.path", "p.json"], "p.json is no file"),
        (["--data.num_clients", "9999"], "num_clients must be in"),
        (["--save", "."], "save: . is a folder"),
        (["--save", "tiny.yaml/x.json"], "tiny.yaml/x.json cannot be written"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing(arguments, message, capsys):
    write_config()
    assert message in message_of(capsys, lambda: main(["partition", "--config", "tiny.yaml", *arguments]))
    assert [path.name for path in Path().iterdir()] == ["tiny.yaml"]


def test_help_is_short_and_names_the_options(capsys):
    with pytest.raises(SystemExit):
        main(["partition", "--help"])
    shown = capsys.readouterr().out
    assert "--save FILE.json" in shown
    assert "--output FOLDER" in shown
