"""What the pages refer to exists, and what they have from the code is the code's."""

import re

import generated
import pytest
from methods_table import FAMILIES

from fl_lightning import callbacks
from tests.support.pages import PAGES, ROOT, WRITTEN


def anchors(text):
    """Of the headings of a page, as GitHub and the HTML pages make them."""
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def links(path):
    """The targets inside the repository that a page links to."""
    plain = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", plain) if "://" not in link]


@pytest.mark.parametrize("name", WRITTEN)
def test_every_link_leads_somewhere(name):
    path = WRITTEN[name]
    for link in links(path):
        file, _, anchor = link.partition("#")
        target = path if not file else (path.parent / file).resolve()
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_the_readme_leads_to_every_page():
    linked = {link.partition("#")[0] for link in links(PAGES["README.md"])}
    assert sorted(set(PAGES) - linked - {"README.md", "docs/index.md"}) == []


@pytest.mark.parametrize(
    "words", [r"up to round {T\*}", r"{FixBN\*} also keeps", "a digest of the settings (`{48487f6a}`)"]
)
def test_the_readme_explains_a_term_where_it_first_stands(words):
    text = re.sub(r"!\[.*?\]|```.*?```", "", PAGES["README.md"].read_text(), flags=re.DOTALL)
    before, term, after = re.fullmatch("(.*){(.*)}(.*)", words).groups()
    assert text.index(term) == text.index(before + term + after) + len(before)


def test_the_list_of_pages_sends_readers_in_the_repository_to_the_readme():
    words = PAGES["docs/index.md"].read_text().partition("```")[0]
    assert "In the repository, read the\n[README](../README.md)" in words


def test_every_file_of_this_project_that_a_page_names_exists():
    named = {
        path
        for page in WRITTEN.values()
        for path in re.findall(
            r"`((?:configs|docs|tests|fl_lightning|callbacks|datamodules)/[\w/]+\.\w+)`", page.read_text()
        )
    } | {path for page in PAGES.values() for path in re.findall(r"configs/\w+\.yaml", page.read_text())}
    assert len(named) > 10
    assert sorted(path for path in named if not (ROOT / path).is_file() and path != "configs/mine.yaml") == []


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x == "methods" else x for x in generated.GENERATED]
)
def test_what_a_page_has_from_the_code_is_the_codes(name):
    file, make = generated.GENERATED[name]
    assert generated.between(name, PAGES[f"docs/{file}"].read_text()) == make()


def test_every_shipped_callback_is_listed_once():
    named = [name for names in FAMILIES.values() for name in names]
    assert sorted(named) == sorted(callbacks.__all__)
    page = PAGES["docs/methods.md"].read_text()
    families = [generated.between(name, page) for name in FAMILIES]
    assert [name for name in named if sum(f"\n| `{name}` | " in family for family in families) != 1] == []
