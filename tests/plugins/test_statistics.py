"""Statistics of steps: against NumPy, for every rule; sticky, exact, and without any effect."""

from __future__ import annotations

import functools
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
from merlin_cowclip.plugins.optimizers.cowclip import AdamPart, DensePart

from .merlin_models import BATCH, SCHEMA, dataset, stock_dlrm
from .test_clipping import oracle
from .test_optimizer import HOT, built, ours

pytestmark = pytest.mark.usefixtures("graphs_as_traced")

OFFSETS, FREQUENT = (0, 20, 50), 3.0
L2, FLOOR, THRESHOLD = 1e-3, 1e-3, 0.05
RATIOS = {"adaptive_column": 0.02, "adaptive_field": 3e-4}
RULES = [*CLIP_RULES, None]


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

    def __init__(self, clip, update="exact", clipped=(True, True), l2=L2):
        given = {"ratio": RATIOS[clip], "floor": FLOOR} if clip in RATIOS else {}
        if clip is not None and not CLIP_RULES[clip].adaptive:
            given = {"threshold": THRESHOLD}
        self.variables, self.specs = zip(table("t", 4, 0), table("u", 2, 1), strict=True)
        self.optimizer = CowClipAdam(
            0.01, l2=l2, clip=clip, update=update, **{f"clip_{k}": v for k, v in given.items()}
        )
        self.optimizer.bind_tables(dict.fromkeys(self.specs, clipped))
        self.statistics = StepStatistics(dict.fromkeys(self.specs, clipped), FREQUENT)
        self.optimizer.statistics = self.statistics
        self.step = tf.function(self._step, autograph=False)

    def _step(self, ids, *values):
        gradients = []
        for spec, given in zip(self.specs, values, strict=True):
            for feature, column in zip("ab", tf.unstack(ids, axis=1), strict=True):
                spec.recorder.record(Lookup(feature, column))
            gradients.append(tf.IndexedSlices(given, tf.reshape(ids, [-1])))
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))


def rows_and_values(seed):
    """Row numbers of 40 samples, few enough for repeats, and gradients for both tables."""
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.integers(0, 20, 40), rng.geometric(0.3, 40).clip(max=30) + 19], axis=1)
    return ids, [rng.normal(size=(80, v)).astype(np.float32) * 0.01 for v in (4, 2)]


def expected(clip, ids, values, weights, exempt=(), l2=L2):
    """Of each field of both tables: for rare and frequent ids, the six sums."""
    flat = ids.ravel()
    rows, counts = np.unique(flat, return_counts=True)
    w = [weight[rows].astype(np.float64) for weight in weights]
    g = [2 * l2 * wt for wt in w]
    for summed, given in zip(g, values, strict=True):
        np.add.at(summed, np.searchsorted(rows, flat), given.astype(np.float64))
    field = (rows >= OFFSETS[1]).astype(int)
    norms = np.concatenate([np.linalg.norm(x, axis=1) for x in g])
    of_rows = np.concatenate([np.linalg.norm(x, axis=1) for x in w])
    number, counts = np.concatenate([field, 2 + field]), np.tile(counts, 2)
    takes_part = ~np.isin(number % 2, exempt)
    after = norms.copy()
    if clip is not None:
        # A rule only knows norms: rows of one entry stand for rows of any width.
        mine = [x[takes_part] for x in (norms[:, None], of_rows[:, None], counts, number)]
        limited = oracle(clip, *mine, r=RATIOS.get(clip, 0), zeta=FLOOR, c=THRESHOLD)
        after[takes_part] = limited[:, 0]
    clipped = after < norms * (1 - 1e-6)
    frequent = counts >= FREQUENT
    return [
        [
            [
                mine.sum(),
                counts[mine].sum(),
                clipped[mine].sum(),
                counts[mine & clipped].sum(),
                norms[mine].sum(),
                of_rows[mine].sum(),
            ]
            for mine in ((number == f) & (frequent == often) for often in (False, True))
        ]
        for f in range(4)
    ]


def sums(fields):
    """The same of what was read."""
    return [[list(vars(part).values()) for part in (f.rare, f.frequent)] for f in fields]


@functools.cache
def bench_and_state(clip, update):
    """One for many cases, since its step takes long to trace; and all that a step may change."""
    bench = Bench(clip, update)
    bench.optimizer._create_all_weights(bench.variables)
    variables = [*bench.variables, *bench.optimizer.weights, *bench.statistics.variables]
    return bench, [(variable, variable.numpy()) for variable in variables]


