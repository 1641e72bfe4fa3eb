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
LENGTH = ops.LambdaOp(lambda column: column.str.len().astype("float64"))
TEXTS = {
    "that a vocabulary has": (["x", "Y", "", None], "vocabulary", True),
    "that no vocabulary has": (["x", "Y", "z", None], "vocabulary", False),
    "behind another operator": (["x", "Y", "", None], "lower", True),
    "unknown behind another operator": (["x", "Y", "z", None], "lower", False),
    "that is hashed": (["x", "Y", "", "z"], "hash", True),
    "that has a length": (["x", "Yy", "", "z"], "length", True),
    "unknown to a target's means as well": (["x", "Y", "z", None], "means", False),
    "that has no sale": (["a sale", "Y", "z", None], "contains", True),
    "beside what is by chance": (["x", "Y", "z", None], "chance", False),
    "in lists": ([["x"], ["Y", ""], [], ["x"]], "vocabulary", True),
    "in lists, of no vocabulary": ([["x"], ["Y", "z"], [], ["x"]], "vocabulary", False),
    "as bytes": ([b"x", b"Y", b"", None], "vocabulary", True),
    "of numbers, which have none": ([1.0, 2.0, 3.0, 4.0], "number", True),
    "past a filter": (["x", "Y", "", None], "filtered", True),
    "unknown, past a filter": (["x", "Y", "z", None], "filtered", False),
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
        "length": ["a"] >> LENGTH >> ops.FillMissing(-1.0),
        "means": (
            (["a"] >> ops.Categorify(out_path=out) >> ops.Rename(name="c"))
            + (["a"] >> ops.TargetEncoding(["b"], out_path=str(tmp_path / "means")))
        ),
        "contains": (
            ["a"]
            >> ops.LambdaOp(lambda c: c.str.contains("sale").astype("float64"))
            >> ops.FillMissing(-1.0)
        ),
        "chance": (
            (["a"] >> ops.Categorify(out_path=out))
            + (["b"] >> ops.LambdaOp(lambda c: c * np.random.rand()) >> ops.Rename(name="r"))
        ),
        "number": ["a"] >> ops.FillMissing(),
        "filtered": (["a", "b"] >> ops.Filter(lambda rows: rows[rows["b"] != 1]))["a"]
        >> LOWER
        >> ops.Categorify(out_path=out),
    }[kind]
    alone = kind == "filtered"  # else the rows beside would be others
    workflow = nvt.Workflow(made if alone else made + (["b"] >> ops.Categorify(out_path=out)))
    workflow.fit(nvt.Dataset(str(tmp_path / "log.parquet"), engine="parquet"))
    fields = workflow.output_schema.column_names
    found = columns_that_hold_empty(name_types(workflow), fields)
    assert found - {"b"} == ({"a"} if expected else set())
