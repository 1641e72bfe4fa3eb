"""FusedEmbeddings against NumPy: rows, combiners, initial values, counts, saving."""

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.models.embeddings import TableInitializer
from merlin_cowclip.plugins import HasTables
from merlin_cowclip.plugins.tables import samples_per_row
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.schema import ColumnSchema, Schema, Tags

DIM = 3
SIZES = {"user": 7, "genres": 6, "item": 5, "tags": 4}  # user and item one-hot
OFFSETS = {"user": 0, "item": 7, "genres": 12, "tags": 18}
ROWS = 22
USER = [[3], [6], [0], [3]]
ITEM = [[4], [4], [1], [2]]
GENRES = [[5, 3, 5], [], [4], [0, 3]]
TAGS = [[3], [3, 3], [], [1]]


def column(name: str, size: int | None, is_list: bool = False, tags=(Tags.CATEGORICAL,)):
    domain = {} if size is None else {"domain": {"min": 0, "max": size - 1, "name": name}}
    return ColumnSchema(
        name, tags=list(tags), dtype="int64", is_list=is_list, is_ragged=is_list, properties=domain
    )


SCHEMA = Schema([column(name, size, name in ("genres", "tags")) for name, size in SIZES.items()])


def ragged(lists, **options):
    return tf.ragged.constant(lists, dtype=tf.int64, **options)


def inputs(**changes):
    given = {
        "user": tf.constant(USER),
        "item": tf.constant(ITEM),
        "genres": ragged(GENRES),
        "tags": ragged(TAGS),
    }
    return {**given, **changes}


def padded(lists, to=4):
    return np.array([row + [0] * (to - len(row)) for row in lists])


def layer_of(combiner="mean", stddev=0.5, schema=SCHEMA, **options) -> FusedEmbeddings:
    layer = FusedEmbeddings(schema, DIM, stddev=stddev, combiner=combiner, **options)
    layer.build({})
    return layer


def combined(table, first, lists, combiner):
    """One list column by a loop: padding (id 0) is no id; no id at all gives zeros."""
    out = []
    for ids in lists:
        rows = [table[first + i] for i in ids if i != 0]
        total = np.sum(rows, axis=0) if rows else np.zeros(DIM)
        by = {"sum": 1.0, "mean": len(rows), "sqrtn": len(rows) ** 0.5}[combiner]
        out.append(total / (by or 1.0))
    return np.array(out)


def expected(table, combiner="mean"):
    return np.stack(
        [
            [table[u] for (u,) in USER],
            [table[OFFSETS["item"] + i] for (i,) in ITEM],
            combined(table, OFFSETS["genres"], GENRES, combiner),
            combined(table, OFFSETS["tags"], TAGS, combiner),
        ],
        axis=1,
    )


# Lookup


def test_every_field_owns_a_range_of_rows():
    layer = layer_of()
    assert layer.fields == ("user", "item", "genres", "tags")  # one-hot fields first
    assert layer.row_offsets == (0, 7, 12, 18, ROWS)
    assert layer.cardinalities == {"user": 7, "item": 5, "genres": 6, "tags": 4}
    assert layer.table.shape == (ROWS, DIM)
    (spec,) = layer.table_specs()
    assert (spec.row_offsets, spec.width, spec.num_rows) == (layer.row_offsets, DIM, ROWS)
    assert spec.variable is layer.table
    assert isinstance(layer, HasTables)
    assert layer.table_specs()[0] is spec


@pytest.mark.parametrize("combiner", ["mean", "sum", "sqrtn"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"genres": ragged([[[i] for i in row] for row in GENRES], ragged_rank=1)},
        {"genres": tf.constant(padded(GENRES)), "tags": tf.constant(padded(TAGS))},
        {"genres": tf.constant(padded(GENRES)[..., None])},
        {"user": tf.constant(np.ravel(USER))},
        {"user": tf.constant(USER, tf.int32), "item": tf.constant(np.ravel(ITEM), tf.int32)},
    ],
    ids=["ragged", "ragged b×n×1", "dense b×n", "dense b×n×1", "one-hot b, mixed types", "int32"],
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_lookup(combiner, changes, in_graph):
    layer = layer_of(combiner)
    call = tf.function(layer) if in_graph else layer
    found = call(inputs(**changes))
    assert found.shape == (4, 4, DIM)
    np.testing.assert_allclose(found, expected(layer.table.numpy(), combiner), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("names", "columns"), [(("user", "item"), [0, 1]), (("genres", "tags"), [2, 3])]
)
def test_only_one_hot_or_only_lists(names, columns):
    layer = layer_of(schema=SCHEMA.select_by_name(list(names)))
    table = np.zeros((ROWS, DIM))
    shift = OFFSETS[names[0]]
    table[shift : shift + layer.row_offsets[-1]] = layer.table.numpy()
    np.testing.assert_allclose(layer(inputs()), expected(table)[:, columns], rtol=1e-5, atol=1e-6)