def bench_of(clip, update):
    """As if it were new."""
    bench, state = bench_and_state(clip, update)
    for variable, value in state:
        variable.assign(value)
    return bench


@pytest.mark.parametrize(
    ("clip", "update"), [*((clip, "exact") for clip in RULES), ("adaptive_column", "lazy")]
)
def test_sums_by_field(clip, update):
    bench, wanted = bench_of(clip, update), 0
    for step in range(3):
        ids, values = rows_and_values(step)
        wanted += np.array(expected(clip, ids, values, [v.numpy() for v in bench.variables]))
        bench.step(tf.constant(ids), *map(tf.constant, values))
    found = bench.statistics.total()
    assert [(f.table, f.field, f.steps) for f in found] == [(t, f, 3) for t in "tu" for f in "ab"]
    np.testing.assert_array_equal(np.array(sums(found))[:, :, :4], wanted[:, :, :4])
    np.testing.assert_allclose(sums(found), wanted, rtol=2e-6)
    shares = [part.share_of_rows_clipped for f in found for part in (f.rare, f.frequent)]
    assert set(shares) == {0.0} if clip is None else max(shares) > 0
    if clip is not None and clip.endswith("column"):  # some rows of a field, others not
        assert any(0 < share < 1 for share in shares)


def test_norms_by_powers_of_two():
    bench, wanted = Bench(None, l2=0.0), np.zeros((48, 2), int)
    for step in range(2):
        ids, values = rows_and_values(step)
        values[0][::7] *= 1e-9
        rows, position, counts = np.unique(ids.ravel(), return_inverse=True, return_counts=True)
        for value in values:
            summed = np.zeros((len(rows), value.shape[1]))
            np.add.at(summed, position, value)
            lower = np.floor(np.log2(np.linalg.norm(summed, axis=1))).astype(int)
            np.add.at(wanted, (np.clip(lower, -40, 7) + 40, (counts >= FREQUENT).astype(int)), 1)
        bench.step(tf.constant(ids), *map(tf.constant, values))
    found = bench.statistics.gradient_norms()
    assert {(one.norm, one.rare, one.frequent) for one in found if one.rare + one.frequent} == {
        (2.0 ** (i - 40), *rows) for i, rows in enumerate(wanted.tolist()) if any(rows)
    }
    bench.statistics.reset()
    assert bench.statistics.gradient_norms() == []


def test_rows_of_exempt_fields_are_never_clipped():
    bench = Bench("column", clipped=(False, True))
    ids, values = rows_and_values(0)
    weights = [v.numpy() for v in bench.variables]
    bench.step(tf.constant(ids), *map(tf.constant, values))
    wanted = expected("column", ids, values, weights, exempt=[0])
    np.testing.assert_allclose(sums(bench.statistics.read()), wanted, rtol=2e-6)
    a, b, *_ = bench.statistics.read()
    assert a.all.clipped_rows == 0 < b.all.clipped_rows


@pytest.mark.parametrize(
    ("clip", "update", "bad", "what"),
    [
        ("adaptive_column", "exact", math.nan, "gradient"),
        ("adaptive_column", "lazy", math.inf, "weight"),
        ("global", "exact", math.inf, "gradient"),
        ("field", "exact", math.nan, "weight"),
        (None, "exact", math.nan, "weight"),
    ],
)
def test_what_is_not_finite_is_found_by_table_and_field(clip, update, bad, what):
    bench = bench_of(clip, update)
    ids, values = rows_and_values(0)
    ids[0, 1] = 49  # of field b, in no other sample
    if what == "gradient":
        values[1][1, 1] = bad
    else:
        start = bench.variables[1].numpy()
        start[49] = 0.0
        start[49, 1] = bad
        bench.variables[1].assign(start)
    bench.step(tf.constant(ids), *map(tf.constant, values))
    bench.step(*(tf.constant(x) for x in (ids[1:], *(v[2:] for v in values))))
    *others, last = bench.statistics.total()
    assert not math.isfinite(getattr(last.rare, f"{what}_norms"))
    for other in others:
        assert math.isfinite(other.all.gradient_norms + other.all.weight_norms)
    assert np.isfinite(sums([*others, last]))[:, :, :4].all()
    bench.statistics.reset()
    assert not math.isfinite(getattr(bench.statistics.read()[-1].all, f"{what}_norms"))


