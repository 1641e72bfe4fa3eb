"""Columns to ids and numbers: by exact arithmetic, by NumPy, and as the saved workflow does it."""

import math
from fractions import Fraction

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from merlin_cowclip.workflows.data import vocabulary
from merlin_cowclip.workflows.data.encoder import Encoder, Scale, scale_of
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import Vocabulary, write_vocabulary
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from nvtabular import ColumnSelector

    from merlin_cowclip.workflows.data.prepare.nvt_workflow import EncodeFields

SELECTED = ColumnSelector(["n"])

# Ids

TEXTS = st.text(max_size=6)


@settings(deadline=None, max_examples=50)
@given(st.lists(TEXTS, unique=True), st.lists(TEXTS | st.none()), st.sampled_from((1, 5)))
def test_known_texts_have_their_place_and_others_a_bucket(known, texts, buckets):
    words = Vocabulary.of_hashes(vocabulary.hash_of(np.array(known, object)), buckets)
    ids = words.encode(pa.array(texts, pa.string()))
    in_dictionary = words.encode(pa.array(texts, pa.string()).dictionary_encode())
    for text, number, other in zip(texts, ids, in_dictionary, strict=True):
        assert number == other
        if text is None:
            assert number == 1
        elif text in known:
            assert number == 2 + buckets + known.index(text)
        else:
            assert number == 2 + pd.util.hash_array(np.array([text], object)).item() % buckets
    assert words.cardinality == 2 + buckets + len(known)


def test_a_written_vocabulary_is_opened_by_its_index_or_without_it(tmp_path):
    texts = pa.array([f"é{i}" for i in range(1_000)])
    counts = {"a": np.arange(1_004), "b": np.ones(1_004, np.int64)}
    write_vocabulary(tmp_path, "a", [texts[:300], texts[300:]], counts, Vocabulary.empty(2))
    path = vocabulary.vocabulary_file(tmp_path / "workflow", "a")
    mapped = Vocabulary.open(path, 2)
    assert isinstance(mapped.hashes, np.memmap)
    assert mapped.encode(texts).tolist() == [*range(4, 1_004)]
    for index in path.parent.glob("*.npy"):
        index.unlink()
    assert Vocabulary.open(path, 2).encode(texts).tolist() == [*range(4, 1_004)]
    table = pd.read_parquet(tmp_path / "counts/b.parquet")
    assert table["raw"][4:].tolist() == texts.to_pylist()
    assert pd.read_parquet(path).index.tolist() == [*range(4, 1_004)]  # as Categorify has it
    assert pd.read_parquet(path)["a_size"].tolist() == [*range(5, 1_005)]


def test_the_hash_of_a_saved_vocabulary_stays():
    """Of pandas 1.5.3; another one would make each saved vocabulary wrong."""
    for text in ("é", "é".encode()):
        assert vocabulary.hash_of(np.array([text], object)).tolist() == [16908809132758853863]


def test_texts_of_one_hash_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(vocabulary, "hash_of", lambda texts: np.zeros(len(texts), np.uint64))
    counts = {"a": np.ones(5, np.int64)}
    with pytest.raises(UserError, match="same 64-bit hash"):
        write_vocabulary(tmp_path, "a", [pa.array(["x", "y"])], counts, Vocabulary.empty(1))


def test_lists_of_a_slice():
    words = Vocabulary.of_hashes(vocabulary.hash_of(np.array(["a", "b"], object)))
    encoder = Encoder(DatasetSpec("log", "y", ("id",), lists=("l",)), {"l": words}, {})
    lists = pa.array([["b"], ["a", None], [], ["b", "x"]])
    assert encoder.encode("l", lists[1:]).to_pylist() == [[3, 1], [], [4, 2]]


# Numbers

numbers = st.lists(st.floats(-1e300, 1e300) | st.just(math.nan), min_size=1, max_size=8)


@settings(deadline=None, max_examples=50)
@given(numbers, numbers)
def test_any_finite_numbers_are_between_0_and_1(train, test):
    filled = [0.0 if math.isnan(x) else x for x in train]
    low, high = min(filled), max(filled)
    both = np.array([*train, *test])
    scaled = Scale("range", False, (low, high))(both)
    assert scaled.dtype == np.float32
    assert ((scaled >= 0) & (scaled <= 1)).all()
    # The numbers themselves, exactly; 2^-23 is float32's precision.
    span = Fraction(high) - Fraction(low) or Fraction(low + max(1.0, abs(low))) - Fraction(low)
    for x, y in zip(both, scaled, strict=True):
        exact = (Fraction(0.0 if math.isnan(x) else x) - Fraction(low)) / span
        assert abs(float(y) - float(min(max(exact, 0), 1))) <= 2**-23


