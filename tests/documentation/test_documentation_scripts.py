"""The scripts behind the tables and figures of the documentation never mix runs that do not belong together."""

import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest
from written_runs import write_study

SCRIPTS = Path(__file__).parents[2] / "docs" / "scripts"
CURVES = (
    "cifar10_small_fixbn_momentum_local",
    "cifar10_small_fixbn",
    "cifar10_small_gn",
    "cifar10_small_bn",
)


@pytest.fixture(autouse=True)
def scripts():
    """Copies, so that a figure is drawn beside them and not into the documentation."""
    Path("docs", "scripts").mkdir(parents=True)
    Path("docs", "figures").mkdir()
    for name in ("results_table.py", "figures.py", "runs.py", "folders.py"):
        shutil.copy(SCRIPTS / name, "docs/scripts")


def write_run(name, folder, accuracy=0.5, rounds=2, split="val"):
    """A finished run with just what the scripts read."""
    path = Path("runs", name, folder)
    path.mkdir(parents=True)
    rows = [{"round": r, f"{split}/accuracy": accuracy} for r in range(1, rounds + 1)]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    result = {"method": "FedAvg", "rounds": rounds, "train_seconds": 3.0, "test/accuracy": accuracy}
    (path / "result.json").write_text(json.dumps({**result, f"{split}/accuracy": accuracy}))
    return path


@pytest.fixture
def start(monkeypatch):
    """Run a script as a command would, but in this process, which has imported torch already."""
    monkeypatch.syspath_prepend("docs/scripts")

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [f"docs/scripts/{script}.py", *args])
        for module in ("runs", "folders"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        runpy.run_path(sys.argv[0], run_name="__main__")

    return run


@pytest.fixture
def refused(start, capsys):
    """The one line with which a script refuses."""

    def run(script, *args):
        with pytest.raises(SystemExit) as ended:
            start(script, *args)
        line = str(ended.value)
        assert capsys.readouterr().out == ""
        assert "\n" not in line
        return line

    return run


@pytest.fixture
def table_row(start, capsys):
    """The cells of the only row that is printed for a name."""

    def run(name):
        start("results_table", name)
        _, _, row = capsys.readouterr().out.splitlines()
        return [cell.strip() for cell in row.strip("|").split("|")]

    return run


def test_row_has_the_newest_finished_attempt_of_each_seed(table_row):
    for number in (10, 2, 9):
        write_run("x", f"0123abcd-s0.{number}", number / 20)
    write_run("x", "0123abcd-s1", 0.3)
    (write_run("x", "0123abcd-s1.2", 0.9) / "result.json").unlink()
    assert table_row("x") == ["x", "FedAvg", "0, 1", "0.400 ± 0.141", "0.400 ± 0.141", "3 to 3"]


def test_runs_without_validation_data_have_a_row(table_row):
    write_run("x", "0123abcd-s0", 0.25, split="test")
    assert table_row("x") == ["x", "FedAvg", "0", "-", "0.250", "3 to 3"]


def test_runs_of_several_settings_are_refused_with_their_hashes(refused):
    write_run("x", "0123abcd-s0")
    write_run("x", "4567abcd-s1")
    write_run("y", "0123abcd-s0")
    assert "runs/x: finished runs of one configuration" in refused("results_table", "y", "x")
    assert "found 0123abcd, 4567abcd" in refused("results_table", "x")


def test_a_table_has_the_metrics_that_are_asked_for(start, capsys):
    write_run("x", "0123abcd-s0", 0.25)
    start("results_table", "x", "test/accuracy", "test/mean_iou")
    header, _, row = capsys.readouterr().out.splitlines()
    assert (
        header == "| configuration | method | seeds | test/accuracy | test/mean_iou | seconds of training |"
    )
    assert row == "| x | FedAvg | 0 | 0.250 | - | 3 to 3 |"


def test_runs_of_several_lengths_are_refused(refused):
    write_run("x", "0123abcd-s0")
    write_run("x", "0123abcd-s1", rounds=3)
    assert "equally many rounds are needed, found 2, 3" in refused("results_table", "x")


def test_names_without_runs_are_refused(refused):
    assert "runs/nothing: " in refused("results_table", "nothing")
    assert "names of folders below runs/" in refused("results_table")
    assert "one of digits, cifar10_small, cifar10_small_fbn is needed, found nothing" in refused("figures")
    assert "found other" in refused("figures", "other")
    assert f"runs/{CURVES[0]}: " in refused("figures", "cifar10_small")


def test_figure_is_drawn_of_runs_of_one_configuration_each_and_of_no_others(start, refused):
    for name in CURVES:
        for seed in (0, 1, 2):
            write_run(name, f"0123abcd-s{seed}")
    start("figures", "cifar10_small")
    assert Path("docs/figures/cifar10_small.png").stat().st_size > 10_000
    stray = write_run(CURVES[1], "4567abcd-s0.2", 0.9)
    assert f"runs/{CURVES[1]}: finished runs of one configuration" in refused("figures", "cifar10_small")
    shutil.rmtree(stray)
    shutil.rmtree(f"runs/{CURVES[1]}/0123abcd-s2")
    assert "a finished run of seed 2 is needed, found 0, 1" in refused("figures", "cifar10_small")
    write_run(CURVES[1], "0123abcd-s2", split="test")
    assert "seed 2 has no val/accuracy" in refused("figures", "cifar10_small")


def test_the_gallery_has_a_study_between_its_comments_once_all_of_its_runs_are_done(start, tmp_path):
    for name in ("gallery.py", "generated.py", "methods_table.py"):
        shutil.copy(SCRIPTS / name, "docs/scripts")
    study = write_study(tmp_path / "runs")
    shutil.copytree(study, "table9-reduced")
    found = json.loads(Path("table9-reduced/study.json").read_text())
    page = "# Gallery\n\nWords.\n\n<!-- table9 -->\nold\n<!-- end of table9 -->\n\nMore words.\n"
    Path("docs/gallery.md").write_text(page)
    Path("table9-reduced/table.md").write_text("The table.\n")
    Path("table9-reduced/curves.png").write_bytes(b"curves")
    with pytest.raises(SystemExit, match=r"table9-reduced: cells/2/none-s1 is not done"):
        start("gallery", "table9-reduced")
    assert Path("docs/gallery.md").read_text() == page
    found["groups"][-1]["runs"].pop()
    Path("table9-reduced/study.json").write_text(json.dumps(found))
    start("gallery", "table9-reduced")
    written = Path("docs/gallery.md").read_text()
    assert written.startswith("# Gallery\n\nWords.\n\n<!-- table9 -->\n```text\n")
    assert written.endswith("<!-- end of table9 -->\n\nMore words.\n")
    assert "old" not in written
    assert "\nThe table.\n" in written
    assert f"({Path('figures/gallery/table9.png')})" in written
    assert Path("docs/figures/gallery/table9.png").read_bytes() == b"curves"