def test_columns_that_are_no_categories_are_left_out():
    schema = SCHEMA + Schema(
        [
            ColumnSchema("price", tags=[Tags.CONTINUOUS], dtype="float32"),
            column("clicked", 2, tags=(Tags.CATEGORICAL, Tags.TARGET)),
        ]
    )
    assert layer_of(schema=schema).fields == ("user", "item", "genres", "tags")


# Initial values


def test_padding_and_unknown_rows_start_at_zero_and_no_other():
    table = layer_of().table.numpy()
    zero = {first + i for first in OFFSETS.values() for i in (0, 2)}
    assert {int(row) for row in np.flatnonzero(~table.any(axis=1))} == zero


def test_initial_rows_are_normal_with_the_given_stddev():
    tf.keras.utils.set_random_seed(3)
    layer = FusedEmbeddings(Schema([column("user", 40_003)]), 10, stddev=1e-2)
    layer.build({})
    rows = layer.table.numpy()[3:]
    assert rows.std() == pytest.approx(1e-2, rel=0.01)
    assert abs(rows.mean()) < 1e-4
    assert np.abs(rows).max() > 0.035  # beyond 2σ: not truncated
    assert (np.abs(rows) > 2e-2).mean() == pytest.approx(0.0455, rel=0.05)


def test_stddev_0_is_a_table_of_zeros():
    assert not layer_of(stddev=0.0).table.numpy().any()


def test_initializer_config_round_trip():
    initializer = TableInitializer.from_config(TableInitializer(0.1, [1, 4]).get_config())
    assert np.flatnonzero(~initializer((6, 2)).numpy().any(axis=1)).tolist() == [1, 4]


# Gradient and counts


def gradient_and_lookups(layer, given):
    """What the optimizer would see: the table's gradient and the lookups of the step."""
    (spec,) = layer.table_specs()
    counted = {}

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(given) ** 2)
        gradient = tape.gradient(loss, layer.table)
        assert isinstance(gradient, tf.IndexedSlices)
        rows, _, counts = samples_per_row(spec.recorder.lookups(), gradient.indices, spec.num_rows)
        return gradient.values, gradient.indices, rows, counts

    values, indices, rows, counts = (t.numpy() for t in step())
    dense = np.zeros((ROWS, DIM))
    np.add.at(dense, indices, values)
    for row, count in zip(rows, counts, strict=True):
        assert row not in counted
        counted[int(row)] = float(count)
    return dense, counted


@pytest.mark.parametrize(
    "changes",
    [{}, {"genres": tf.constant(padded(GENRES)), "tags": tf.constant(padded(TAGS))}],
    ids=["ragged", "dense"],
)
def test_gradient_is_sparse_and_counts_are_samples(changes):
    layer = layer_of("sum")
    dense, counts = gradient_and_lookups(layer, inputs(**changes))

    # Every sample counts once for each id that it holds, by a loop.
    held: dict[int, set[int]] = {}
    for name, ids in (("user", USER), ("item", ITEM), ("genres", GENRES), ("tags", TAGS)):
        for sample, row in enumerate(ids):
            for i in row:
                if name in ("user", "item") or i != 0:
                    held.setdefault(OFFSETS[name] + i, set()).add(sample)
    assert {row: counts[row] for row in held} == {row: len(s) for row, s in held.items()}
    assert counts[OFFSETS["genres"] + 5] == 1  # twice in one list
    assert counts[OFFSETS["user"] + 3] == 2  # in two samples
    # Rows of padding: no sample holds them, so they count as absent rows do.
    assert {counts[row] for row in set(counts) - set(held)} <= {1.0}

    # d/dw Σ x² = 2x for every id that is summed into x.
    x = expected(layer.table.numpy(), "sum")
    by_hand = np.zeros((ROWS, DIM))
    for f, (name, ids) in enumerate(
        [("user", USER), ("item", ITEM), ("genres", GENRES), ("tags", TAGS)]
    ):
        for sample, row in enumerate(ids):
            for i in row:
                if name in ("user", "item") or i != 0:
                    by_hand[OFFSETS[name] + i] += 2 * x[sample, f]
    np.testing.assert_allclose(dense, by_hand, rtol=1e-5, atol=1e-6)
    assert not dense[OFFSETS["genres"]].any()  # padding is never trained


