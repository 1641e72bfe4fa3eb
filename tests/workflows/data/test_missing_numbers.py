"""What a missing number makes of the others of its column, against what stock makes of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.id_origins import Origin, RawValues, id_origins, raw_values
from merlin_cowclip.workflows.data.missing_numbers import MissingNumbers, columns_told_apart
from merlin_cowclip.workflows.data.new_rows import for_new_rows
from merlin_cowclip.workflows.data.raw_frames import fitted_columns
from merlin_cowclip.workflows.data.raw_rows import RawRows
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.errors import Notice, UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag.ops.subgraph import Subgraph
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


def test_booleans_beside_a_missing_one(tmp_path):
    """Objects to pandas, of which ~ makes -1 and -2."""
    others = ["truth"] >> ops.LambdaOp(lambda c: (~c.where(c.notna(), False)).astype(str))
    ids = others >> ops.Categorify(out_path=str(tmp_path))
    held = Held(nvt.Workflow(ids).fit(nvt.Dataset(LOG)), ["truth"])
    assert held.misread(LOG) is None
    assert held.misread(LOG.assign(truth=LOG["truth"].astype(object).where(LOG.index != 9))) == (
        "truth"
    )


def test_lists_and_large_numbers_with_a_missing_one(tmp_path):
    """pandas makes floats of all of them. Stock Categorify takes none."""
    lists = LOG.assign(genres=[[1, None], [2, 1]] * 20)
    sums = ["genres"] >> ops.LambdaOp(lambda column: column.map(str), dtype="str")
    text = sums >> ops.Categorify(out_path=str(tmp_path / "text"))
    workflow = nvt.Workflow(text).fit(nvt.Dataset(LOG))
    assert Held(workflow, ["genres"]).misread(lists) == "genres"
    assert Held(workflow, ["genres"]).misread(LOG) is None
    large = 2**60 + np.arange(40) % 7
    log = LOG.assign(item=large)
    ids = ["item"] >> ops.Categorify(out_path=str(tmp_path / "large"))
    held = Held(nvt.Workflow(ids).fit(nvt.Dataset(log)), ["item"])
    assert held.misread(log.assign(item=log["item"].astype("Int64").mask(log.index == 9))) == "item"


def test_the_sentence(tmp_path):
    workflow = nvt.Workflow(as_text(["small", "truth"]) >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(LOG))
    held = Held(workflow, ["small", "truth"])
    rows = RawRows(workflow, ["small", "truth"], held.encode)
    rows.of_frame(LOG, PLACE)
    words = "column 'small', int8, must have no missing one, .* one in raw, row group 0, 40 rows f"
    with pytest.raises(
        UserError, match=f"{words}rom row 1 on, .* floats .* of 7.0 .* Fill it in, or"
    ):
        rows.of_frame(LOG.assign(small=LOG["small"].where(LOG.index != 9)), PLACE)


def test_beyond_the_type_of_the_fit(tmp_path):
    """Stock wraps 261 to 5, as an id and as a number."""
    log = LOG.assign(number=LOG["age"], kept=LOG["item"])
    reduced = ["item", "number"] >> ops.FillMissing() >> ops.ReduceDtypeSize()
    ids = reduced["item"] >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids + reduced["number"] + ["kept"]).fit(nvt.Dataset(log))
    held = Held(workflow, ["item"])
    rows = RawRows(workflow, ["item"], held.encode)
    fitting = pd.DataFrame({"item": [5] * 4, "number": [5] * 4, "kept": [261] * 4})
    for name in ("item", "number"):
        for values, row in (([5, -128, 127, 261], 3), ([5, -129, 127, 128], 1), ([255] * 4, 0)):
            words = (
                f"ReduceDtypeSize gave .* Received: {values[row]}, of which int8, -128 to 127, "
                f"makes another in raw, row group 0, row {row + 1} .* column '{name}'"
            )
            with pytest.raises(UserError, match=words):
                rows.of_frame(fitting.assign(**{name: values}), PLACE)
    assert len(rows.of_frame(fitting, PLACE)["item"]) == 4


def test_beyond_the_type_of_the_fit_behind_another_operator(tmp_path):
    """3 · 50 is -106 in an int8, as an id and as a number; and so it is within a subgraph."""
    log = pd.DataFrame({"a": np.arange(40) % 3, "b": np.arange(40) / 3})
    reduced = ["a"] >> ops.LambdaOp(lambda column: column * 50) >> ops.ReduceDtypeSize()
    inner = ["a"] >> Subgraph("inner", reduced)
    for nodes in (reduced, inner):
        workflow = nvt.Workflow(nodes + ["b"]).fit(nvt.Dataset(log))  # noqa: RUF005  (a graph)
        rows = RawRows(workflow, [], Held(workflow, []).encode)
        assert rows.of_frame(log, PLACE)["a"].to_pylist() == (log["a"] * 50).tolist()
        words = "Received: 150, of which int8, .* row 3 of the file, column 'a'"
        with pytest.raises(UserError, match=words):
            rows.of_frame(pd.DataFrame({"a": [1, 2, 3], "b": 1.0}), PLACE)


PARTS = {
    "one missing in the first": ([None, 1, 2, 3, 1, 2] * 4, [1, 2, 3, 3, 2, 1] * 4),
    "one missing later": ([1, 2, 3, 3, 2, 1] * 4, [None, 1, 2, 3, 1, 2] * 4),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("is_told", [True, False])
def test_files_of_a_fit_that_had_numbers_otherwise(tmp_path, parts, is_told):
    """Of its schema the first rows' are known alone; the very rows of the fit had other ids."""
    for i, part in enumerate(parts):
        pq.write_table(pa.table({"u": pa.array(part)}), tmp_path / f"{i}.parquet")
    files = [str(tmp_path / f"{i}.parquet") for i in range(2)]
    nodes = as_text(["u"]) if is_told else ["u"] >> ops.Clip(min_value=2)
    ids = nodes >> ops.Categorify(out_path=str(tmp_path / "ids"))
    workflow = nvt.Workflow(ids).fit(nvt.Dataset(files, engine="parquet"))
    rows = RawRows(workflow, ["u"], Held(workflow, ["u"]).encode)
    whole = pq.read_table(files[0 if None not in parts[0] else 1])["u"].chunk(0)
    if not is_told:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Notice)
            rows.of_columns({"u": whole}, PLACE)
        return
    words = "one input of column 'u' as .*, and another of .* as at the fi"
    with pytest.warns(Notice, match=words):
        rows.of_columns({"u": whole}, PLACE)
    if parts[0][0] is None:  # floats at the first rows: beside a missing one, too
        with pytest.warns(Notice, match=words):
            RawRows(workflow, ["u"], Held(workflow, ["u"]).encode).of_columns(
                {"u": pa.concat_arrays([whole, pa.nulls(1, pa.int64())])}, PLACE
            )
    with warnings.catch_warnings():
        warnings.simplefilter("error", Notice)
        rows.of_columns({"u": whole}, PLACE)  # it was told


