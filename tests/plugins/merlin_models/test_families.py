"""Each of Merlin's model families with our optimizer: see `contract.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf

from .contract import MODES, Built, check_saving, check_step
from .families import FAMILIES

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("graphs_as_traced")]
DOCUMENT = Path(__file__).parents[3] / "docs" / "optimizer.md"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.replace("`", ""))
def test_steps_and_saving(family, tmp_path, request):
    if family.name == "`DLRMModel`":
        request.getfixturevalue("graphs_rewritten")
    tf.keras.backend.clear_session()
    built = Built(family)
    for mode, eager in MODES:
        check_step(built, mode, eager)
    check_saving(built, tmp_path / "model")


def test_the_documentation_names_each_family():
    text = " ".join(DOCUMENT.read_text(encoding="utf-8").split("## Supported models")[1].split())
    assert [family.name for family in FAMILIES if family.name not in text] == []
