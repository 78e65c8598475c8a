"""New patients: each is predicted by the model of its hospital, and a file of training samples is no test."""

import re
from pathlib import Path

import pytest

from fl_lightning.__main__ import main as command
from tests.support.command_line import message_of
from tests.support.trained_models import SITES, fit, predicted, table_of, write_table


@pytest.mark.parametrize("method", ["FedBN", "FedBABU"])
def test_each_row_is_predicted_by_the_model_of_its_hospital(patients, capsys, method):
    _, run = fit(callbacks=[method])
    write_table("new.csv", 12, seed=1)
    by_hospital = {site: predicted(capsys, run, "new.csv", "--client", site) for site in SITES}
    header, *rows = predicted(capsys, run, "new.csv")
    assert header == ["line", "model", "prediction", "probability_ill", "probability_well"]
    for number, row in enumerate(rows):
        site = SITES[number % 4]
        assert row[1] == site
        expected = by_hospital[site][1 + number]
        assert [row[0], *row[2:3]] == expected[:2]
        assert [*map(float, row[3:])] == pytest.approx([*map(float, expected[2:])], abs=1e-6)


def test_an_unknown_hospital_gets_the_servers_model(patients, capsys):
    _, run = fit(callbacks=["FedBN"])
    write_table("new.csv", 12, seed=1)
    text = Path("new.csv").read_text(encoding="utf-8")
    Path("new.csv").write_text(text.replace("Oslo", "Kiel").replace("Lund,", ","), encoding="utf-8")
    capsys.readouterr()
    command(["predict", run, "new.csv"])
    out = capsys.readouterr().out
    assert "each sample by the model of its client (2 clients)" in out
    assert "by the server's model, as the run has no model of these clients: empty: 3, Kiel: 3" in out
    rows = table_of(out.splitlines()[-1].partition(" written to ")[2])[1:]
    assert [row[1] for row in rows[:4]] == ["Bergen", "Bonn", "(server)", "(server)"]
    whole = Path("no_site.csv")
    lines = [line.partition(",")[2] for line in Path("new.csv").read_text(encoding="utf-8").splitlines()]
    whole.write_text("\n".join(lines) + "\n", encoding="utf-8")
    capsys.readouterr()
    command(["predict", run, "no_site.csv"])
    out = capsys.readouterr().out
    assert "with FedBN, each client uses a model of its own: choose it by --client NAME" in out
    of_server = table_of(out.splitlines()[-1].partition(" written to ")[2])[1:]
    for row, expected in zip(rows, of_server, strict=True):
        if row[1] == "(server)":
            assert [*map(float, row[3:])] == pytest.approx([*map(float, expected[2:])], abs=1e-6)
        else:
            assert row[3:] != expected[2:]


def test_a_run_with_one_model_predicts_all_rows_with_it(patients, capsys):
    _, run = fit()
    write_table("new.csv", 8, seed=1)
    assert predicted(capsys, run, "new.csv")[0][:2] == ["line", "prediction"]


def test_training_samples_in_a_test_file_are_counted(patients, capsys):
    cli, run = fit(test_fraction=0.25)
    write_table("new.csv", 10, seed=7)
    lines = Path("patients.csv").read_text(encoding="utf-8").splitlines()
    places = cli.datamodule._place_of
    trained = [int(places[x]) for part in cli.datamodule.distribution.clients for x in part[:2]]
    tested = [int(places[x]) for x in cli.datamodule.distribution.test[:5]]
    new = Path("new.csv").read_text(encoding="utf-8").splitlines()
    Path("mixed.csv").write_text("\n".join([*new, *(lines[x - 1] for x in [*trained, *tested])]) + "\n")
    capsys.readouterr()
    command(["test", run, "mixed.csv"])
    out = capsys.readouterr().out
    assert "23 samples of mixed.csv" in out
    assert "8 of them equal a training sample of the run in all features and the target" in out
    Path("trained.csv").write_text("\n".join([new[0], *(lines[x - 1] for x in trained)]) + "\n")
    message = message_of(capsys, lambda: command(["test", run, "trained.csv"]))
    assert "all 8 samples of trained.csv are training samples of the run; give others" in message
    command(["test", run, "new.csv"])
    assert "training sample" not in capsys.readouterr().out
    Path("patients.csv").unlink()
    command(["test", run, "mixed.csv"])
    out = capsys.readouterr().out
    assert re.search("not compared with the run's training samples: .*patients.csv", out)


def test_a_hospital_that_has_never_trained_gets_the_servers_model(patients, capsys):
    _, run = fit(callbacks=["FedBN"], participation=0.25)
    write_table("new.csv", 8, seed=1)
    capsys.readouterr()
    command(["predict", run, "new.csv"])
    out = capsys.readouterr().out
    rows = table_of(out.splitlines()[-1].partition(" written to ")[2])[1:]
    of_server = [SITES[number % 4] for number, row in enumerate(rows) if row[1] == "(server)"]
    assert 0 < len(of_server) < 8
    assert re.search("by the server's model, as the run has no model of these clients: .*: 2", out)
    message = message_of(capsys, lambda: command(["predict", run, "new.csv", "--client", of_server[0]]))
    assert "has trained in no round" in message
