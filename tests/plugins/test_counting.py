"""Counts against a loop over the samples: which lookups are the same ids, which are others."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins._tensorflow import Schema, mm
from merlin_cowclip.plugins.embeddings import counting
from merlin_cowclip.plugins.embeddings.counting import Lookup
from merlin_cowclip.plugins.embeddings.discovery import find_tables

from .merlin_models import category

V, D = 30, 3
# AutoGraph passes by what Keras calls, as it calls the optimizers that count.
count_all_rows = tf.autograph.experimental.do_not_convert(counting.count_all_rows)
count_samples = tf.autograph.experimental.do_not_convert(counting.count_samples)


class Holder(tf.keras.Model):
    """A model that is one table of Merlin's, built."""

    def __init__(self, *features, combiner=None, ragged=False):
        super().__init__()
        domain = "shared" if len(features) > 1 else ""
        columns = [category(name, V, domain=domain, ragged=ragged) for name in features]
        self.table = mm.EmbeddingTable(D, *Schema(columns), sequence_combiner=combiner)
        self.table.build(tf.TensorShape([None, 1]))
        (self.spec,) = find_tables(self)

    def call(self, inputs):
        return self.table(inputs)

    @property
    def variable(self):
        return self.spec.variable


def ragged(rows):
    """A list column as Merlin prepares it, b×(n)×1."""
    return tf.expand_dims(tf.ragged.constant(rows, tf.int64, ragged_rank=1), -1)


def column(ids):
    return tf.constant(ids, tf.int64)[:, tf.newaxis]


def added_up(*batches):
    """`cnt` by a loop: a sample is an id or a list of ids, and counts once for each."""
    counts = {}
    for batch in batches:
        for sample in batch:
            for i in {sample} if isinstance(sample, int) else set(sample):
                counts[i] = counts.get(i, 0) + 1
    return counts


def gradient_of(holder, forward):
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.square(out)) for out in forward())
    return tape.gradient(loss, holder.variable)


def counted(holder, gradient):
    rows, _, counts = count_samples(holder.spec, gradient.indices)
    return rows, counts


def as_dict(rows, counts):
    return dict(zip(rows.numpy().tolist(), counts.numpy().astype(int).tolist(), strict=True))


def run(step, in_graph):
    """A step's rows and counts; in a graph the ids are constants of it, as good as a batch."""
    return as_dict(*(tf.function(step)() if in_graph else step()))


A, B, C = [1, 1, 1, 1], [1, 2], [5, 2, 9]
LISTS, MORE = [[1, 1, 2], [], [2]], [[2, 3], [3, 3, 3, 3]]

ONE_HOT = {
    "one lookup": (lambda t, x: [t(x)], added_up(A)),
    "the same tensor twice": (lambda t, x: [t(x), t(x)], added_up(A)),
    "past Merlin's table, as a tied output does": (
        lambda t, x: [t(x), t.table(column(C))],
        added_up(A, C),
    ),
    "micro-batches": (lambda t, x: [t(x), t(column(B))], added_up(A, B)),
    "one tensor, cast and reshaped for each lookup": (
        lambda t, x: [t(tf.cast(x, tf.int32)), t(tf.cast(x, tf.int32)), t(tf.reshape(x, [-1, 1]))],
        added_up(A, A, A),
    ),
    "ids and negatives": (lambda t, x: [t(x), t(column(C)), t(x)], added_up(A, C)),
}


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("case", ONE_HOT)
def test_one_hot_ids_of_one_feature(case, in_graph):
    forward, expected = ONE_HOT[case]
    holder = Holder("item")

    def step():
        x = column(A)
        return counted(holder, gradient_of(holder, lambda: forward(holder.table, x)))

    assert run(step, in_graph) == expected


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("combiner", ["mean", tf.keras.layers.Lambda(lambda x: x), "padded"])
def test_lists_looked_up_again_and_other_lists(combiner, in_graph):
    """A combiner by name makes ids unique before the lookup and reads row 0 for an empty list."""
    name = combiner if isinstance(combiner, str) and combiner != "padded" else None
    holder = Holder("item", combiner=name, ragged=True)

    def ids(lists):
        found = ragged(lists)
        return found.to_tensor() if combiner == "padded" else found

    def step():
        x = ids(LISTS)
        forward = lambda: [  # noqa: E731
            getattr(out, "flat_values", out)
            for out in (holder.table(x), holder.table(ids(MORE)), holder.table(x))
        ]
        return counted(holder, gradient_of(holder, forward))

    found = run(step, in_graph)
    assert {i: n for i, n in found.items() if i} == added_up(LISTS, MORE)
    assert not found.get(0)  # padding, or an empty list's


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("kind", ["sparse", "ragged", "of parts"])
def test_one_list_looked_up_twice_counts_once(kind, in_graph):
    """Also where each lookup makes its own ragged tensor of the list's values."""
    holder = Holder("item", combiner="mean", ragged=True)

    def step():
        given = ragged(LISTS)
        again = tf.RaggedTensor.from_row_splits(given.values, given.row_splits)
        first, second = {
            "sparse": lambda: (given.to_sparse(),) * 2,
            "ragged": lambda: (given, given),
            "of parts": lambda: (given, again),
        }[kind]()
        forward = lambda: [holder.table(first), holder.table(second)]  # noqa: E731
        return counted(holder, gradient_of(holder, forward))

    found = run(step, in_graph)
    assert {i: n for i, n in found.items() if i} == added_up(LISTS)


