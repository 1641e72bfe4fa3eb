"""Fields of one int domain share rows, as in Merlin's own tables, and train as those do."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin_cowclip.plugins._tensorflow import mm
from merlin_cowclip.plugins.embeddings.counting import count_samples
from merlin_cowclip.workflows.quiet import quiet_imports

from .embeddings import column

with quiet_imports():
    import nvtabular as nvt
    from merlin.schema import Schema, Tags

DIM = 4
SIZE = 9  # of the shared domain
SCHEMA = Schema(
    [
        column("src", SIZE, tags=[Tags.USER], domain="place"),
        column("site", 5),
        column("dst", SIZE, domain="place"),
        column("seen", SIZE, is_list=True, tags=[Tags.SEQUENCE], domain="place"),
    ]
)
INPUTS = {
    "src": tf.constant([[3], [4], [3]], tf.int64),
    "dst": tf.constant([[3], [5], [6]], tf.int64),
    "site": tf.constant([[3], [4], [4]], tf.int64),
    "seen": tf.ragged.constant([[3, 3], [], [6, 8]], dtype=tf.int64),
}


def layer_of(schema=SCHEMA, **options) -> FusedEmbeddings:
    layer = FusedEmbeddings(schema, DIM, **{"stddev": 0.5, "combiner": "sum", **options})
    layer.build({})
    return layer


def test_one_range_of_rows_per_domain():
    layer = layer_of()
    assert layer.fields == ("src", "site", "dst", "seen")
    assert layer.row_offsets == (0, 9, 14)
    assert layer.cardinalities == {"src": 9, "site": 5, "dst": 9, "seen": 9}
    (spec,) = layer.table_specs()
    assert (spec.row_offsets, spec.num_rows) == ((0, 9, 14), 14)
    table = layer.table.numpy()
    expected = [
        [table[3], table[9 + 3], table[3], 2 * table[3]],
        [table[4], table[9 + 4], table[5], np.zeros(DIM)],
        [table[3], table[9 + 4], table[6], table[6] + table[8]],
    ]
    np.testing.assert_allclose(layer(INPUTS), expected, rtol=1e-6)


def test_counts_of_a_row_add_up_over_its_fields():
    """A sample that holds it in two fields counts twice; twice in one list, once."""
    layer = layer_of()
    (spec,) = layer.table_specs()
    with tf.GradientTape() as tape:
        found = tf.reduce_sum(layer(INPUTS))
    gradient = tape.gradient(found, layer.table)
    rows, _, counts = count_samples(spec, gradient.indices)
    expected = {3: 2 + 1 + 1, 4: 1, 5: 1, 6: 1 + 1, 8: 1, 9 + 3: 1, 9 + 4: 2}
    assert dict(zip(rows.numpy().tolist(), counts.numpy().tolist(), strict=True)) == expected


def test_a_range_is_chosen_by_any_of_its_fields():
    (spec,) = layer_of().table_specs()
    assert spec.selected(["dst"]) == spec.selected([Tags.USER]) == (True, False)
    assert spec.selected(["site"]) == (False, True)


def test_rows_by_field():
    layer = layer_of()
    assert layer.rows("dst", [5]).tolist() == layer.rows("src", [5]).tolist() == [5]
    assert layer.rows("site", [4]).tolist() == [9 + 4]
    layer.load_rows("dst", pd.DataFrame(np.full((1, DIM), 7.0), index=[5]))
    frame = layer.to_df("seen")
    assert len(frame) == SIZE
    assert frame.loc[5, ["0", "1", "2", "3"]].tolist() == [7.0] * DIM
    found = layer.lookup("src", tf.constant([[5]]))
    np.testing.assert_array_equal(found, np.full((1, DIM), 7.0))


def test_a_row_that_one_field_trains_starts_like_any_other():
    """The unknown row of `b` has training rows."""
    for domain, zero in (("place", {0}), ("", {0, 2, 9, 9 + 4})):
        other = column("b", SIZE, domain=domain, untrained_ids=[0, 1, 4, 5])
        table = layer_of(Schema([column("a", SIZE, domain="place"), other])).table.numpy()
        assert set(np.flatnonzero(~table.any(axis=1)).tolist()) == zero


def test_an_id_out_of_range_is_named_by_its_field():
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"\[dst\] \[9\] \[9\]"):
        layer_of()({**INPUTS, "dst": tf.constant([[3], [9], [6]], tf.int64)})


def test_sizes_that_differ_are_refused():
    schema = Schema([column("a", SIZE, domain="place"), column("b", 8, domain="place")])
    message = "one cardinality.* Received: 'a' with 9 ids and 'b' with 8, .* the domain 'place'"
    with pytest.raises(ValueError, match=message):
        FusedEmbeddings(schema, DIM)


# Beside stock Merlin

BATCH = 16


@pytest.fixture(scope="module")
def joint(tmp_path_factory) -> tuple[Schema, pd.DataFrame]:
    """A stock joint encoding of two columns: its schema, and the encoded log."""
    random = np.random.default_rng(0)
    log = pd.DataFrame(
        {
            "src": random.choice(list("abcdefgh"), 64),
            "dst": random.choice(list("fghijk"), 64),
            "site": random.choice(list("xyz"), 64),
            "click": random.integers(0, 2, 64),
        }
    )
    folder = str(tmp_path_factory.mktemp("joint"))
    encode = nvt.ops.Categorify
    nodes = (
        ([["src", "dst"]] >> encode(out_path=folder, encode_type="joint"))
        + (["site"] >> encode(out_path=folder))
        + (["click"] >> nvt.ops.AddMetadata(tags=[Tags.BINARY_CLASSIFICATION, Tags.TARGET]))
    )
    workflow = nvt.Workflow(nodes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NVTabular's own, about the CPU
        encoded = workflow.fit_transform(nvt.Dataset(log)).to_ddf().compute()
    return workflow.output_schema, encoded


def network(schema: Schema, fused: bool) -> mm.Model:
    features = schema.excluding_by_tag(Tags.TARGET)
    categorical = (
        FusedEmbeddings(features, DIM, stacked=False) if fused else mm.Embeddings(features, dim=DIM)
    )
    body = mm.InputBlockV2(features, categorical=categorical)
    return mm.Model(body, mm.MLPBlock([6]), mm.BinaryOutput("click"), schema=features)


def batches(encoded: pd.DataFrame) -> list[tuple[dict[str, tf.Tensor], tf.Tensor]]:
    pieces = [encoded[i : i + BATCH] for i in range(0, len(encoded), BATCH)]
    return [
        (
            {n: tf.constant(piece[[n]].to_numpy(), tf.int64) for n in ("src", "dst", "site")},
            tf.constant(piece[["click"]].to_numpy(), tf.float32),
        )
        for piece in pieces
    ]


@pytest.mark.parametrize(
    "rule", ["exact", *(pytest.param(rule, marks=pytest.mark.extended) for rule in ("sgd", "lazy"))]
)
def test_an_adopted_joint_encoding_trains_as_stock_merlin_trains_it(joint, rule):
    schema, encoded = joint
    data = batches(encoded)
    hot = Hyperparameters(BATCH, embedding_lr=0.05, dense_lr=0.01, l2=1e-3, warmup_epochs=0.0)
    models = []
    for fused in (True, False):
        model = network(schema, fused)
        model(data[0][0])
        models.append(model)
    ours, stock = models
    (fused_table,) = (x for x in ours._flatten_layers() if isinstance(x, FusedEmbeddings))
    tables = {
        layer.table_name: layer.table
        for layer in stock._flatten_layers()
        if isinstance(layer, mm.EmbeddingTable)
    }
    assert set(tables) == {"src_dst", "site"}

    def stock_rows() -> np.ndarray:
        return np.concatenate([tables[name].embeddings.numpy() for name in ("src_dst", "site")])

    def dense(model: mm.Model) -> list[tf.Variable]:
        embedded = {fused_table.table.ref(), *(t.embeddings.ref() for t in tables.values())}
        return [v for v in model.trainable_variables if v.ref() not in embedded]

    assert fused_table.fields[0] == "src"
    fused_table.table.assign(stock_rows())
    for mine, theirs in zip(dense(ours), dense(stock), strict=True):
        mine.assign(theirs)
    for model in models:
        optimizer = "sgd"
        if rule != "sgd":
            optimizer = CowClipOptimizer.for_model(model, hot, update=rule)
        model.compile(optimizer, metrics=[])
        for batch in data:
            model.train_on_batch(*batch)
    # Sums in another order; rows move by 5e-2 a step.
    np.testing.assert_allclose(fused_table.table, stock_rows(), rtol=1e-4, atol=1e-6)
    for mine, theirs in zip(dense(ours), dense(stock), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(ours(data[0][0]), stock(data[0][0]), rtol=1e-4)