def test_the_same_batch_called_twice_counts_once():
    layer = layer_of()
    (spec,) = layer.table_specs()
    layer(inputs())
    layer(inputs())
    rows, _, counts = samples_per_row(
        spec.recorder.lookups(), tf.constant([3], tf.int64), spec.num_rows
    )
    assert dict(zip(rows.numpy().tolist(), counts.numpy().tolist(), strict=True))[3] == 2.0


# Saving


def test_config_round_trip():
    layer = layer_of("sqrtn", stddev=0.25, name="mine")
    config = layer.get_config()
    again = FusedEmbeddings.from_config(config)
    assert again.get_config() == config
    assert (again.name, again.dim, again.stddev, again.combiner) == ("mine", DIM, 0.25, "sqrtn")
    assert (again.fields, again.row_offsets) == (layer.fields, layer.row_offsets)
    again.build({})
    again.set_weights(layer.get_weights())
    np.testing.assert_array_equal(again(inputs()), layer(inputs()))


def test_save_and_load(tmp_path):
    given = {
        "user": tf.keras.Input([1], dtype=tf.int64, name="user"),
        "item": tf.keras.Input([1], dtype=tf.int64, name="item"),
        "genres": tf.keras.Input([None], dtype=tf.int64, name="genres", ragged=True),
        "tags": tf.keras.Input([None], dtype=tf.int64, name="tags", ragged=True),
    }
    layer = FusedEmbeddings(SCHEMA, DIM, stddev=0.5)
    model = tf.keras.Model(given, layer(given))
    batch = inputs(user=tf.constant(USER, tf.int64), item=tf.constant(ITEM, tf.int64))
    before = model(batch).numpy()
    np.testing.assert_allclose(before, expected(layer.table.numpy()), rtol=1e-5, atol=1e-6)
    model.save(tmp_path / "model")
    loaded = tf.keras.models.load_model(tmp_path / "model", compile=False)
    np.testing.assert_array_equal(loaded(batch), before)


# Refused


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (Schema([]), {}, r"must have a column tagged Tags.CATEGORICAL.* Received .* columns \[\]"),
        (
            Schema([ColumnSchema("price", tags=[Tags.CONTINUOUS])]),
            {},
            r"must have a column tagged Tags.CATEGORICAL.* Received .* columns \['price'\]",
        ),
        (
            Schema([column("user", 7), column("item", None)]),
            {},
            "Column 'item' must have an int domain with a max",
        ),
        (SCHEMA, {"dim": 0}, "dim must be a positive whole number. Received: dim=0"),
        (SCHEMA, {"dim": 2.0}, "dim must be a positive whole number. Received: dim=2.0"),
        (SCHEMA, {"dim": True}, "dim must be a positive whole number. Received: dim=True"),
        (
            SCHEMA,
            {"combiner": "max"},
            "combiner must be one of mean, sum, sqrtn. Received: combiner='max'",
        ),
    ],
)
def test_refused(schema, options, message):
    with pytest.raises(ValueError, match=message):
        FusedEmbeddings(schema, **{"dim": DIM, **options})


@pytest.mark.parametrize("stddev", [-0.1, float("nan")])
def test_a_bad_stddev_is_refused(stddev):
    with pytest.raises(ValueError, match=r"stddev must not be negative. Received: stddev="):
        layer_of(stddev=stddev)


def test_a_list_of_lists_is_refused():
    with pytest.raises(ValueError, match="'genres' must be ragged in one dimension"):
        layer_of().call(inputs(genres=ragged([[[3, 4]], [], [[5]], []])))
