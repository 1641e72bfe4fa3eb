"""The update path can live on a GPU: every op of a traced update has a GPU kernel for its types."""

from __future__ import annotations

import contextlib
import itertools

import pytest
import tensorflow as tf

from merlin_cowclip.plugins import (
    CLIP_RULES,
    Lookup,
    LookupRecorder,
    StepStatistics,
    TableSpec,
)
from merlin_cowclip.plugins._tensorflow import ColumnSchema
from merlin_cowclip.plugins.optimizers import deferred, row_clip
from merlin_cowclip.plugins.optimizers.cowclip import AdamPart
from merlin_cowclip.plugins.schedules import Proportional

from .gpu_kernels import check_kernels

pytestmark = pytest.mark.extended


def spec_of(variable, recorder, offsets):
    columns = tuple(ColumnSchema(f"f{i}") for i in range(len(offsets) - 1))
    layer = tf.keras.layers.Layer()
    spec = TableSpec("t", layer, lambda: variable, offsets, columns, 4, recorder)
    spec.is_tied = True  # for a dense gradient
    return spec


def part(**options):
    """`CowClipAdam` as a `CowClipOptimizer` has it."""
    return AdamPart(Proportional(1e-4, lambda: tf.constant(1.0)), **options)


def on_a_gpu(variable):
    """As `row_ops.colocated_with` finds it there."""
    return contextlib.nullcontext(False)


def on_a_deterministic_gpu(variable):
    """As `row_clip._scatters_through_host` finds it there."""
    return True


RULES = [*CLIP_RULES, None]
CASES = [
    *itertools.product(RULES, [1e-5], ["exact"], ["recorded"], [False], [False]),
    *itertools.product(
        ["adaptive_column"], [1e-5], ["exact", "lazy"], ["repeats"], [False], [False]
    ),
    # No decay to scatter into, and r < 2λ, where absent rows are clipped too.
    *itertools.product(
        ["adaptive_column"], [1e-5, 0.0], AdamPart.updates, ["recorded"], [True], [False]
    ),
    *itertools.product(
        ["adaptive_column"], [1.0], ["exact", "lazy"], ["recorded"], [True], [False]
    ),
    *itertools.product(["adaptive_column", "field"], [1e-5], ["exact"], ["dense"], [True], [False]),
    *itertools.product(
        ["field", "adaptive_column"], [1e-5], ["lazy"], ["recorded"], [True], [True]
    ),
]


@pytest.mark.parametrize(("clip", "l2", "update", "counting", "deterministic", "observed"), CASES)
def test_every_op_of_an_update_has_a_gpu_kernel(
    monkeypatch, clip, l2, update, counting, deterministic, observed
):
    monkeypatch.setattr(row_clip, "colocated_with", on_a_gpu)
    monkeypatch.setattr(deferred, "colocated_with", on_a_gpu)
    monkeypatch.setattr(row_clip, "_on_gpu", lambda variable: True)
    if deterministic:
        monkeypatch.setattr(row_clip, "_scatters_through_host", on_a_deterministic_gpu)
    variable = tf.Variable(tf.random.normal((50, 4)))
    threshold = {"clip_threshold": 1.0} if clip in ("global", "field", "column") else {}
    optimizer = part(clip=clip, update=update, l2=l2, **threshold)
    optimizer._create_all_weights([variable])
    recorder = LookupRecorder()
    if counting != "repeats":
        spec = spec_of(variable, recorder, (0, 20, 50))
        tables = {spec: (True, False)}
        optimizer.bind_tables(tables)
        optimizer.statistics = StepStatistics(tables, 2.0) if observed else None

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.float32),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def step(values, ids, splits):
        gradient = tf.IndexedSlices(values, ids)
        if counting != "repeats":
            ragged = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
            recorder.record(Lookup("list", ragged, padding=0))
            recorder.record(Lookup("one-hot", tf.reshape(ids, [-1, 1])))
        if counting == "dense":
            gradient = tf.math.unsorted_segment_sum(values, ids, 50)
        optimizer.apply_gradients([(gradient, variable)])

    check_kernels(step.get_concrete_function(), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_op_of_catching_up_has_a_gpu_kernel(monkeypatch, deterministic):
    monkeypatch.setattr(row_clip, "colocated_with", on_a_gpu)
    monkeypatch.setattr(deferred, "colocated_with", on_a_gpu)
    monkeypatch.setattr(row_clip, "_on_gpu", lambda variable: True)
    if deterministic:
        monkeypatch.setattr(row_clip, "_scatters_through_host", on_a_deterministic_gpu)
    variable = tf.Variable(tf.random.normal((50, 4)))
    optimizer = part(update="deferred")
    optimizer.bind_tables({spec_of(variable, LookupRecorder(), (0, 50)): (True,)})
    optimizer._create_all_weights([variable])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def read(ids):
        optimizer.deferred.catch_up_rows(variable, ids)
        return tf.gather(variable, ids)

    check_kernels(read.get_concrete_function(), deterministic)

    @tf.function(input_signature=[], autograph=False)
    def read_all():
        optimizer.deferred._catch_up_all(variable)

    check_kernels(read_all.get_concrete_function(), deterministic)
