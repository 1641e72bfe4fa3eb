"""Numbers as a workflow read them at its fit, whatever a file or a request has them as."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.id_origins import Origin, RawValues, id_origins, raw_values
from merlin_cowclip.workflows.data.new_rows import for_new_rows
from merlin_cowclip.workflows.data.raw_columns import text_columns
from merlin_cowclip.workflows.data.refused_numbers import (
    Beyond,
    Narrowed,
    NotBoolean,
    NotWhole,
    Rounded,
    Uneven,
)
from merlin_cowclip.workflows.data.whole_numbers import WholeNumbers
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    import nvtabular as nvt
    from merlin.dag.ops.subgraph import Subgraph
    from nvtabular import ops

    from merlin_cowclip.workflows.data.row_for_row import transformed

pytestmark = pytest.mark.filterwarnings("ignore:(Initializ|Chang)ing an NVTabular Dataset")
LOG = pd.DataFrame(
    {
        "item": np.arange(40) % 7,
        "small": (np.arange(40) % 5).astype("int8"),
        "price": np.arange(40) / 3,
        "ratio": (np.arange(40) / 10).astype("float32"),
        "score": np.arange(40) / 10,
        "scores": [[0.1, 0.2]] * 40,
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
    as_they_are = ["price"] >> ops.AddMetadata()
    kept = ["ratio", "score", "genres", "scores"]
    as_they_are += kept >> ops.Categorify(out_path=str(tmp_path_factory.mktemp("kept")))
    workflow = nvt.Workflow(ids + as_they_are + texts + ages)
    return workflow.fit(nvt.Dataset(LOG))


@pytest.fixture(scope="module")
def numbers(workflow):
    return WholeNumbers(
        workflow,
        ["item_", "ratio", "score", "genres", "scores"],
        workflow.output_schema.column_names,
    )


TRUTHS = [True, False, True]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (TRUTHS, TRUTHS),
        ([1, 0, 1], TRUTHS),
        (np.array([1, 0, 1], "int8"), TRUTHS),
        ([1.0, -0.0, 1.0], TRUTHS),
        (pd.Series([1, 0, 1], dtype=object), TRUTHS),
        (pd.array([1, 0, 1], "UInt8"), TRUTHS),
        (pd.array(TRUTHS, "boolean"), TRUTHS),
        (pd.Series(TRUTHS).astype("category"), TRUTHS),
        (pd.Series([1, 0, 1]).astype("category"), TRUTHS),
        ([1.0, np.nan, 0.0], [True, None, False]),
        (pd.array([1, None, 0], "Int64"), [True, None, False]),
        (pd.array([True, None, False], "boolean"), [True, None, False]),
        (pd.Series([True, None, False], dtype=object), [True, None, False]),
        ([None, None, None], [None, None, None]),
    ],
)
@pytest.mark.filterwarnings("error")
def test_booleans_as_fitted(tmp_path, values, expected):
    """Of 1 an operator makes other text than of True; Categorify one id of both."""
    flags = pd.DataFrame({"flag": TRUTHS * 10, "user": np.arange(30)})
    texts = ["flag"] >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")
    ids = texts >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids).fit(nvt.Dataset(flags))
    numbers = WholeNumbers(workflow, ["flag"], ["flag"])
    found = numbers.as_fitted(pd.DataFrame({"flag": values}))
    assert found["flag"].tolist() == expected
    assert found["flag"].dtype == (object if None in expected else bool)
    assert numbers.no_id(found) is None
    of_true, of_false = transformed(workflow, flags)["flag"][:2]
    ids = {True: of_true, False: of_false, None: 2}  # "None" is an unknown one
    assert transformed(workflow, found)["flag"].tolist() == [ids[value] for value in expected]
    for other in (2, 0.5, -1):
        frame = numbers.as_fitted(pd.DataFrame({"flag": [1, None, other]}))
        assert numbers.no_id(frame) == NotBoolean("flag", 2, other)
    as_read = [True, np.nan, False], [np.nan] * 3, pd.Series([np.nan] * 3, dtype=object)
    for given in as_read:  # by pandas.read_csv
        found = numbers.as_fitted(pd.DataFrame({"flag": given}))["flag"]
        assert found.dtype == object
        assert found[1] is not None


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
        ("item", np.array([1, 2], "int32"), "int64"),  # in which an operator may overflow
        ("item", np.array([1, 2**63 - 1], "uint64"), "int64"),
        ("item", np.array([1, 2**63], "uint64"), "uint64"),
        ("item", pd.array([1, 2], "Int8"), "int64"),
        ("item", pd.array([1, None], "Int8"), "Int64"),
        ("item", pd.array([1.0, 2**24], "Float32"), "float32"),
        ("item", ["1", "2"], "object"),
        ("item", pd.Series([1.0, 3.7], dtype=object), "float64"),
        ("item", [Decimal("1"), Decimal("3.7")], "float64"),
        ("item", pd.Series([1.0, 3.7]).astype("category"), "float64"),
        ("item", pd.Series([1, None], dtype=object), "float64"),
        ("small", pd.Series([1, None], dtype=object), "float64"),
        ("small", pd.Series([1, 2, None], dtype=object).astype("category"), "float64"),
        ("item", pd.Series([True, None], dtype=object), "float64"),
        ("item", pd.array([True, None], "boolean"), "float64"),
        ("item", pd.array([None, None], "boolean"), "float64"),
        ("price", pd.array([None, None], "boolean"), "float64"),
        ("small", pd.array([True, False], "boolean"), "int8"),
        ("price", pd.Series([True, None], dtype=object), "float64"),
        ("price", pd.Series([True, None], dtype=object).astype("category"), "float64"),
        ("price", pd.array([True, False], "boolean"), "float64"),
        ("price", pd.Series([None, None], dtype=object), "float64"),
        ("price", pd.Series([None, None], dtype=object).astype("category"), "float64"),
        ("price", pd.Series([1, None], dtype=object), "float64"),
        ("price", pd.array([1.0, None], "Float64"), "float64"),
        ("small", [1.0, 2.0], "int8"),
        ("small", [1.0, 200.0], "int64"),
        ("small", [1, 100], "int8"),
        ("small", [True, False], "int8"),
        ("item", [True, False], "int64"),
        ("small", [1, 200], "int64"),
        ("price", np.array([0.1, 2], "float32"), "float64"),  # no id
        ("ratio", [0.1, 1e300], "float32"),
        ("ratio", [1, 2], "float32"),
        ("score", np.array([0.5, 7, np.nan], "float32"), "float64"),
        ("score", np.array([0.1, 7], "float32"), "float32"),
        ("price", [1, 2], "float64"),
        ("price", [1.5, 2.5], "float64"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_numbers_as_fitted(numbers, column, values, kind):
    frame = pd.DataFrame({column: values})
    found = numbers.as_fitted(frame)[column]
    assert found.dtype == kind
    if kind != "object":
        expected = pd.Series(map(as_float, frame[column]))
        if column == "ratio":
            expected = expected.map(lambda value: np.inf if value > 1e38 else np.float32(value))
        np.testing.assert_array_equal(found.map(as_float), expected)
    else:
        assert found.tolist() == frame[column].tolist()


@pytest.mark.parametrize(
    ("column", "values", "kind"),
    [
        ("genres", [[1.0], [2.0, 3.0]], "int64"),
        ("genres", [np.array([1.0, 2.0]), np.array([3.0, 4.0])], "int64"),
        ("genres", [np.array([1], "int8"), np.array([], "int8")], "int64"),
        ("genres", [np.array([1.0]), None, np.array([])], "int64"),
        ("genres", [np.array([1.0, np.nan]), np.array([2.0])], "float64"),
        ("genres", [np.array([1.5]), np.array([2.0])], "float64"),
        ("scores", [np.array([1]), np.array([2])], "float64"),
        ("scores", [np.array([0.5], "float32")], "float64"),
        ("scores", [np.array([0.1], "float32")], "float32"),
    ],
)
def test_lists_of_numbers_as_fitted(numbers, column, values, kind):
    frame = pd.DataFrame({column: pd.Series(values, index=range(5, 5 + len(values)))})
    found = numbers.as_fitted(frame)
    assert found.index.equals(frame.index)
    for one, given in zip(found[column], values, strict=True):
        if given is None:
            assert one is None
        else:
            assert one.dtype == kind
            np.testing.assert_array_equal(one, given)


def test_what_is_no_id(numbers):
    frame = pd.DataFrame({"item": [1.0, np.nan, 3.7, 2.0**53], "small": 1.5, "price": 1.5})
    assert numbers.no_id(frame) == NotWhole("item", 2, 3.7)
    assert numbers.no_id(frame[3:]) == NotWhole("item", 0, 2.0**53)
    assert numbers.no_id(frame[:2]) is None
    assert numbers.no_id(frame, {"item"}) is None


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([[1.0], None, [2.0, 1.7]], NotWhole("genres", 2, 1.7)),
        ([np.array([1.0, 2.0]), np.array([1.0, 1.7])], NotWhole("genres", 1, 1.7)),
        ([np.array([1.0, np.nan]), np.array([2.0**53])], NotWhole("genres", 1, 2.0**53)),
        ([np.array([1.0, np.nan]), np.array([2.0])], None),
        ([[], [Decimal("1.7")]], NotWhole("genres", 1, 1.7)),
        ([["1"], ["1.7"]], None),  # another type, which is refused elsewhere
    ],
)
def test_what_is_no_id_in_lists(numbers, given, found):
    """Stock takes 1.7 for 1."""
    assert numbers.no_id(numbers.as_fitted(pd.DataFrame({"genres": given}))) == found


def test_float32_where_ids_are_float64(numbers):
    """0.1 is another number, of which stock makes the unknown id; 0.5 and 7 are the same."""
    of = [0.5, np.nan, 7.0, 0.1]
    frame = pd.DataFrame({"price": of, "ratio": of, "score": of}, dtype="float32")
    as_float32 = float(np.float32(0.1))
    assert numbers.no_id(numbers.as_fitted(frame)) == Narrowed("score", 3, as_float32)
    assert numbers.no_id(numbers.as_fitted(frame[:3])) is None
    large = numbers.as_fitted(pd.DataFrame({"score": np.array([2**24], "float32")}))
    assert numbers.no_id(large) == Narrowed("score", 0, 2.0**24)  # may have been 2^24 + 1
    lists = pd.DataFrame({"scores": [np.array([], "float32"), np.array([0.5, 0.1], "float32")]})
    found = numbers.no_id(numbers.as_fitted(lists))
    assert found == Narrowed("scores", 1, as_float32)
    words = "0.1 as a float32, which is 0.10000000149011612, in raw, row group 0, row 2 of the file"
    with pytest.raises(UserError, match=words):
        found.refuse(Place(Path("raw"), 0, 0))


def test_float32_of_which_ids_are_made(tmp_path):
    """Of 0.1 another hash and another text than of the float64, which was another id in silence."""
    texts = ops.LambdaOp(lambda column: column.astype(str), dtype="str")
    made = ["score"] >> ops.HashBucket(50) >> ops.Rename(postfix="_hashed")
    made += ["price"] >> ops.Bucketize({"price": [0.5, 2.1]}) >> ops.Rename(postfix="_cut")
    made += ["price"] >> ops.Normalize() >> ops.Rename(postfix="_scaled")  # near 0 here and there
    made += ["item"] >> texts >> ops.Categorify(out_path=str(tmp_path))
    log = pd.DataFrame(
        {name: np.arange(40) % 7 / 10 for name in ("score", "item", "price", "number")}
    )
    workflow = nvt.Workflow(made + (["number"] >> ops.Normalize())).fit(nvt.Dataset(log))
    ids = ["score_hashed", "price_cut", "item"]
    numbers = WholeNumbers(workflow, ids, [*ids, "number", "price_scaled"])

    encode = encoder(workflow)

    def misread(**changes):
        frame = numbers.as_fitted(log.assign(**changes))
        assert numbers.no_id(frame) is None
        return numbers.misread(frame, encode(frame), encode)

    narrow = log.astype("float32")
    assert misread(price=narrow["price"], number=narrow["number"]) is None
    assert misread(item=narrow["item"]) is None  # of the same text
    assert misread(score=narrow["score"].where(narrow["score"] == 0.5)) is None  # the same number
    found = misread(**narrow)
    assert (found.column, found.given, found.fitted) == ("score", np.float32, np.float64)
    with pytest.raises(UserError, match="'score', .* must be float64, .* float32, one in 40 rows"):
        found.refuse("one in 40 rows")
    border = log.assign(price=2.1).astype("float32")
    assert misread(price=border["price"]).column == "price"


def test_float32_beside_a_missing_whole_number(tmp_path):
    """Each made the id unknown whatever the other was, and neither was seen."""
    both = ops.LambdaOp(
        lambda column, df: df["item"].astype(str) + "_" + (column * 3).astype(str),
        dependency=["item"],
        dtype="str",
    )
    node = ["score"] >> both >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(node).fit(nvt.Dataset(LOG))
    numbers, encode = WholeNumbers(workflow, ["score"], ["score"]), encoder(workflow)
    narrow, missing = LOG["score"].astype("float32"), LOG["item"].where(LOG.index != 3)
    for changes, is_refused in (
        ({}, False),
        ({"score": narrow}, True),
        ({"item": missing}, True),
        ({"score": narrow, "item": missing}, True),
    ):
        rows = LOG.assign(**changes).loc[[1, 3, 6, 7, 12], ["score", "item"]]
        frame = numbers.as_fitted(rows.reset_index(drop=True))
        found = numbers.misread(frame, encode(frame), encode)
        assert (found is not None) == is_refused, list(changes)


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


def test_beyond_the_type_of_the_fit(tmp_path):
    """Stock wraps 261 to 5, as an id and as a number."""
    log = LOG.assign(number=LOG["age"], kept=LOG["item"])
    reduced = ["item", "number"] >> ops.FillMissing() >> ops.ReduceDtypeSize()
    ids = reduced["item"] >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(ids + reduced["number"] + ["kept"]).fit(nvt.Dataset(log))
    numbers = WholeNumbers(workflow, ["item"], workflow.output_schema.column_names)
    for name in ("item", "number"):
        for values, row in (
            ([5, -128, 127, 261], 3),
            ([5, -129, 127, 128], 1),
            (np.array([5, 255], "uint8"), 1),
            (pd.array([5, None, 261], "Int64"), 2),
            ([np.nan, 5.0, 261.0], 2),
        ):
            frame = numbers.as_fitted(pd.DataFrame({name: values}))
            found = numbers.no_id(frame, {name})
            assert found == Beyond(name, row, int(values[row]), np.dtype("int8"))
            assert numbers.no_id(frame[:row], {name}) is None
    words = "ReduceDtypeSize gave .* Received: 261, which int8, of -128 to 127, makes .* in raw"
    with pytest.raises(UserError, match=words):
        found.refuse(Place(Path("raw"), 0, 0))
    assert numbers.no_id(pd.DataFrame({"kept": [261]})) is None


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
    held = WholeNumbers(workflow, ["first"], workflow.output_schema.column_names)
    encodings = []

    def encode(frame):
        encodings.append(frame)
        return pa.RecordBatch.from_pandas(workflow.transform(frame), preserve_index=False)

    def misread(*lacking):
        frame = log.copy()
        for row, names in enumerate(lacking):
            frame[names] = frame[names].astype(float)
            frame.loc[row, names] = np.nan
        encoded = encode(frame)
        encodings.clear()
        return held.misread(frame, encoded, encode)

    found = misread(["first", "second"])
    assert (found.column, found.among) == ("first", "missing one")
    assert misread(["first"], ["second"]).column == "first"
    assert misread(["second"]).column == "second"
    assert misread(["third"]) is None
    assert len(encodings) == 1
    many = [f"n{i}" for i in range(26)]
    doubled = many >> ops.LambdaOp(lambda column: column * 2)
    log = pd.DataFrame({name: np.arange(40) % 7 for name in many})
    workflow = nvt.Workflow(doubled).fit(nvt.Dataset(log))
    held = WholeNumbers(workflow, [], workflow.output_schema.column_names)
    assert misread(*([name] for name in many)) is None  # another row each
    assert len(encodings) == 2


def test_what_a_subgraph_reads(tmp_path):
    """As Merlin's examples of several stages have it: it was not looked into."""
    log = LOG.assign(name=[f"n{i % 6}" for i in range(40)])

    def ids(name):
        columns = [name] >> ops.Rename(postfix="_")
        encoded = columns >> ops.Categorify(out_path=str(tmp_path / name))
        inner = [name] >> Subgraph(f"inner {name}", encoded)
        return [name] >> Subgraph(f"outer {name}", inner)

    workflow = nvt.Workflow(ids("item") + ids("name")).fit(nvt.Dataset(log))
    numbers = WholeNumbers(workflow, ["item_", "name_"], workflow.output_schema.column_names)
    frame = pd.DataFrame({"item": [1.0, 3.7], "name": ["n1", "n2"]})
    assert numbers.no_id(frame) == NotWhole("item", 1, 3.7)
    assert text_columns(workflow) == {"name"}
    assert id_origins(workflow) == {"item_": Origin.VOCABULARY, "name_": Origin.VOCABULARY}
    assert raw_values(workflow) == {"item_": RawValues(), "name_": RawValues()}
    new = for_new_rows(workflow)
    missing = pd.DataFrame({"item": [1, 2], "name": [None, None]})
    assert new.transform(missing)["name_"].tolist() == [1, 1]


