"""The documentation site: all internal links exist, and nothing is loaded from elsewhere."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from merlin_cowclip import models, plugins, workflows

from .conftest import DOCS, ROOT

pytestmark = pytest.mark.extended
NEEDED = {"script": "src", "img": "src", "source": "src", "iframe": "src", "link": "href"}


class Page(HTMLParser):
    """What a page links to, what it needs to be shown, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.needed: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {name for name in (given.get("id"), given.get("name")) if name}
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))
        if given.get(NEEDED.get(tag, "")):
            self.needed.append(str(given[NEEDED[tag]]))


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html") if "_static" not in path.parts}


def test_every_internal_link_exists(pages):
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
    assert checked > 500


def test_the_site_needs_no_network(pages, site):
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


def test_results_of_the_readme_are_those_of_the_guides():
    """A result in two places is the same number."""
    readme, *guides = (
        set(re.findall(r"\d[\d.]* ± [\d.]+", page.read_text(encoding="utf-8")))
        for page in (ROOT / "README.md", *DOCS.glob("*.md"))
    )
    assert readme <= set().union(*guides)
