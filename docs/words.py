"""Print the words of each page, and its sentences that are long or have words readers stumble over.

make words
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent
PAGES = [DOCS.parent / "README.md", *sorted(DOCS.glob("**/*.md"))]
LONG = 30  # words of a sentence
BANNED = re.compile(
    r"\b(beside|alone|told|tells|goes on|gone on|of one's own|of its own|for ever|reckons?|whoever|"
    r"whatever|made-up|stand-ins?|watch(es)? over|to the last (bit|digit)|in shards|held to|"
    r"taken for|another one|that of|those of)\b",
    re.IGNORECASE,
)


def sentences(text: str) -> list[str]:
    """Sentences of paragraphs and list items; without code, tables and headings."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]{1,300}`", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    prose = [" ".join(b.split()) for b in blocks if not b.lstrip().startswith(("#", "|", ">"))]
    return [one for block in prose for one in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*])", block)]


for page in PAGES:
    text = page.read_text(encoding="utf-8")
    print(f"{len(text.split()):6,} {page.relative_to(DOCS.parent)}")
    for sentence in sentences(text):
        if len(sentence.split()) > LONG:
            print(f"       {len(sentence.split())} words: {sentence}")
        for match in BANNED.finditer(sentence):
            print(f"       {match[0]!r}: {sentence}")