def encoder(workflow):
    def encode(frame):
        return pa.RecordBatch.from_pandas(transformed(workflow, frame), preserve_index=False)

    return encode


def test_a_number_in_place_of_a_missing_one_refuses_nothing():
    """The 7 that stood in the second row for a missing one was dropped by the Filter: a >= b."""
    log = pd.DataFrame({"a": np.arange(40) % 7 + 1, "b": np.arange(40) % 7 + 8})
    kept = list(log) >> ops.Filter(lambda frame: frame[~(frame["a"] >= frame["b"])])
    filled = kept >> ops.FillMissing()
    workflow = nvt.Workflow(filled >> ops.Normalize()).fit(nvt.Dataset(log))
    held, encode = WholeNumbers(workflow, [], list(log)), encoder(workflow)
    frame = pd.DataFrame({"a": [7, None, 2], "b": [9.5, 5, 4]})
    assert held.misread(frame, encode(frame), encode) is None
    texts = filled >> ops.LambdaOp(lambda column: column.astype(str).str.len(), dtype=np.int64)
    workflow = nvt.Workflow(texts).fit(nvt.Dataset(log))
    held, encode = WholeNumbers(workflow, [], list(log)), encoder(workflow)
    assert held.misread(frame, encode(frame), encode).column == "a"