def test_what_is_told_of_several_columns(tmp_path):
    """Each by itself, whatever the others are read by; and what an operator takes no floats of not.

    A batch that is refused tells of nothing, and keeps nothing from being told.
    """
    log = pd.DataFrame({name: np.arange(40) % 7 for name in ["a", "b", "bits", "sum", "unsure"]})
    log["unsure"] = log["unsure"].where(log.index != 3)
    log["lists"] = [[i % 7, 3] for i in range(40)]
    first = ops.LambdaOp(lambda column: column.map(lambda one: str(one[0])), dtype="str")
    both = ops.LambdaOp(
        lambda column, frame: (column + frame["unsure"]).astype(str), dependency=["unsure"]
    )
    texts = as_text(["a", "b"]) + (["lists"] >> first) + (["sum"] >> both)
    texts = texts >> ops.Categorify(out_path=str(tmp_path))
    bits = ["bits"] >> ops.LambdaOp(lambda column: column & 1)
    workflow = nvt.Workflow(texts + bits).fit(nvt.Dataset(log))
    rows = RawRows(workflow, ["a", "b", "lists", "sum"], Held(workflow, []).encode)
    lacking = log.assign(a=log["a"].where(log.index != 5))
    with pytest.raises(UserError, match="column 'a', int64, must have no missing one"):
        rows.of_frame(lacking, PLACE)
    with pytest.warns(Notice) as told:
        rows.of_frame(log.assign(unsure=3), PLACE)
    columns = [str(one.message).split("column ")[1].split(",")[0] for one in told]
    assert columns == [
        "'a' as int64",
        "'b' as int64",
        "'lists' as lists of int64",
        "'unsure' as float64",
    ]


def test_lists_of_booleans_of_which_one_is_missing(tmp_path):
    lists = ["lists"] >> ops.LambdaOp(lambda column: column.map(str), dtype="str")
    log = pd.DataFrame({"lists": [[True, False], [True]] * 20})
    workflow = nvt.Workflow(lists >> ops.Categorify(out_path=str(tmp_path)))
    rows = RawRows(workflow.fit(nvt.Dataset(log)), ["lists"], Held(workflow, []).encode)
    assert len(rows.of_frame(pd.DataFrame({"lists": [None, [True]]}), PLACE)) == 2


def test_small_integers_that_an_operator_wraps(tmp_path):
    """NormalizeMinMax subtracts within an int8: beside a missing one 100 was another number."""
    log = pd.DataFrame({"small": np.arange(-60, -40, dtype="int8")})
    workflow = nvt.Workflow(["small"] >> ops.NormalizeMinMax()).fit(nvt.Dataset(log))
    given = pd.DataFrame({"small": [100, -50, None]})
    assert Held(workflow, []).misread(given) == "small"
    assert Held(workflow, []).misread(given.dropna()) is None


