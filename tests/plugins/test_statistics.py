"""Statistics of steps: against NumPy, for every rule; exact, resumed, and without any effect."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins import (
    CLIP_RULES,
    CowClipAdam,
    CowClipOptimizer,
    Lookup,
    LookupRecorder,
    StepStatistics,
    TableSpec,
)
from merlin_cowclip.plugins._tensorflow import ColumnSchema
from merlin_cowclip.plugins.clipping import RowNorms

from .merlin_models import BATCH, HOT, SCHEMA, built, dataset, fitted, ours, stock_dlrm
from .reference import Settings, clip

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

OFFSETS, FREQUENT = (0, 20, 50), 3.0
L2, FLOOR, THRESHOLD = 1e-3, 1e-3, 0.05
RATIOS = {"adaptive_column": 0.02, "adaptive_field": 3e-4}


def table(name, width, seed):
    """A table of two fields, and its spec."""
    start = np.random.default_rng(seed).normal(size=(OFFSETS[-1], width))
    variable = tf.Variable(start.astype(np.float32))
    columns = (ColumnSchema("a"), ColumnSchema("b"))
    layer = tf.keras.layers.Layer()
    return variable, TableSpec(
        name, layer, lambda: variable, OFFSETS, columns, width, LookupRecorder()
    )


class Bench:
    """Two tables under one `CowClipAdam`, whose gradients the test gives."""

    def __init__(self, rule, update="exact", clipped=(True, True)):
        values = {}
        if rule in RATIOS:
            values = {"clip_ratio": RATIOS[rule], "clip_floor": FLOOR}
        elif rule is not None:
            values = {"clip_threshold": THRESHOLD}
        self.rule, self.clipped = rule, clipped
        self.variables, self.specs = zip(table("t", 4, 0), table("u", 2, 1), strict=True)
        self.optimizer = CowClipAdam(0.01, l2=L2, clip=rule, update=update, **values)
        self.optimizer.bind_tables(dict.fromkeys(self.specs, clipped))
        self.statistics = StepStatistics(dict.fromkeys(self.specs, clipped), FREQUENT)
        self.optimizer.statistics = self.statistics
        self._step = tf.function(self._apply, autograph=False)

    def step(self, ids, values):
        self._step(tf.constant(ids), *map(tf.constant, values))

    def _apply(self, ids, *values):
        gradients = []
        for spec, given in zip(self.specs, values, strict=True):
            for feature, column in zip("ab", tf.unstack(ids, axis=1), strict=True):
                spec.recorder.record(Lookup(feature, column))
            gradients.append(tf.IndexedSlices(given, tf.reshape(ids, [-1])))
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def expected(self, ids, values):
        """A step's sums before it is made: by field of both tables, rare or frequent, and sum."""
        rows, counts = np.unique(ids.ravel(), return_counts=True)
        w = [variable.numpy()[rows].astype(np.float64) for variable in self.variables]
        g = [2 * L2 * of_table for of_table in w]
        for summed, given in zip(g, values, strict=True):
            np.add.at(summed, np.searchsorted(rows, ids.ravel()), given.astype(np.float64))
        norms, weights = (
            np.concatenate([np.linalg.norm(x, axis=1) for x in both]) for both in (g, w)
        )
        number = np.concatenate([rows >= OFFSETS[1], 2 + (rows >= OFFSETS[1])]).astype(int)
        counts, after = np.tile(counts, 2), norms.copy()
        takes_part = np.array(self.clipped)[number % 2]
        settings = Settings(0, 0, self.rule, RATIOS.get(self.rule, 0), FLOOR, THRESHOLD)
        # A rule only knows norms: rows of one entry stand for rows of any width.
        parts = (x[takes_part] for x in (norms[:, None], weights[:, None], counts, number))
        after[takes_part] = clip(*parts, settings)[:, 0]
        clipped = after < norms * (1 - 1e-6)
        columns = np.stack([norms > 0, counts, clipped, clipped * counts, norms, weights], axis=1)
        sums = np.zeros((4, 2, 6))
        np.add.at(sums, (number, (counts >= FREQUENT).astype(int)), columns)
        return sums