def test_a_rows_input_does_not_depend_on_a_wide_one_beside_it():
    """int8 at the fit, where 5 · 50 is -6; beside a 300 it was 250."""
    log = pd.DataFrame({"a": (np.arange(40) % 7).astype("int8"), "b": np.arange(40, dtype="int8")})
    times = ["a"] >> ops.LambdaOp(lambda column: column * 50, dtype="int8")
    columns = times + ["b"]  # noqa: RUF005  (a graph)
    workflow = nvt.Workflow(columns).fit(nvt.Dataset(log))
    held, encode = WholeNumbers(workflow, [], list(log)), encoder(workflow)
    for values, is_refused in (([5, 3], False), ([5, 300], True), ([1, 300], False)):
        frame = held.as_fitted(pd.DataFrame({"a": values, "b": [1, 300]}))
        found = held.misread(frame, encode(frame), encode)
        assert (found is not None) == is_refused, values
    with pytest.raises(UserError, match=r"'a' must have no one that is no int8 .*other inputs"):
        held.misread(
            frame := held.as_fitted(pd.DataFrame({"a": [5, 300], "b": [1, 2]})),
            encode(frame),
            encode,
        ).refuse("rows")


@pytest.mark.parametrize(
    "values",
    [
        pd.Series([2**60 + 1, None], dtype=object),
        pd.Series([2**60 + 1, pd.NA], dtype=object),
        pd.Series([Decimal(2**60 + 1), None]),
        pd.array([2**60 + 1, None], "Int64"),
        pd.Series([2**60 + 1, None], dtype=pd.ArrowDtype(pa.int64())),
        pd.Series([2**60 + 1, None], dtype=object).astype("category"),
        pd.Series([2**60 + 1, 3.0, None], dtype=object),
        pd.Series([2**60 + 1, 3.0], dtype=object),
        pd.Series([Decimal(2**60 + 1), Decimal(3)]),
        pd.Series([2**60 + 1, 3], dtype=pd.ArrowDtype(pa.int64())),
    ],
)
def test_integers_of_2_to_the_53_and_more_stay_exact(numbers, values):
    found = numbers.as_fitted(pd.DataFrame({"item": values}))["item"]
    assert found.dtype == ("Int64" if found.isna().any() else "int64")
    assert found[found.notna()].tolist() == [2**60 + 1, 3][: found.notna().sum()]
    assert numbers.no_id(found.to_frame()) is None


