"""The bar on stderr: what it shows of rows that catch up."""

from __future__ import annotations

import pytest

from merlin_cowclip.plugins import deferring
from merlin_cowclip.workflows import progress
from tests.plugins.test_deferred import trained


@pytest.mark.parametrize(
    ("show", "after", "shown"), [(True, 0.0, True), (True, 3.0, False), (False, 0.0, False)]
)
def test_catching_up_is_shown_where_it_takes_long(monkeypatch, capsys, show, after, shown):
    model = trained("deferred", 3)
    monkeypatch.setattr(progress, "_LONG", after)
    with progress.catching_up_shown(show=show):
        model.optimizer.catch_up()
    out, err = capsys.readouterr()
    assert not out
    assert ("catch up" in err and "100%" in err) is shown
    assert deferring._bar.get() is None