@pytest.mark.parametrize(
    ("clip", "update"), [("adaptive_column", "exact"), ("column", "lazy"), (None, "exact")]
)
def test_padding_of_lists_is_no_id_of_the_batch(clip, update):
    """Its row has a gradient, which is clipped as of count 1, and no sample holds it.

    An id that one sample holds twice is of one sample, in a table that is not clipped as well.
    """
    variable, spec = table("t", 4, 0)
    given = {"clip_ratio": 1e-3}
    if clip is not None and not CLIP_RULES[clip].adaptive:
        given = {"clip_threshold": 1e-3}
    optimizer = CowClipAdam(clip=clip, l2=L2, update=update, **given)
    optimizer.bind_tables({spec: (True, True)})
    statistics = StepStatistics({spec: (True, True)}, FREQUENT)
    optimizer.statistics = statistics
    start = variable.numpy().astype(np.float64)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            spec.recorder.record(Lookup("a", ids, padding=0))
            loss = tf.reduce_sum(tf.gather(variable, ids))
        optimizer.minimize(loss, [variable], tape=tape)

    lists = np.array([[3, 3, 4], [3, 5, 0], [4, 3, 0], [0, 0, 0]])
    step(tf.constant(lists, tf.int64))
    a, _ = statistics.read()
    assert (a.rare.rows, a.rare.occurrences) == (2, 2 + 1)  # 4 and 5
    assert (a.frequent.rows, a.frequent.occurrences) == (1, 3)
    assert a.all.clipped_rows == (3 if clip else 0)
    repeats = {3: 4, 4: 2, 5: 1}
    norms = [np.linalg.norm(n + 2 * L2 * start[i]) for i, n in repeats.items()]
    assert a.all.gradient_norms == pytest.approx(sum(norms), rel=1e-6)
    weights = [np.linalg.norm(start[i]) for i in repeats]
    assert a.all.weight_norms == pytest.approx(sum(weights), rel=1e-6)
    assert sum(one.rare + one.frequent for one in statistics.gradient_norms()) == 3


@pytest.mark.parametrize(
    ("builder", "clip", "update"),
    [
        (ours, "adaptive_column", "exact"),
        (ours, "global", "lazy"),
        (stock_dlrm, "adaptive_column", "exact"),
    ],
)
def test_weights_and_slots_are_the_same_to_the_last_bit(builder, clip, update):
    threshold = None if clip is None or CLIP_RULES[clip].adaptive else 1e-3
    hp = HOT.replace(clip=clip, clip_ratio=1e-4, clip_threshold=threshold)
    states = []
    for observed in (False, True):
        tf.keras.utils.set_random_seed(0)
        model = built(builder, SCHEMA)
        optimizer = CowClipOptimizer.for_model(model, hp, update=update)
        statistics = optimizer.observe() if observed else None
        model.compile(optimizer=optimizer, metrics=[])
        model.fit(dataset(SCHEMA, 4), verbose=0)
        states.append([v.numpy() for v in (*model.variables, *optimizer.weights)])
    for without, with_ in zip(*states, strict=True):
        np.testing.assert_array_equal(without, with_)
    fields = statistics.total()
    widths = [spec.width for spec in optimizer.table_specs for _ in spec.range_names]
    assert len(fields) == (4 if builder is ours else 2)
    for field, width in zip(fields, widths, strict=True):
        assert field.steps == 4
        assert field.all.occurrences == 4 * BATCH
        assert field.width == width
        assert field.is_clipped == (clip is not None and width > 1)
        assert (field.all.clipped_rows > 0) == field.is_clipped
    assert optimizer.not_finite() == []


def observed(schema=SCHEMA, hyperparameters=HOT, update="exact", **options):
    tf.keras.utils.set_random_seed(0)
    model = built(ours, schema)
    optimizer = CowClipOptimizer.for_model(model, hyperparameters, update=update)
    statistics = optimizer.observe(**options)
    model.compile(optimizer=optimizer, metrics=[])
    return model, optimizer, statistics


