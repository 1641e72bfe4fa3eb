"""Where a fit of Keras's takes callbacks, and one of a model's own."""

import pytest

from merlin_cowclip.plugins.fits import _with_callbacks


class Model:
    def keras(self, x, y=None, batch_size=None, epochs=1, verbose=0, callbacks=None, split=0): ...
    def second(self, x, callbacks=None): ...
    def named(self, *args, callbacks=None, **kw): ...
    def passed_on(self, *args, **kw): ...
    def none(self, x, epochs=1): ...


@pytest.mark.parametrize(
    ("fit", "given", "wanted"),
    [
        (Model.keras, ((1, 2), {}), ((1, 2), {"callbacks": ["new"]})),
        (Model.keras, ((1, 2), {"callbacks": "old"}), ((1, 2), {"callbacks": ["old", "new"]})),
        (Model.keras, ((1, 2, 3, 4, 5, "old", 7), {}), ((1, 2, 3, 4, 5, ["old", "new"], 7), {})),
        (Model.second, ((1, "old"), {}), ((1, ["old", "new"]), {})),
        (Model.named, ((1, 2), {"callbacks": "old"}), ((1, 2), {"callbacks": ["old", "new"]})),
        (Model.passed_on, ((1, 2), {"epochs": 3}), ((1, 2), {"epochs": 3, "callbacks": ["new"]})),
        (Model.none, ((1, 2), {}), ((1, 2), {})),
    ],
)
def test_they_are_changed_where_they_are(fit, given, wanted):
    change = lambda callbacks: [*([callbacks] if callbacks else []), "new"]  # noqa: E731
    assert _with_callbacks(fit, *given, change) == wanted
