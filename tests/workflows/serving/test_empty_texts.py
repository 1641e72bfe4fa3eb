"""What an empty text in a request is, of which a workflow knows more than a vocabulary tells."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from merlin_cowclip.workflows.data.raw_columns import name_types
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.serving.empty_texts import columns_that_hold_empty

with quiet_imports():
    import nvtabular as nvt
    from nvtabular import ops

LOWER = ops.LambdaOp(lambda column: column.str.lower())
TEXTS = {
    "that a vocabulary has": (["x", "Y", "", None], "vocabulary", True),
    "that no vocabulary has": (["x", "Y", "z", None], "vocabulary", False),
    "behind another operator": (["x", "Y", "", None], "lower", True),
    "that is hashed": (["x", "Y", "", "z"], "hash", True),
    "in lists": ([["x"], ["Y", ""], [], ["x"]], "vocabulary", True),
}


@pytest.mark.parametrize("case", TEXTS)
def test_an_empty_text(case, tmp_path):
    values, kind, expected = TEXTS[case]
    log = pd.DataFrame({"a": values * 50, "b": np.arange(200) % 5})
    log.to_parquet(tmp_path / "log.parquet")
    out = str(tmp_path / "fitted")
    made = {
        "vocabulary": ["a"] >> ops.Categorify(out_path=out),
        "lower": ["a"] >> LOWER >> ops.Categorify(out_path=out),
        "hash": ["a"] >> ops.HashBucket(50),
    }[kind]
    workflow = nvt.Workflow(made + (["b"] >> ops.Categorify(out_path=out)))
    workflow.fit(nvt.Dataset(str(tmp_path / "log.parquet"), engine="parquet"))
    fields = workflow.output_schema.column_names
    found = columns_that_hold_empty(name_types(workflow), fields)
    assert found - {"b"} == ({"a"} if expected else set())