def test_integers_of_lists_and_objects_are_exact(tmp_path):
    large = [2**53 + 1, 2**60 + 1]
    log = LOG.assign(many=[large] * 40, number=LOG["age"], unused=LOG["age"])
    many = ["many"] >> ops.Categorify(out_path=str(tmp_path))
    reduced = ["number", "unused"] >> ops.FillMissing() >> ops.ReduceDtypeSize()
    workflow = nvt.Workflow(many + reduced).fit(nvt.Dataset(log))
    held = WholeNumbers(workflow, ["many"], ["many", "number"])
    for lists in ([large], [np.array(large)], [[*large, None]]):
        frame = held.as_fitted(pd.DataFrame({"many": pd.Series(lists)}))
        assert held.no_id(frame) is None, lists
    rounded = held.as_fitted(pd.DataFrame({"many": pd.Series([large, [1, 2.0**53]])}))
    assert held.no_id(rounded) == NotWhole("many", 1, 2.0**53)
    for values in (pd.Series([5, 261], dtype=object), pd.Series([5, 261], dtype="category")):
        frame = held.as_fitted(pd.DataFrame({"number": values}))
        assert held.no_id(frame) == Beyond("number", 1, 261, np.dtype("int8"))
        unused = held.as_fitted(pd.DataFrame({"unused": values}))
        assert held.no_id(unused) is None  # no input of the model
    infinite = held.no_id(pd.DataFrame({"number": [5.0, np.inf]}))
    assert infinite == Beyond("number", 1, np.inf, np.dtype("int8"))


