"""Every op of a traced update or lookup has a GPU kernel for its types."""

from __future__ import annotations

import contextlib

import pytest
import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins import (
    CLIP_RULES,
    Lookup,
    LookupRecorder,
    StepStatistics,
    TableSpec,
)
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema
from merlin_cowclip.plugins.optimizers import deferred, row_clip
from merlin_cowclip.plugins.optimizers.parts import AdamPart
from merlin_cowclip.plugins.schedules import Proportional

from .gpu_kernels import check_kernels, what_it_waits_for
from .merlin_models import category

pytestmark = pytest.mark.extended


@pytest.fixture
def on_gpu(monkeypatch):
    """Let the update find variables on a GPU; with an argument, on one with deterministic ops."""

    def patch(deterministic):
        for module in (row_clip, deferred):
            monkeypatch.setattr(module, "colocated_with", lambda _: contextlib.nullcontext(False))
        monkeypatch.setattr(row_clip, "_on_gpu", lambda _: True)
        if deterministic:
            monkeypatch.setattr(row_clip, "_scatters_through_host", lambda _: True)

    return patch


def table_and_optimizer(observed=False, **options):
    """A table of two fields, the first one clipped, and the part that a `CowClipOptimizer` has."""
    variable = tf.Variable(tf.random.normal((50, 4)))
    columns = ColumnSchema("a"), ColumnSchema("b")
    layer, recorder = tf.keras.layers.Layer(), LookupRecorder()
    spec = TableSpec("t", layer, lambda: variable, (0, 20, 50), columns, 4, recorder)
    spec.is_tied = True  # for a dense gradient
    optimizer = AdamPart(Proportional(1e-4, lambda: tf.constant(1.0)), **options)
    optimizer._create_all_weights([variable])
    optimizer.bind_tables({spec: (True, False)})
    optimizer.statistics = StepStatistics({spec: (True, False)}, 2.0) if observed else None
    return spec, optimizer


@pytest.mark.parametrize(
    ("clip", "l2", "update", "dense", "deterministic", "observed"),
    [
        *((clip, 1e-5, "exact", False, False, False) for clip in (*CLIP_RULES, None)),
        *(("adaptive_column", 1e-5, mode, False, True, False) for mode in AdamPart.updates),
        # No decay to scatter into, and r < 2λ, where absent rows are clipped too.
        *(("adaptive_column", l2, "exact", False, True, False) for l2 in (0.0, 1.0)),
        *((clip, 1e-5, "exact", True, True, False) for clip in ("adaptive_column", "field")),
        *((clip, 1e-5, "lazy", False, True, True) for clip in ("adaptive_column", "field")),
    ],
)
def test_every_op_of_an_update_has_a_gpu_kernel(
    on_gpu, clip, l2, update, dense, deterministic, observed
):
    on_gpu(deterministic)
    threshold = {"clip_threshold": 1.0} if clip in ("global", "field", "column") else {}
    spec, optimizer = table_and_optimizer(observed, clip=clip, update=update, l2=l2, **threshold)

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, 4], tf.float32),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None], tf.int64),
        ]
    )
    def step(values, ids, splits):
        ragged = tf.RaggedTensor.from_row_splits(ids, splits, validate=False)
        spec.recorder.record(Lookup("list", ragged, padding=0))
        spec.recorder.record(Lookup("one-hot", tf.reshape(ids, [-1, 1])))
        gradient = tf.IndexedSlices(values, ids)
        if dense:
            gradient = tf.math.unsorted_segment_sum(values, ids, 50)
        optimizer.apply_gradients([(gradient, spec.variable)])

    check_kernels(step.get_concrete_function(), deterministic)


@pytest.mark.parametrize("deterministic", [False, True])
def test_every_op_of_catching_up_has_a_gpu_kernel(on_gpu, deterministic):
    on_gpu(deterministic)
    spec, optimizer = table_and_optimizer(update="deferred")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def read(ids):
        optimizer.deferred.catch_up_rows(spec.variable, ids)
        return tf.gather(spec.variable, ids)

    check_kernels(read.get_concrete_function(), deterministic)

    @tf.function(input_signature=[], autograph=False)
    def read_all():
        optimizer.deferred._catch_up_all(spec.variable)

    check_kernels(read_all.get_concrete_function(), deterministic)


LISTS = {
    "ragged": tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
    "ragged b×n×1, int32 splits": tf.RaggedTensorSpec(
        [None, None, 1], tf.int64, ragged_rank=1, row_splits_dtype=tf.int32
    ),
    "padded": tf.TensorSpec([None, None], tf.int64),
}


def traced_lookup(lists, called):
    """A traced step that looks up and differentiates; its tensors; and the recorded checks."""
    schema = Schema([category("user", 10), category("genres", 10, ragged=True)])
    layer = FusedEmbeddings(schema, 4)
    layer.build({})
    (spec,) = layer.table_specs()
    spec.reads_value = not called
    tensors, checks = [], []

    @tf.function(input_signature=[tf.TensorSpec([None, 1], tf.int64), LISTS[lists]])
    def step(user, genres):
        with tf.GradientTape() as tape:
            if called:
                rows = layer({"user": user, "genres": genres})
            else:
                rows = layer.lookup("user", user) + layer.lookup("genres", genres)
            loss = tf.reduce_sum(rows**2)
        gradient = tape.gradient(loss, layer.table)
        # Not the function's own outputs, which wait for all that it does.
        tensors.extend([rows, gradient.values, gradient.indices])
        checks.extend(lookup.check for lookup in spec.recorder.lookups())
        return tensors, checks

    return step.get_concrete_function(), tensors, checks


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize("called", [True, False])
def test_every_op_of_a_lookup_has_a_gpu_kernel(called, lists):
    check_kernels(traced_lookup(lists, called)[0])


@pytest.mark.parametrize("called", [True, False])
def test_rows_do_not_wait_for_the_check_of_ids_and_the_update_does(called):
    _, tensors, checks = traced_lookup("ragged", called)
    for tensor in tensors:
        assert not {"If", "StatelessIf", "Assert"} & what_it_waits_for(tensor)
    assert all("If" in what_it_waits_for(check) for check in checks)
