"""The house: no import goes round in a circle or back up, and no room grows without anybody deciding so."""

import house


def test_no_files_and_no_packages_import_each_other_in_a_circle():
    arrows = house.imports()
    assert house.circles(arrows) == []
    assert house.circles(house.rooms(arrows)) == []


def test_the_core_knows_no_experiments_methods_or_data_sets():
    assert house.backward(house.imports()) == []


def test_an_import_for_types_alone_would_close_a_circle(tmp_path, monkeypatch):
    package = tmp_path / "fl_lightning"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("def f():\n    from fl_lightning import two\n")
    (package / "two.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fl_lightning.one import f\n"
    )
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.circles(house.imports()) == [["fl_lightning.one", "fl_lightning.two"]]
    (package / "two.py").write_text(
        "from fl_lightning.callbacks.fbn import FBN\nimport fl_lightning.experiments.run\n"
    )
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "fbn.py").write_text("FBN = 1\n")
    (package / "experiments").mkdir()
    (package / "experiments" / "run.py").write_text("from fl_lightning.callbacks.fbn import FBN\n")
    assert house.circles(house.imports()) == []
    assert house.backward(house.imports()) == [
        "fl_lightning.experiments.run -> fl_lightning.callbacks.fbn",
        "fl_lightning.two -> fl_lightning.callbacks.fbn",
        "fl_lightning.two -> fl_lightning.experiments.run",
    ]


def test_a_method_imports_public_packages_only():
    """A copied method depends on names that packages export, never on the file in which they lie."""
    private = [
        f"{module} -> {target}"
        for module, targets in house.written_imports("callbacks").items()
        for target in sorted(targets)
        if target.startswith("fl_lightning.")
        and not target.startswith("fl_lightning.callbacks.")
        and target.count(".") > 1
    ]
    assert private == []


def test_most_files_are_read_at_one_sitting():
    assert float(house.figures()["median file"]) <= 120
