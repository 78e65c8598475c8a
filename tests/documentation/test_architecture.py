"""The page on the architecture is what the imports are."""

import re
from pathlib import Path

import house

import fl_lightning
from tests.support.pages import PAGES

PAGE = PAGES["docs/architecture.md"].read_text()
PACKAGE = Path(fl_lightning.__file__).parent


def levels():
    """The line of the picture, counted from above, that each package stands on."""
    picture = re.search(r"## The packages.*?```text\n(.*?)```", PAGE, re.DOTALL)[1]
    return {
        room: number
        for number, line in enumerate(picture.splitlines())
        for room in re.split(r"\s{3,}", line)[0].split()
    }


def names(room):
    return room.removeprefix("fl_lightning.").removeprefix("experiments.")


def test_every_package_imports_only_from_lines_below_its_own():
    level = levels()
    arrows = {
        names(room): {names(target) for target in targets}
        for room, targets in house.rooms(house.imports()).items()
    }
    upwards = [
        f"{room} -> {target}"
        for room, targets in arrows.items()
        for target in targets
        if room not in ("fl_lightning", "experiments")
        and target != "experiments"
        and level[target] <= level[room]
    ]
    assert upwards == []


def test_no_package_names_the_command_line_in_a_string():
    """Only the program's start does, to import a command when it is asked for."""
    files = {path.relative_to(PACKAGE): path.read_text() for path in PACKAGE.rglob("*.py")}
    naming = [str(path) for path, text in files.items() if re.search(r"[\"']fl_lightning\.cli\.", text)]
    assert [path for path in naming if not path.startswith("cli/")] == ["__main__.py"]


def test_the_picture_has_every_package():
    rooms = {names(room) for room in house.rooms(house.imports())} - {"fl_lightning", "experiments"}
    assert levels().keys() == rooms


def test_the_walker_sees_circles_and_what_they_are_not():
    assert house.circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert house.circles({"a": {"b"}, "b": set()}) == []


def test_the_walker_knows_imports_of_names():
    arrows = house.imports()
    assert "fl_lightning.errors" in arrows["fl_lightning.round.policy"]
    assert house.backward(arrows | {"fl_lightning.round.plan": {"fl_lightning.callbacks.fbn"}}) == [
        "fl_lightning.round.plan -> fl_lightning.callbacks.fbn"
    ]


def test_the_words_of_the_page_are_explained_once():
    table = PAGE[PAGE.index("## Vocabulary") :].split("\n\n")[1]
    words = [word.strip() for row in table.splitlines()[2:] for word in row.split("|")[1].split(",")]
    assert len(words) == len(set(words)) > 15
