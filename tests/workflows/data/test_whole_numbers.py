"""Numbers as a workflow read them at its fit, whatever a file or a request has them as."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.id_origins import Origin, RawValues, id_origins, raw_values
from merlin_cowclip.workflows.data.new_rows import for_new_rows
from merlin_cowclip.workflows.data.raw_columns import text_columns
from merlin_cowclip.workflows.data.whole_numbers import NotWhole, WholeNumbers
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag.ops.subgraph import Subgraph
    from nvtabular import ops

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
LOG = pd.DataFrame(
    {
        "item": np.arange(40) % 7,
        "small": (np.arange(40) % 5).astype("int8"),
        "price": np.arange(40) / 3,
        "age": np.arange(40) + 18,
        "genres": [[1, 2]] * 40,
    }
)


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    ids = (
        ["item"]
        >> ops.FillMissing()
        >> ops.Rename(postfix="_")
        >> ops.Categorify(out_path=str(tmp_path_factory.mktemp("ids")))
    )
    texts = ["small"] >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")
    ages = ["age"] >> ops.FillMissing() >> ops.DifferenceLag("small")
    as_they_are = ["price", "genres"] >> ops.AddMetadata()
    workflow = nvt.Workflow(ids + as_they_are + texts + ages)
    return workflow.fit(nvt.Dataset(LOG))


@pytest.fixture(scope="module")
def numbers(workflow):
    return WholeNumbers(workflow, ["item_", "genres"])


@pytest.mark.parametrize(
    ("column", "values", "kind"),
    [
        ("item", [1.0, 2.0], "int64"),
        ("item", pd.array([1.0, 2.0], "Float64"), "int64"),
        ("item", np.array([1, 2**24 - 1], "float32"), "int64"),
        ("item", np.array([1, 2**24], "float32"), "float32"),  # may have been 2^24 + 1
        ("item", [-1.0, 2.0**53 - 1], "int64"),
        ("item", [1.0, 2.0**53], "float64"),
        ("item", [1.0, np.nan], "float64"),
        ("item", [1.0, np.inf], "float64"),
        ("item", [1.0, 2.5], "float64"),
        ("item", np.array([1, 2], "int32"), "int32"),
        ("item", ["1", "2"], "object"),
        ("item", pd.Series([1.0, 3.7], dtype=object), "float64"),
        ("item", [Decimal("1"), Decimal("3.7")], "float64"),
        ("item", pd.Series([1.0, 3.7]).astype("category"), "float64"),
        ("item", pd.Series([1, None], dtype=object), "object"),
        ("price", pd.Series([1, None], dtype=object), "float64"),
        ("price", pd.array([1.0, None], "Float64"), "float64"),
        ("small", [1.0, 2.0], "int8"),
        ("small", [1.0, 200.0], "int64"),
        ("price", [1, 2], "float64"),
        ("price", [1.5, 2.5], "float64"),
        ("genres", [[1.0], [2.0, 3.0]], "object"),
    ],
)
def test_numbers_as_fitted(numbers, column, values, kind):
    frame = pd.DataFrame({column: values})
    found = numbers.as_fitted(frame)[column]
    assert found.dtype == kind
    if kind != "object":
        expected = pd.Series(map(as_float, frame[column]))
        np.testing.assert_array_equal(found.astype(float), expected)
    else:
        assert found.tolist() == frame[column].tolist()


def test_what_is_no_id(numbers):
    frame = pd.DataFrame({"item": [1.0, np.nan, 3.7, 2.0**53], "small": 1.5, "price": 1.5})
    assert numbers.not_whole(frame) == NotWhole("item", 2, 3.7)
    assert numbers.not_whole(frame[3:]) == NotWhole("item", 0, 2.0**53)
    assert numbers.not_whole(frame[:2]) is None
    assert numbers.not_whole(frame, {"item"}) is None


def as_float(value):
    return np.nan if pd.isna(value) else float(value)


def test_what_is_misread(workflow, numbers):
    def encode(frame):
        return pa.RecordBatch.from_pandas(workflow.transform(frame), preserve_index=False)

    def misread(**changes):
        frame = LOG.assign(**changes)
        return numbers.misread(frame, encode(frame), encode)

    with_none = LOG.where(LOG["age"] != 18 + 9)
    assert misread() is None
    assert misread(item=with_none["item"]) is None  # encoded alike, which is known beforehand
    floats, rows = LOG.assign(item=with_none["item"]), with_none["item"].notna().to_numpy()
    assert (
        encode(floats)["item_"]
        .filter(pa.array(rows))
        .equals(encode(LOG)["item_"].filter(pa.array(rows)))
    )
    assert numbers.misread(floats, encode(floats), lambda frame: 1 / 0) is None
    assert misread(age=with_none["age"]) is None  # of the rows beside it others depend in any case
    found = misread(small=with_none["small"])
    assert (found.column, found.among) == ("small", "missing one")
    found = misread(small=LOG["small"] + (LOG.index == 9) / 2)
    assert (found.column, found.among) == ("small", "fraction")
    found = misread(small=LOG["small"] + 2.0**60)
    assert (found.column, found.among) == ("small", "one of 2^53 or more")


def test_what_a_subgraph_reads(tmp_path):
    """As Merlin's examples of several stages have it: it was not looked into."""
    log = LOG.assign(name=[f"n{i % 6}" for i in range(40)])

    def ids(name):
        columns = [name] >> ops.Rename(postfix="_")
        encoded = columns >> ops.Categorify(out_path=str(tmp_path / name))
        inner = [name] >> Subgraph(f"inner {name}", encoded)
        return [name] >> Subgraph(f"outer {name}", inner)

    workflow = nvt.Workflow(ids("item") + ids("name")).fit(nvt.Dataset(log))
    numbers = WholeNumbers(workflow, ["item_", "name_"])
    frame = pd.DataFrame({"item": [1.0, 3.7], "name": ["n1", "n2"]})
    assert numbers.not_whole(frame) == NotWhole("item", 1, 3.7)
    assert text_columns(workflow) == {"name"}
    assert id_origins(workflow) == {"item_": Origin.VOCABULARY, "name_": Origin.VOCABULARY}
    assert raw_values(workflow) == {"item_": RawValues(), "name_": RawValues()}
    new = for_new_rows(workflow)
    missing = pd.DataFrame({"item": [1, 2], "name": [None, None]})
    assert new.transform(missing)["name_"].tolist() == [1, 1]