CROSSED = ["first", "second", "third"]


def test_what_is_misread_together(tmp_path):
    """Of two columns that lack a row, one made whole alone makes 7_8.0, as unknown as 7.0_8.0.

    26 columns, each made whole alone, took 31 times as long.
    """
    log = pd.DataFrame({name: np.arange(40) % 7 + i for i, name in enumerate(CROSSED)})

    def crossed(column, frame):
        return column.astype(str) + "_" + frame["second"].astype(str)

    texts = ["first"] >> ops.LambdaOp(crossed, dependency=["second"], dtype="str")
    ids = texts >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids + (["third"] >> ops.LambdaOp(lambda column: column * 2)))
    workflow.fit(nvt.Dataset(log))
    held = Held(workflow, ["first"])

    def misread(*lacking):
        frame = log.copy()
        for row, names in enumerate(lacking):
            frame[names] = frame[names].astype(float)
            frame.loc[row, names] = np.nan
        return held.misread(frame)

    assert misread(["first", "second"]) == "first"
    assert misread(["first"], ["second"]) == "first"
    assert misread(["second"]) == "second"
    assert misread(["third"]) is None
    assert held.encodings == 1
    many = [f"n{i}" for i in range(26)]
    doubled = many >> ops.LambdaOp(lambda column: column * 2)
    log = pd.DataFrame({name: np.arange(40) % 7 for name in many})
    workflow = nvt.Workflow(doubled).fit(nvt.Dataset(log))
    held = Held(workflow, [])
    assert misread(*([name] for name in many)) is None  # another row each
    assert held.encodings == 2


def test_what_a_subgraph_reads(tmp_path):
    """As Merlin's examples of several stages have it: it was not looked into."""
    log = LOG.assign(name=[f"n{i % 6}" for i in range(40)])

    def ids(name):
        columns = [name] >> ops.Rename(postfix="_")
        encoded = columns >> ops.Categorify(out_path=str(tmp_path / name))
        inner = [name] >> Subgraph(f"inner {name}", encoded)
        return [name] >> Subgraph(f"outer {name}", inner)

    workflow = nvt.Workflow(ids("item") + ids("name")).fit(nvt.Dataset(log))
    kinds = {name: one.kind for name, one in raw_types(workflow).items()}
    assert kinds == {"item": pa.int64(), "name": pa.string()}
    assert id_origins(workflow) == {"item_": Origin.VOCABULARY, "name_": Origin.VOCABULARY}
    assert raw_values(workflow) == {"item_": RawValues(), "name_": RawValues()}
    new = for_new_rows(workflow)
    missing = pd.DataFrame({"item": [1, 2], "name": [None, None]})
    assert new.transform(missing)["name_"].tolist() == [1, 1]


def test_a_number_in_place_of_a_missing_one_refuses_nothing():
    """The 7 that stood in the second row for a missing one was dropped by the Filter: a >= b."""
    log = pd.DataFrame({"a": np.arange(40) % 7 + 1, "b": np.arange(40) % 7 + 8})
    kept = list(log) >> ops.Filter(lambda frame: frame[~(frame["a"] >= frame["b"])])
    filled = kept >> ops.FillMissing()
    workflow = nvt.Workflow(filled >> ops.Normalize()).fit(nvt.Dataset(log))
    frame = pd.DataFrame({"a": [7, None, 2], "b": [9, 5, 4]})
    assert Held(workflow, []).misread(frame) is None
    texts = filled >> ops.LambdaOp(lambda column: column.astype(str).str.len(), dtype=np.int64)
    workflow = nvt.Workflow(texts).fit(nvt.Dataset(log))
    assert Held(workflow, []).misread(frame) == "a"


NOTHING = [
    pd.Series([None, None], dtype=object),
    pd.Series([np.nan, np.nan]),
    pd.array([None, None], "Int64"),
    pd.array([None, None], "boolean"),
    pd.Series([None, None], dtype="category"),
    pd.Series([None, None], dtype=pd.ArrowDtype(pa.int64())),
]


@pytest.mark.parametrize("values", NOTHING)
@pytest.mark.parametrize("is_text", [False, True])
def test_a_column_of_nothing_is_one_whatever_its_type(tmp_path, values, is_text):
    """Filled in, 0 is an id and 0.0 is none."""
    nodes = ["item"] >> ops.FillMissing(0)
    nodes = as_text(nodes) if is_text else nodes
    workflow = nvt.Workflow(nodes >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(LOG))
    frame = pd.DataFrame({"item": values})
    assert Held(workflow, ["item"]).misread(frame) == ("item" if is_text else None)