@pytest.mark.parametrize("rows", [tf.constant, tf.ragged.constant])
def test_ids_beyond_the_table_count_for_no_other_row(rows):
    """On a GPU such a list is read, as zeros, and its step goes on."""
    lookup = Lookup("l", rows([[7, 2], [3, 3], [2, -1]], tf.int64))
    assert lookup.rows_per_sample(5).numpy().tolist() == [2, 3, 2]


@pytest.mark.parametrize("in_graph", [True, False])
def test_features_of_one_table_add_up_even_where_their_ids_are_equal(in_graph):
    holder = Holder("buyer", "seller")

    def step():
        x = {"buyer": column(A), "seller": column(A) if in_graph else tf.identity(column(A))}
        return counted(holder, gradient_of(holder, lambda: holder.table(x).values()))

    assert run(step, in_graph) == added_up(A, A)


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("micro", [(A, A), (A, B, C)], ids=str)
def test_gradients_of_several_tapes_applied_once(micro, in_graph):
    """Gradient accumulation; also over equal batches, which are other samples all the same."""
    holder = Holder("item")

    def step(*batches):
        gradients = [gradient_of(holder, lambda x=x: [holder.table(x)]) for x in batches]
        indices = tf.concat([g.indices for g in gradients], axis=0)
        values = tf.concat([g.values for g in gradients], axis=0)
        rows, position, counts = count_samples(holder.spec, indices)
        np.testing.assert_array_equal(tf.gather(rows, position), indices) if not in_graph else None
        assert values.shape[-1] == D
        return rows, counts

    batches = [column(x) for x in micro]
    assert as_dict(*(tf.function(step) if in_graph else step)(*batches)) == added_up(*micro)


def test_several_updates_in_one_graph_count_their_own():
    holder = Holder("item")

    @tf.function
    def steps():
        return [counted(holder, gradient_of(holder, lambda x=x: [holder.table(column(x))]))
                for x in (A, C)]  # fmt: skip

    assert [as_dict(*found) for found in steps()] == [added_up(A), added_up(C)]


def test_eagerly_what_no_tape_records_is_not_counted():
    """An evaluation between two steps."""
    holder = Holder("item")
    found = gradient_of(holder, lambda: [holder.table(column(B))])
    holder.table(column(C))
    assert as_dict(*counted(holder, found)) == added_up(B)


def test_eagerly_a_feature_that_is_absent_does_not_count_from_the_step_before():
    holder = Holder("buyer", "seller")
    both = {"buyer": column(A), "seller": column(C)}
    for features, expected in ((both, added_up(A, C)), ({"buyer": column(B)}, added_up(B))):
        gradient = gradient_of(holder, lambda x=features: holder.table(x).values())
        assert as_dict(*counted(holder, gradient)) == expected


def test_eagerly_a_pass_that_was_not_applied_is_passed_over():
    """As loss scaling leaves a step out."""
    holder = Holder("item")
    gradient_of(holder, lambda: [holder.table(column(C))])
    gradient = gradient_of(holder, lambda: [holder.table(column(A))])
    assert as_dict(*counted(holder, gradient)) == added_up(A)
    assert not holder.spec.recorder.lookups()


def test_a_branch_counts_what_its_outer_graph_looked_up():
    """Loss scaling applies gradients inside a tf.cond."""
    holder = Holder("item", combiner="mean", ragged=True)

    @tf.function
    def step(go):
        gradient = gradient_of(holder, lambda: [holder.table(ragged(LISTS))])
        none = (tf.zeros([0], tf.int64), tf.zeros([0]))
        return tf.cond(go, lambda: counted(holder, gradient), lambda: none)

    found = as_dict(*step(tf.constant(True)))
    assert {i: n for i, n in found.items() if i} == added_up(LISTS)


def joined(holder, forward, more):
    """A gradient that another rank's rows were joined to."""
    gradient = gradient_of(holder, forward)
    return tf.IndexedSlices(
        tf.concat([gradient.values, tf.ones([len(more), D])], axis=0),
        tf.concat([tf.cast(gradient.indices, tf.int64), tf.constant(more, tf.int64)], axis=0),
    )


REFUSED = {
    "one-hot ids, joined": lambda h: joined(h, lambda: [h.table(column(A))], [3, 3]),
    "never looked up": lambda h: tf.IndexedSlices(tf.ones([2, D]), tf.constant([1, 2])),
    "a reader of the variable": lambda h: gradient_of(
        h, lambda: [h.table(column(A)), tf.gather(h.variable, [1, 1, 2])]
    ),
}


@pytest.mark.parametrize("in_graph", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_gradients_that_came_from_elsewhere_are_refused(case, in_graph):
    holder = Holder("item")

    def step():
        return counted(holder, REFUSED[case](holder))

    refused = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(refused, match="no lookup of the table|rows"):
        run(step, in_graph)


@pytest.mark.parametrize("in_graph", [True, False])
def test_a_dense_gradient_counts_the_ids_looked_up_and_no_other_rows(in_graph):
    """A tied output reads the whole table; the same ids again count once here too."""
    holder = Holder("item")

    def step():
        x, hidden = column(A), tf.ones([4, D])
        forward = lambda: [  # noqa: E731
            holder.table(x),
            holder.table(column(C)),
            holder.table(x),
            tf.matmul(hidden, holder.variable, transpose_b=True),
        ]
        gradient = 0.5 * gradient_of(holder, forward)
        assert isinstance(gradient, tf.Tensor)
        return count_all_rows(holder.spec)

    counts = (tf.function(step)() if in_graph else step()).numpy()
    expected = np.zeros(V)
    for i, n in added_up(A, C).items():
        expected[i] = n
    np.testing.assert_array_equal(counts, expected)