def test_an_interval_the_whole_and_a_restart(graphs_rewritten):
    model, _, statistics = observed()
    model.fit(dataset(SCHEMA, 3), verbose=0)
    first = statistics.read()
    assert first == statistics.total()
    statistics.reset()
    assert {field.steps for field in statistics.read()} == {0}
    assert statistics.read()[0].all.gradient_norm is None
    saved = [v.numpy() for v in statistics.variables]
    assert len({v.name for v in statistics.variables}) == len(saved)
    model.fit(dataset(SCHEMA, 2, first=3), verbose=0)
    second, whole = statistics.read(), statistics.total()
    assert {field.steps for field in second} == {2}
    for a, b, both in zip(first, second, whole, strict=True):
        assert (a.all + b.all).occurrences == both.all.occurrences == 5 * BATCH
        assert math.isclose((a.rare + b.rare).weight_norms, both.rare.weight_norms)

    again, _, restored = observed()  # as one that is resumed
    again.fit(dataset(SCHEMA, 3), verbose=0)
    for variable, value in zip(restored.variables, saved, strict=True):
        variable.assign(value)
    again.fit(dataset(SCHEMA, 2, first=3), verbose=0)
    assert (restored.read(), restored.total()) == (second, whole)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_occurrences_of_one_step_stay_exact_beyond_float32(on_cpu):
    """As of lists: 131,072 samples that hold 200 ids each."""
    _, spec = table("t", 4, 0)
    statistics = StepStatistics({spec: (True, True)}, math.inf)
    counts = np.r_[np.full(200, 131_071.0), np.ones(1000)].astype(np.float32)
    zeros = tf.zeros([len(counts)])
    counts = tf.constant(counts)
    norms = RowNorms(zeros + 1.0, zeros, counts, tf.cast(zeros, tf.int64), 2)
    statistics.add(norms, counts, zeros, [zeros[:, tf.newaxis]], [spec], on_cpu)
    rare = statistics.read()[0].rare
    assert (rare.occurrences, rare.clipped_occurrences) == (200 * 131_071 + 1000,) * 2


def test_dense_weights_that_are_not_finite_are_named():
    model, optimizer, _ = observed()
    model.fit(dataset(SCHEMA, 1), verbose=0)
    assert optimizer.not_finite() == []
    tables = {spec.variable.ref() for spec in optimizer.table_specs}
    dense = next(v for v in model.trainable_variables if v.ref() not in tables)
    dense.assign(tf.fill(dense.shape, math.nan))
    (found,) = optimizer.not_finite()
    assert str(found) == f"the weight {dense.name!r}"
    model.fit(dataset(SCHEMA, 1), verbose=0)
    found = {str(one) for one in optimizer.not_finite()}
    table = optimizer.table_specs[0].name
    assert f"a gradient of the field 'a' in the table {table!r}" in found


def test_learning_rates_are_those_of_the_last_step(monkeypatch):
    used = {}
    for part in (DensePart, AdamPart):

        def spy(self, dtype, part=part, original=part._decayed_lr):
            used[part] = original(self, dtype)
            return used[part]

        monkeypatch.setattr(part, "_decayed_lr", spy)
    model = built(stock_dlrm, SCHEMA)
    optimizer = CowClipOptimizer.for_model(
        model,
        HOT.replace(warmup_epochs=1.0),
        steps_per_epoch=10,
        embedding_schedule=tf.keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.5),
    )
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=True)
    for rate in (0.01, 0.002):
        optimizer.learning_rate = rate
        model.fit(dataset(SCHEMA, 3), verbose=0)
        assert optimizer.learning_rates() == (float(used[DensePart]), float(used[AdamPart]))
    assert math.isclose(optimizer.learning_rates().dense, 0.002 * 5 / 10, rel_tol=1e-4)


def test_weights_that_no_optimizer_trains_are_looked_at_too():
    """A moving variance that overflowed breaks predictions, and no step."""
    norm = tf.keras.layers.BatchNormalization()
    head = tf.keras.layers.Dense(3, trainable=False)
    table = tf.keras.layers.Embedding(10, 4)
    model = tf.keras.Sequential([table, norm, head])
    optimizer = CowClipOptimizer.for_model(model, HOT.replace(warmup_epochs=0))
    model.compile(optimizer=optimizer, loss="mse")
    model.fit(tf.ones([4, 1], tf.int64), tf.ones([4, 1, 3]), verbose=0)
    assert optimizer.not_finite() == []
    norm.moving_variance.assign(np.full(4, math.inf))
    head.bias.assign(np.full(3, math.nan))
    found = [one.variable.split("/")[-1] for one in optimizer.not_finite()]
    assert found == ["moving_variance:0", "bias:0"]
