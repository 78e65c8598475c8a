"""What accuracy costs, as a figure: the numbers of the rows, in units that fit."""

import pytest

from fl_lightning.pictures.communication import communication_figure, has_communication

LINK = "2 Mbit/s up, 6 down, 50 ms round trip"


def fake_rows(bytes_per_round, exchanges, split="val", metric="accuracy"):
    rows = [{"round": 0, f"{split}/{metric}": 0.1}]
    for number in range(1, 5):
        row = {"round": number, "comm/total_bytes_per_client": number * bytes_per_round}
        row |= {"comm/total_exchanges": number * exchanges, "comm/total_simulated_s": number * 100.0}
        rows.append(row | ({f"{split}/{metric}": 0.2 * number} if number % 2 == 0 else {}))
    return rows


def test_the_figure_shows_accuracy_against_bytes_exchanges_and_time():
    figure = communication_figure({"": fake_rows(5_000_000, 58)}, LINK, ["FedAvg"])
    drawn = [axes.lines[0].get_data() for axes in figure.axes]
    assert [list(costs) for costs, _ in drawn] == [
        [0, 10, 20],
        [0, 116, 232],
        pytest.approx([0, 10 / 3, 20 / 3]),
    ]
    assert all(list(values) == [0.1, 0.4, 0.8] for _, values in drawn)
    labels = [axes.get_xlabel() for axes in figure.axes]
    assert "MB" in labels[0]
    assert "min" in labels[2]
    assert LINK in labels[2]
    assert figure.axes[0].get_legend() is None


def test_of_several_runs_the_figure_has_a_legend_and_logarithmic_costs():
    runs = {"FedAvg": fake_rows(5_000_000, 1), "FedTAN": fake_rows(5_050_000, 58)}
    figure = communication_figure(runs, LINK, ["Two runs"])
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["FedAvg", "FedTAN"]
    for axes in figure.axes:
        assert axes.get_xscale() == "log"
        assert all((line.get_xdata() > 0).all() for line in axes.lines)


def test_test_accuracy_or_loss_stands_in_and_nothing_is_drawn_of_nothing():
    for split, metric, label in (("test", "accuracy", "test\naccuracy"), ("val", "loss", "validation\nloss")):
        rows = fake_rows(1000, 1, split, metric)
        assert has_communication(rows)
        assert communication_figure({"": rows}, "", []).axes[0].get_ylabel() == label
    assert not has_communication([{"round": 1, "comm/total_exchanges": 1.0}])
    assert not has_communication([{"round": 1, "val/accuracy": 0.5}])