def ids_and_values(seed):
    """Row numbers of 40 samples, few enough for repeats, and gradients for both tables."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.integers(0, 20, 40), rng.geometric(0.3, 40).clip(max=30) + 19], axis=1)
    return ids, [rng.normal(size=(80, v)).astype(np.float32) * 0.01 for v in (4, 2)]


def sums_of(fields):
    return np.array([[[*vars(part).values()] for part in (f.rare, f.frequent)] for f in fields])


@pytest.mark.parametrize(
    ("rule", "update", "clipped"),
    [
        *((rule, "exact", (True, True)) for rule in (*CLIP_RULES, None)),
        ("adaptive_column", "lazy", (True, True)),
        ("column", "exact", (False, True)),
    ],
)
def test_sums_by_field(rule, update, clipped):
    bench, expected = Bench(rule, update, clipped), 0
    for step in range(3):
        ids, values = ids_and_values(step)
        expected += bench.expected(ids, values)
        bench.step(ids, values)
    fields = bench.statistics.total()
    assert [(f.table, f.field, f.steps) for f in fields] == [(t, f, 3) for t in "tu" for f in "ab"]
    np.testing.assert_array_equal(sums_of(fields)[:, :, :4], expected[:, :, :4])
    np.testing.assert_allclose(sums_of(fields), expected, rtol=2e-6)
    shares = [part.share_of_rows_clipped for f in fields for part in (f.rare, f.frequent)]
    assert (max(shares) > 0) == (rule is not None)


def statistics_of(norms, counts, frequent_from, on_cpu=True):
    """Of one step of a table, whose rows are all of its first field and all clipped."""
    _, spec = table("t", 4, 0)
    statistics = StepStatistics({spec: (True, True)}, frequent_from)
    norms, counts = tf.constant(norms, tf.float32), tf.constant(counts, tf.float32)
    zeros = tf.zeros_like(norms)
    known = RowNorms(norms, zeros, counts, tf.cast(zeros, tf.int64), 2)
    statistics.add(known, counts, zeros, [zeros[:, tf.newaxis]], [spec], on_cpu)
    return statistics


def test_norms_by_powers_of_two():
    norms = [0.125, 0.2499, 0.25, 6.0, 1e-20, math.nan, 1e9, 0.125]
    statistics = statistics_of(norms, [1, 1, 5, 5, 1, 1, 1, 0], FREQUENT)
    bins = {
        (b.norm, b.rare, b.frequent) for b in statistics.gradient_norms() if b.rare + b.frequent
    }
    assert bins == {(2**-40, 2, 0), (0.125, 2, 0), (0.25, 0, 1), (4.0, 0, 1), (128.0, 1, 0)}
    statistics.reset()
    assert statistics.gradient_norms() == []


@pytest.mark.parametrize("on_cpu", [False, True])
def test_occurrences_of_one_step_stay_exact_beyond_float32(on_cpu):
    """As of lists: 131,072 samples that hold 200 ids each."""
    counts = [131_071.0] * 200 + [1.0] * 1000
    rare = statistics_of(np.ones(1200), counts, math.inf, on_cpu).read()[0].rare
    assert (rare.occurrences, rare.clipped_occurrences) == (200 * 131_071 + 1000,) * 2


@pytest.mark.parametrize(
    ("rule", "update", "what", "bad"),
    [
        ("adaptive_column", "exact", "gradient", math.nan),
        ("adaptive_column", "lazy", "weight", math.inf),
        ("global", "exact", "gradient", math.inf),
    ],
)
def test_what_is_not_finite_is_found_by_table_and_field(rule, update, what, bad):
    bench = Bench(rule, update)
    ids, values = ids_and_values(0)
    ids[0, 1] = 49  # of field b, in no other sample
    if what == "gradient":
        values[1][1, 1] = bad
    else:
        start = bench.variables[1].numpy()
        start[49] = [0.0, bad]
        bench.variables[1].assign(start)
    bench.step(ids, values)
    bench.step(ids[1:], [v[2:] for v in values])  # it stays
    *others, last = bench.statistics.total()
    assert not math.isfinite(getattr(last.rare, f"{what}_norms"))
    for other in others:
        assert math.isfinite(other.all.gradient_norms + other.all.weight_norms)
    assert np.isfinite(sums_of([*others, last])[:, :, :4]).all()
    bench.statistics.reset()
    assert not math.isfinite(getattr(bench.statistics.read()[-1].all, f"{what}_norms"))


@pytest.mark.parametrize(("rule", "update"), [("adaptive_column", "exact"), (None, "lazy")])
def test_padding_of_lists_is_no_id_of_the_batch(rule, update):
    """An id that one sample holds twice counts once, in a table that is not clipped as well."""
    variable, spec = table("t", 4, 0)
    optimizer = CowClipAdam(clip=rule, l2=L2, update=update, clip_ratio=1e-3)
    optimizer.bind_tables({spec: (True, True)})
    optimizer.statistics = statistics = StepStatistics({spec: (True, True)}, FREQUENT)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            spec.recorder.record(Lookup("a", ids, padding=0))
            loss = tf.reduce_sum(tf.gather(variable, ids))
        optimizer.minimize(loss, [variable], tape=tape)

    step(tf.constant([[3, 3, 4], [3, 5, 0], [4, 3, 0], [0, 0, 0]], tf.int64))
    a, _ = statistics.read()
    assert (a.rare.rows, a.rare.occurrences) == (2, 2 + 1)  # 4 and 5
    assert (a.frequent.rows, a.frequent.occurrences) == (1, 3)
    assert a.all.clipped_rows == (3 if rule else 0)
    assert sum(one.rare + one.frequent for one in statistics.gradient_norms()) == 3


@pytest.mark.parametrize(
    ("builder", "rule", "update"),
    [
        (ours, "adaptive_column", "exact"),
        pytest.param(stock_dlrm, "global", "lazy", marks=pytest.mark.extended),
    ],
)
def test_observed_training_is_bit_identical(builder, rule, update):
    threshold = None if CLIP_RULES[rule].adaptive else 1e-3
    hp = HOT.replace(clip=rule, clip_ratio=1e-4, clip_threshold=threshold)
    _, plain = fitted(builder, SCHEMA, hp, steps=4, update=update)
    model, optimizer, statistics = observed(builder, hp, update=update)
    model.fit(dataset(SCHEMA, 4), verbose=0)
    for a, b in zip(plain.owned(), optimizer.owned(), strict=True):
        np.testing.assert_array_equal(a.variable, b.variable)
    for a, b in zip(plain.weights, optimizer.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    fields = statistics.total()
    widths = [spec.width for spec in optimizer.table_specs for _ in spec.range_names]
    for field, width in zip(fields, widths, strict=True):
        assert (field.steps, field.all.occurrences, field.width) == (4, 4 * BATCH, width)
        assert (field.all.clipped_rows > 0) == field.is_clipped == (width > 1)
    assert optimizer.not_finite() == []


def observed(builder=ours, hyperparameters=HOT, **options):
    tf.keras.utils.set_random_seed(0)
    model = built(builder, SCHEMA)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters, **options)
    statistics = optimizer.observe()
    model.compile(optimizer=optimizer, metrics=[])
    return model, optimizer, statistics


def test_intervals_and_a_restart(graphs_rewritten):
    model, _, statistics = observed()
    model.fit(dataset(SCHEMA, 3), verbose=0)
    first = statistics.read()
    assert first == statistics.total()
    statistics.reset()
    assert {field.steps for field in statistics.read()} == {0}
    assert statistics.read()[0].all.gradient_norm is None
    saved = [v.numpy() for v in statistics.variables]
    model.fit(dataset(SCHEMA, 2, first=3), verbose=0)
    second, total = statistics.read(), statistics.total()
    for a, b, both in zip(first, second, total, strict=True):
        assert (a.steps, b.steps, both.steps) == (3, 2, 5)
        assert (a.all + b.all).occurrences == both.all.occurrences == 5 * BATCH
        assert math.isclose((a.rare + b.rare).weight_norms, both.rare.weight_norms)

    again, _, restored = observed()  # as one that is resumed
    again.fit(dataset(SCHEMA, 3), verbose=0)
    for variable, value in zip(restored.variables, saved, strict=True):
        variable.assign(value)
    again.fit(dataset(SCHEMA, 2, first=3), verbose=0)
    assert (restored.read(), restored.total()) == (second, total)


def test_weights_that_are_not_finite_are_named():
    """Also those that no optimizer trains: they break predictions, and no step."""
    norm, head = tf.keras.layers.BatchNormalization(), tf.keras.layers.Dense(3, trainable=False)
    embedding = tf.keras.layers.Embedding(10, 4, name="words")
    model = tf.keras.Sequential([embedding, norm, head])
    optimizer = CowClipOptimizer.for_model(model, HOT)
    optimizer.observe()
    model.compile(optimizer=optimizer, loss="mse")
    data = tf.ones([4, 1], tf.int64), tf.ones([4, 1, 3])
    model.fit(*data, verbose=0)
    assert optimizer.not_finite() == []
    norm.moving_variance.assign(np.full(4, math.inf))
    head.bias.assign(np.full(3, math.nan))
    names = [one.variable.split("/")[-1] for one in optimizer.not_finite()]
    assert names == ["moving_variance:0", "bias:0"]
    embedding.set_weights([np.full((10, 4), math.inf)])
    model.fit(*data, verbose=0)
    of_table = {str(one) for one in optimizer.not_finite() if one.table}
    kinds = ("gradient", "weight")
    assert of_table == {f"a {kind} of the field 'words' in the table 'words'" for kind in kinds}


def test_learning_rates_are_those_of_the_last_step():
    model = built(stock_dlrm, SCHEMA)
    optimizer = CowClipOptimizer.for_model(
        model,
        HOT.replace(warmup_epochs=1.0),
        steps_per_epoch=10,
        embedding_schedule=tf.keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5),
    )
    model.compile(optimizer=optimizer, metrics=[])
    for rate, updates in ((0.01, 3), (0.002, 6)):
        optimizer.learning_rate = rate
        model.fit(dataset(SCHEMA, 3), verbose=0)
        rates = optimizer.learning_rates()
        assert math.isclose(rates.dense, rate * (updates - 1) / 10, rel_tol=1e-4)
        decayed = 0.05 * 0.5 ** (updates - 1)
        assert math.isclose(rates.embedding, decayed * rate / HOT.dense_lr, rel_tol=1e-4)
