"""README and guides: length, short sentences, and no words that readers stumble over."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest

from .conftest import DOCS, FENCE, ROOT

LISTED = {"benchmarks", "changelog", "contributing", "glossary", "limitations", "security"}
GUIDES = [page for page in sorted(DOCS.glob("*.md")) if page.stem not in LISTED]
PLAIN = [ROOT / "README.md", *GUIDES, DOCS / "benchmarks.md", DOCS / "limitations.md"]
PLAIN += sorted(DOCS.glob("internals/*.md"))
MEAN_WORDS, LONG, SHARE_LONG = 18, 30, 0.05
BANNED = re.compile(
    r"\b(beside|alone|told|tells|goes on|gone on|of one's own|of its own|for ever|reckons?|whoever|"
    r"whatever|made-up|stand-ins?|watch(es)? over|to the last (bit|digit)|in shards|held to|"
    r"taken for|another one|that of|those of)\b",
    re.IGNORECASE,
)


def sentences(text: str) -> list[str]:
    """Sentences of the paragraphs and list items of a page; without code, tables and headings."""
    text = re.sub(r"<!--.*?-->", "", FENCE.sub("", text), flags=re.DOTALL)
    text = re.sub(r"`[^`]{1,300}`", "`code`", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if not block.lstrip().startswith(("#", "|", ">", "[!")):
            found += re.split(r"(?<=[.!?])\s+(?=[A-Z`*\[])|:\n?$", " ".join(block.split()))
    return [one for one in found if len(one.split()) > 2]


@pytest.mark.parametrize("page", PLAIN, ids=lambda page: page.stem)
def test_sentences_are_short_and_words_are_plain(page):
    found = sentences(page.read_text(encoding="utf-8"))
    lengths = [len(one.split()) for one in found] or [0]
    banned = [f"{match[0]!r}: {one}" for one in found for match in BANNED.finditer(one)]
    assert not banned, "\n".join(banned)
    long = [one for one, words in zip(found, lengths, strict=False) if words > LONG]
    assert len(long) <= max(1, SHARE_LONG * len(found)), "\n".join(long)
    assert statistics.mean(lengths) <= MEAN_WORDS


def words(page: Path) -> int:
    return len(re.findall(r"\S*\w\S*", page.read_text(encoding="utf-8")))


def test_the_readme_is_short():
    assert words(ROOT / "README.md") <= 550


def test_the_check_finds_what_it_looks_for():
    page = "# Title\n\nA [link](x.md) beside\nanother.\n\n| a | table |\n\n```\ncode\n```\n"
    (one,) = sentences(page)
    assert one == "A link beside another."
    assert BANNED.search(one)
