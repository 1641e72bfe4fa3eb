"""The site is whole: every link within it leads somewhere, nothing comes from another place."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from merlin_cowclip import models, plugins, workflows

from .conftest import DOCS, ROOT, error_messages

pytestmark = pytest.mark.extended
NEEDED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}


class Page(HTMLParser):
    """What a page links to, what it needs to be shown, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.needed: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {name for name in (given.get("id"), given.get("name")) if name}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if given.get(NEEDED.get(tag, "")):
            self.needed.append(str(given[NEEDED[tag]]))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_every_link_within_the_site_leads_somewhere(pages):
    checked = 0
    for path, page in pages.items():
        for link in page.links + page.needed:
            split = urlsplit(link)
            if split.scheme in ("http", "https", "data"):
                continue
            target = (path.parent / unquote(split.path)).resolve() if split.path else path
            assert target.is_file(), (path.name, link)
            if split.fragment and target in pages:
                assert unquote(split.fragment) in pages[target].anchors, (path.name, link)
            checked += 1
    assert checked > 1000


def test_nothing_comes_from_elsewhere(pages, site):
    """Neither scripts nor styles, pictures or fonts: the site is read without the network."""
    for path, page in pages.items():
        assert not [needed for needed in page.needed if urlsplit(needed).netloc], path.name
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert "@import" not in text
        assert "url(http" not in text.replace('"', "").replace("'", "")


def test_every_public_name_has_a_page(site, pages):
    for package in (plugins, models, workflows):
        floor = package.__name__.rpartition(".")[2]
        for name in package.__all__:
            page = pages[site / f"api/names/{floor}.{name}.html"]
            (anchor,) = [a for a in page.anchors if a.endswith(f".{name}") and "merlin_" in a]
            assert anchor.startswith(f"merlin_cowclip.{floor}.")


def test_every_guide_and_notebook_has_a_page(pages, site):
    sources = [*DOCS.glob("*.md"), *(ROOT / "workflows/notebooks").glob("*.ipynb")]
    for source in sources:
        folder = site / "notebooks" if source.suffix == ".ipynb" else site
        assert folder / f"{source.stem}.html" in pages
    reached = {(path.parent / link).resolve() for path in pages for link in pages[path].links}
    assert {site / "why.html", site / "notebooks/04-study.html"} <= reached


def test_every_message_is_on_the_page(pages, site):
    text = pages[site / "troubleshooting.html"].text
    found = error_messages.messages()
    assert len(found) > 400
    assert not [message.text for message in found if message.text not in text]


def test_the_landing_page_has_the_readmes_table():
    """And its text: each number stands in two places, and is one."""
    pages = (ROOT / "README.md", DOCS / "index.md")
    readme, index = (page.read_text(encoding="utf-8") for page in pages)
    rows = re.findall(r"^\|.*±.*", readme, re.MULTILINE)
    assert len(rows) == 7
    assert rows == re.findall(r"^\|.*±.*", index, re.MULTILINE)
    assert readme.split("\n\n")[1] == index.split("\n\n")[1]