def test_standardized_and_logarithms():
    x = np.array([0.0, 1.0, 5.0, math.nan])
    scale = Scale("standardize", True, (0.5, 2.0))
    np.testing.assert_allclose(scale(x), (np.log([1, 2, 6, 1]) - 0.5) / 2, rtol=1e-6)
    np.testing.assert_array_equal(Scale("standardize", False, (3.0, 0.0))(x[:2]), [-3, -2])
    np.testing.assert_array_equal(Scale("range", True, (0.0, 1.0))(np.array([-5.0])), [0])


def test_quantiles_of_a_continuous_column_are_its_distribution():
    values = np.random.default_rng(0).lognormal(0, 3, 10_000)
    scale = Scale("quantiles", False, np.quantile(values, np.linspace(0, 1, 101)))
    ranks = np.argsort(np.argsort(values)) / (len(values) - 1)
    assert np.abs(scale(values) - ranks).max() < 0.011  # between two quantiles
    assert scale(np.array([-1.0, 1e9])).tolist() == [0, 1]
    half = Scale("quantiles", False, [0.0] * 51 + [*range(1, 51)])  # half of them are 0
    np.testing.assert_allclose(half(np.array([0.0, 25.0, 50.0])), [0.25, 0.75, 1])


# Raw cells


def encoded(tmp_path, values: list, **keys) -> list[int]:
    """By a vocabulary of "1382", "true" and "x": ids 3, 4 and 5."""
    (tmp_path / "categories").mkdir(exist_ok=True)
    texts = pd.DataFrame({"n": ["1382", "true", "x"]})
    texts.to_parquet(tmp_path / "categories/unique.n.parquet")
    spec = DatasetSpec("log", "y", **(keys or {"categorical": ("n",)}))
    encode = EncodeFields(spec, {}, tmp_path)
    column = pd.Series(values, dtype=object)
    cells = encode.transform(SELECTED, column.to_frame("n"))["n"]
    return [list(cell) if keys else cell for cell in cells]


def test_one_id_has_many_forms(tmp_path):
    assert encoded(tmp_path, ["1382", None, math.nan, "", "true"]) == [3, 1, 1, 1, 4]
    assert encoded(tmp_path, [1382, None, 7]) == [3, 1, 2]
    assert encoded(tmp_path, [1382.0, math.nan]) == [3, 1]
    assert encoded(tmp_path, [True, None]) == [4, 1]
    assert encoded(tmp_path, [b"x", None]) == [5, 1]
    lists = {"categorical": (), "lists": ("n",), "null_values": ("-",)}
    assert encoded(tmp_path, [["x", "-"], None, []], **lists) == [[5, 1], [], []]
    for cells, says in (([1.5], "1.5"), (["1382", 1382], "'int' object"), ([7, "x"], "'x'")):
        with pytest.raises(UserError, match=f"cannot read column 'n'.*{says}"):
            encoded(tmp_path, cells)


def test_numbers_and_their_texts():
    spec = DatasetSpec("log", "y", ("id",), ("n",), null_values=("-",))
    encode = EncodeFields(spec, {"n": (0.0, 4.0)}, "")
    encode._encoder = Encoder(spec, {}, {"n": scale_of(spec, "n", (0.0, 4.0))})
    for cells in (["1.5", "2", "", None, "-", pd.NA], [1.5, 2, None, math.nan, pd.NA, None]):
        rows = pd.Series(cells, dtype=object, index=range(7, 13)).to_frame("n")
        expected = pd.Series([0.375, 0.5] + [0] * 4, rows.index, "float32", "n")
        pd.testing.assert_series_equal(encode.transform(SELECTED, rows)["n"], expected)
    for text, message in (("many", "cannot read column 'n'.*'many'"), ("inf", "the number is inf")):
        with pytest.raises(UserError, match=message):
            encode.transform(SELECTED, pd.DataFrame({"n": ["1.5", text]}))
