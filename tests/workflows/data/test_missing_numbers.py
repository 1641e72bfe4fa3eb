"""What a missing number makes of the others of its column, against what stock makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.missing_numbers import MissingNumbers, columns_told_apart
from merlin_cowclip.workflows.data.new_rows import for_new_rows
from merlin_cowclip.workflows.data.raw_frames import fitted_columns
from merlin_cowclip.workflows.data.raw_rows import RawRows
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

    from merlin_cowclip.workflows.data.row_for_row import transformed

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
PLACE = Place(Path("raw"), 0, 0)
LOG = pd.DataFrame(
    {
        "item": np.arange(40) % 7,
        "small": (np.arange(40) % 5).astype("int8"),
        "price": np.arange(40) / 3,
        "age": np.arange(40) + 18,
        "genres": [[1, 2]] * 40,
        "truth": np.arange(40) % 3 == 0,
    }
)


class Held:
    """A workflow's columns, and what is misread of given ones."""

    def __init__(self, workflow, ids):
        self.new = for_new_rows(workflow)
        self.types = raw_types(workflow)
        self.numbers = MissingNumbers(self.types, columns_told_apart(workflow), ids)
        self.encodings = 0

    def encode(self, frame):
        self.encodings += 1
        out = transformed(self.new, frame)
        return pa.RecordBatch.from_pandas(out, preserve_index=False)

    def misread(self, frame, encode=None):
        found, fitted = fitted_columns(frame, self.types, PLACE)
        encoded = self.encode(found)
        self.encodings = 0
        of = self.numbers.misread(found, fitted, encoded, encode or self.encode)
        return None if of is None else of.column


def as_text(nodes):
    return nodes >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")


@pytest.fixture(scope="module")
def held(tmp_path_factory):
    home = tmp_path_factory.mktemp("ids")
    ids = (
        ["item"]
        >> ops.FillMissing()
        >> ops.Rename(postfix="_")
        >> ops.Categorify(out_path=str(home))
    )
    ages = ["age"] >> ops.FillMissing() >> ops.DifferenceLag("small")
    kept = ["genres", "truth"] >> ops.Categorify(out_path=str(home))
    workflow = nvt.Workflow(ids + as_text(["small"]) + ages + kept + ["price"])
    return Held(workflow.fit(nvt.Dataset(LOG)), ["item_", "genres", "truth"])


def test_what_is_misread(held):
    def misread(encode=None, **changes):
        return held.misread(LOG.assign(**changes), encode)

    with_none = LOG.where(LOG["age"] != 18 + 9)
    assert misread() is None
    floats, rows = LOG.assign(item=with_none["item"]), with_none["item"].notna().to_numpy()
    assert (
        held.encode(floats)["item_"]
        .filter(pa.array(rows))
        .equals(held.encode(LOG)["item_"].filter(pa.array(rows)))
    )
    assert misread(lambda frame: 1 / 0, item=with_none["item"]) is None  # known beforehand
    assert misread(age=with_none["age"]) is None  # of the rows beside it others depend in any case
    assert misread(small=with_none["small"]) == "small"


def test_beyond_the_type_of_the_fit(tmp_path):
    """Stock wraps 261 to 5, as an id and as a number."""
    log = LOG.assign(number=LOG["age"], kept=LOG["item"])
    reduced = ["item", "number"] >> ops.FillMissing() >> ops.ReduceDtypeSize()
    ids = reduced["item"] >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids + reduced["number"] + ["kept"]).fit(nvt.Dataset(log))
    rows = RawRows(workflow, ["item"], Held(workflow, ["item"]).encode)
    fitting = pd.DataFrame({"item": [5] * 4, "number": [5] * 4, "kept": [261] * 4})
    for name in ("item", "number"):
        words = f"Received: 261, of which int8, .* row 4 .* column '{name}'"
        with pytest.raises(UserError, match=words):
            rows.of_frame(fitting.assign(**{name: [5, -128, 127, 261]}), PLACE)
    assert len(rows.of_frame(fitting, PLACE)["item"]) == 4
