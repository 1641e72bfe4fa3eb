"""None and NaN in columns of text, by what stock NVTabular makes of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.missing_numbers import columns_told_apart
from merlin_cowclip.workflows.data.missing_text import MissingText
from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.data.raw_frames import fitted_columns
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

    from merlin_cowclip.workflows.data.row_for_row import transformed

LOG = pd.DataFrame({"city": ["a", None, "b", "a"] * 5, "town": ["c", "d", None, "d"] * 5})


def as_text(names):
    return names >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")


@pytest.mark.parametrize("kind", ["None", "NaN"])
@pytest.mark.parametrize(
    ("told", "graph"),
    [
        (["city"], lambda: as_text(["city"]) + nvt.ColumnSelector(["town"])),
        (["city", "town"], lambda: as_text(["city", "town"])),
        ([], lambda: ["city", "town"] >> ops.FillMissing("")),
        ([], lambda: as_text(["city", "town"] >> ops.FillMissing(""))),
        ([], lambda: ["city", "town"] >> ops.LambdaOp(lambda c: c.str.upper(), dtype="str")),
    ],
)
def test_text_that_an_operator_tells_from_none(tmp_path, graph, told, kind):
    workflow = nvt.Workflow(graph() >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(LOG))

    def encode(frame: pd.DataFrame) -> pa.RecordBatch:
        return pa.RecordBatch.from_pandas(workflow.transform(frame), preserve_index=False)

    other = np.nan if kind == "NaN" else None
    frame = LOG.where(LOG.notna(), other)
    of_none = encode(LOG.where(LOG.notna(), None))
    differ = [name for name in LOG if encode(LOG.where(LOG.notna(), np.nan))[name] != of_none[name]]
    assert differ == told
    said = MissingText(
        raw_types(workflow), columns_told_apart(workflow), ["city", "town"]
    ).told_apart(frame, encode(frame), encode)
    if not told:
        assert said is None
        return
    for words in (*(repr(name) for name in told), f"taken as {kind}", "fill them in"):
        assert words in said
    filled = LOG.fillna("a")
    assert (
        MissingText(raw_types(workflow), columns_told_apart(workflow), told).told_apart(
            filled, encode(filled), encode
        )
        is None
    )


@pytest.mark.filterwarnings("ignore:Changing an NVTabular Dataset to CPU mode")
@pytest.mark.parametrize("kind", ["None", "NaN"])
def test_booleans_with_a_missing_one_are_told_apart_as_well(tmp_path, kind):
    """Looked up, and made text of: they are known for booleans, and stay as they are given."""
    log = pd.DataFrame({"flag": pd.Series([True, np.nan, False, None], dtype=object)})
    crossed = as_text(["flag"]) >> ops.Rename(name="cross")
    nodes = (["flag"] >> ops.Categorify(out_path=str(tmp_path / "0"))) + (
        crossed >> ops.Categorify(out_path=str(tmp_path / "1"))
    )
    workflow = name_types(nvt.Workflow(nodes).fit(nvt.Dataset(log)))

    def encode(frame: pd.DataFrame) -> pa.RecordBatch:
        return pa.RecordBatch.from_pandas(transformed(workflow, frame), preserve_index=False)

    missing = log["flag"].isna()
    given = log.assign(flag=log["flag"].where(~missing, np.nan if kind == "NaN" else None))
    types = raw_types(workflow)
    frame, _ = fitted_columns(given, types, Place(Path("raw"), 0, 0))
    found = encode(frame)
    assert found.equals(encode(given))
    said = MissingText(types, columns_told_apart(workflow), ["flag", "cross"]).told_apart(
        frame, found, encode
    )
    assert f"'flag', taken as {kind}" in said
