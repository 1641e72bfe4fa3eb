"""Links that GitHub follows from the pages' places in the repository lead to the site's pages.

The notebooks lie beside the workflows; in the site they are `notebooks/`, a link to their folder.
"""

from __future__ import annotations

from sphinx.application import Sphinx

NOTEBOOKS = "notebooks/"


def within_the_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Rewrite the links of a page as it is read."""
    if docname.startswith(NOTEBOOKS):
        source[0] = source[0].replace("](../../docs/", "](../")
    else:
        source[0] = source[0].replace("](../workflows/notebooks/", f"]({NOTEBOOKS}")


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", within_the_site)
    return {"parallel_read_safe": True}