def test_a_flag_of_missing_ones_is_not_the_number(tmp_path):
    """A float32 was refused as an id that is a float64, for `price_filled` is one."""
    filled = ["price"] >> ops.FillMissing(add_binary_cols=True)
    flag = filled["price_filled"] >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvt.Workflow(flag + (filled["price"] >> ops.Normalize())).fit(nvt.Dataset(LOG))
    held = WholeNumbers(workflow, ["price_filled"], workflow.output_schema.column_names)
    frame = held.as_fitted(pd.DataFrame({"price": np.array([0.1, 2], "float32")}))
    assert held.no_id(frame) is None
    encoded = encoder(workflow)
    assert held.misread(frame, encoded(frame), encoded) is None


def looking_up(tmp_path, log, keys):
    """Workflows that look `key` up, or make ids of it, with the column that is made."""

    def ids(nodes):
        return nodes >> ops.Categorify(out_path=str(tmp_path / "ids"))

    key, folder = ["key"], str(tmp_path / "groups")
    table = pd.DataFrame({"other": keys, "gain": np.arange(len(keys)) / 4})
    joined = key >> ops.JoinExternal(table, on="key", on_ext="other")
    return {
        "groups": (key >> ops.JoinGroupby(cont_cols=["age"], stats=["mean"], out_path=folder)),
        "targets": key >> ops.TargetEncoding("age", out_path=folder, kfold=1),
        "joined": joined["gain"],
        "clipped": ids(key >> ops.Clip(min_value=0)),
        "text": ids(key >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")),
    }


@pytest.mark.parametrize("kind", ["groups", "targets", "joined", "clipped", "text"])
@pytest.mark.parametrize(("first", "narrow"), [(2**60, "float64"), (2**24, "float32")])
def test_rounded_keys_are_refused(tmp_path, kind, first, narrow):
    """2^60 and 2^60 + 1 are one float64; stock gives the one what it has learned of the other."""
    keys = first + np.arange(7)
    log = LOG.assign(key=keys[np.arange(40) % 7])
    workflow = nvt.Workflow(looking_up(tmp_path, log, keys)[kind]).fit(nvt.Dataset(log))
    made = workflow.output_schema.column_names
    held = WholeNumbers(workflow, made if kind in ("clipped", "text") else [], made)
    rounded = held.as_fitted(pd.DataFrame({"key": keys.astype(narrow)}))
    assert held.no_id(rounded) == Rounded("key", 0, float(first))
    for exact in (keys, pd.Series(keys, dtype=object), pd.Series([*map(Decimal, keys.tolist())])):
        frame = held.as_fitted(pd.DataFrame({"key": exact, "age": 1}))
        assert held.no_id(frame) is None
        assert frame["key"].tolist() == keys.tolist()
    small = held.as_fitted(pd.DataFrame({"key": [5.0, np.nan]}))
    assert held.no_id(small) is None


def test_what_no_type_of_numbers_holds_is_refused(numbers):
    for values in ([2**60 + 1, 2.5], [1, 2**60 + 1, 2.0**60], [Decimal("2.5"), Decimal(2**60)]):
        frame = numbers.as_fitted(pd.DataFrame({"item": pd.Series(values, dtype=object)}))
        found = numbers.no_id(frame)
        assert isinstance(found, Uneven)
        assert found.value == max(values)


def test_a_key_of_a_joined_table_is_a_float64(tmp_path):
    """As a float32, 0.1 has no row there: what it adds would be missing."""
    keys = np.arange(1, 8) / 10
    log = LOG.assign(key=keys[np.arange(40) % 7])
    joined = looking_up(tmp_path, log, keys)["joined"]
    workflow = nvt.Workflow(joined >> ops.FillMissing()).fit(nvt.Dataset(log))
    held = WholeNumbers(workflow, [], ["gain"])
    frame = held.as_fitted(pd.DataFrame({"key": keys.astype("float32")}))
    assert held.no_id(frame) == Narrowed("key", 0, float(np.float32(0.1)))
    assert held.no_id(held.as_fitted(pd.DataFrame({"key": keys}))) is None


def test_a_key_of_a_joined_table_is_text(tmp_path):
    table = pd.DataFrame({"city": ["a", "b"], "gain": [1.0, 2.0]})
    log = LOG.assign(city=["a", "b"] * 20)
    workflow = nvt.Workflow(["city"] >> ops.JoinExternal(table, on="city")).fit(nvt.Dataset(log))
    assert text_columns(workflow) == {"city"}


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
    if is_text:
        nodes = nodes >> ops.LambdaOp(lambda column: column.astype(str), dtype="str")
    workflow = nvt.Workflow(nodes >> ops.Categorify(out_path=str(tmp_path)))
    workflow.fit(nvt.Dataset(LOG))
    held, encode = WholeNumbers(workflow, ["item"], ["item"]), encoder(workflow)
    frame = held.as_fitted(pd.DataFrame({"item": values}))
    assert frame["item"].dtype == "float64"
    misread = held.misread(frame, encode(frame), encode)
    assert (misread is not None) is is_text
    if misread is not None:
        assert (misread.column, misread.among) == ("item", "missing one")
