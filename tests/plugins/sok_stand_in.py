"""The interface of `sparse_operation_kit` (merlin-sok 2.1.0) that we use, in plain TensorFlow.

By file of NVIDIA-Merlin/HugeCTR `sparse_operation_kit/sparse_operation_kit/`:

- `dynamic_variable.py`: reads insert missing rows, writes do not, gradients are by key;
- `distributed_variable.py`: rows on rank key mod N, or all on one rank, by `key_map`;
- `lookup.py`: a rank sums its rows and sends the sums; gradients have each key of a rank once.

`tests/gpu/test_sok.py` compares it with the package itself.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, variable_accessed

from merlin_cowclip.plugins._tensorflow import record as tape
from merlin_cowclip.plugins.distributed.horovod import all_gather_each, all_to_all, ranks


def _target_gpu(mode: str | None) -> int:
    return int(mode.split(":")[1]) if mode is not None and mode.startswith("localized") else -1


class DynamicVariable(ResourceVariable):
    """A hash table of rows; its base, an ordinary variable, is read by nobody."""

    def __init__(
        self,
        dimension,
        initializer="0",
        var_type=None,
        name=None,
        trainable=True,
        key_type=None,
        dtype=None,
        mode=None,
        **kwargs,
    ):
        self.key_type, self.handle_dtype = key_type or tf.int64, dtype or tf.float32
        self.dimension, self.backend_type, self.mode = dimension, var_type, mode
        self.config_dict, self.target_gpu = kwargs, _target_gpu(mode)
        self._first = 0.05 if initializer == "random" else float(initializer)
        super().__init__(
            [[0.0] * dimension], trainable=trainable, name=name, shape=[None, dimension]
        )
        missing = tf.fill([dimension], float("nan"))
        self._rows = tf.lookup.experimental.MutableHashTable(self.key_type, tf.float32, missing)
        self._tf_handle = self._handle
        self._handle = self._rows.resource_handle

    def key_map(self, indices):
        return indices

    def sparse_read(self, indices, name=None):
        variable_accessed(self)
        with tape.stop_recording():
            rows = self._read(tf.cast(indices, self.key_type))
            rows = tf.where(tf.math.is_nan(rows), self._first, rows)
            self._rows.insert(tf.cast(indices, self.key_type), rows)

        def backward(upstream):
            return [tf.IndexedSlices(tf.reshape(upstream, [-1, self.dimension]), indices, None)]

        tape.record_operation("DummyVarSparseRead", [rows], [self.handle], backward)
        return rows

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        return self._write(sparse_delta, lambda before: before - sparse_delta.values)

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        return self._write(sparse_delta, lambda before: sparse_delta.values)

    def _read(self, keys):
        return tf.reshape(self._rows.lookup(keys), [-1, self.dimension])  # in graphs of any rank

    def _write(self, slices, change):
        before = self._read(slices.indices)
        is_there = tf.logical_not(tf.math.is_nan(before[:, 0]))
        keys = tf.boolean_mask(slices.indices, is_there)
        return self._rows.insert(keys, tf.boolean_mask(change(before), is_there))

    def _not_supported(self, *args, **kwargs):
        raise NotImplementedError("not supported in dynamic mode")

    _read_variable_op = value = _dense_var_to_tensor = assign = _not_supported
    _gather_saveables_for_checkpoint = is_initialized = _not_supported


class Variable(ResourceVariable):
    """Rows on rank key mod N, or all on one."""

    def __init__(
        self,
        initial_value=None,
        shape=None,
        initializer=None,
        name=None,
        dtype=None,
        trainable=True,
        mode=None,
    ):
        if initial_value is None:
            initial_value = initializer(shape=shape, dtype=dtype)
        self.target_gpu, self.global_shape = _target_gpu(mode), initial_value.shape
        self.own = slice(ranks().rank, None, ranks().size)
        if self.target_gpu >= 0:
            self.own = slice(None) if self.target_gpu == ranks().rank else slice(0, 0)
        super().__init__(initial_value[self.own], name=name, dtype=dtype, trainable=trainable)

    def key_map(self, indices):
        return indices // ranks().size if self.target_gpu < 0 else indices


def filter_variables(vars):
    tables = [v for v in vars if isinstance(v, (DynamicVariable, Variable))]
    return tables, [v for v in vars if not isinstance(v, (DynamicVariable, Variable))]


def export(var):
    return var._rows.export()


def _gathered(tensor: tf.Tensor) -> tf.Tensor:
    return all_gather_each([tensor])[0] if ranks().size > 1 else tensor


def lookup_sparse(params, sp_ids, combiners):
    assert set(combiners) == {"sum"}
    return [_look_up(*one) for one in zip(params, sp_ids, strict=True)]


def _look_up(param: Any, ids: Any) -> tf.Tensor:
    """Sums of all ranks' lists over the rows that are here; then of this rank's lists, over all."""
    variable_accessed(param)
    with tape.stop_recording():
        number, size = tf.cast(ids.nrows(), tf.int64), ranks().size
        keys, lengths = _gathered(ids.values), _gathered(tf.cast(ids.row_lengths(), tf.int64))
        samples = tf.repeat(tf.range(tf.size(lengths, tf.int64)), lengths)
        owner = keys % size if param.target_gpu < 0 else tf.fill(tf.shape(keys), param.target_gpu)
        is_here = tf.equal(tf.cast(owner, tf.int64), ranks().rank)
        keys, samples = tf.boolean_mask(keys, is_here), tf.boolean_mask(samples, is_here)
        rows = tf.gather(param, param.key_map(keys))
        sums = tf.math.unsorted_segment_sum(rows, samples, tf.size(lengths))
        splits = tf.fill([size], tf.cast(number, tf.int32))  # as many samples on each rank
        sums = all_to_all(sums, splits)[0] if size > 1 else sums
        combined = tf.reduce_sum(tf.reshape(sums, [size, number, param.shape[1]]), axis=0)

    def backward(upstream):
        each, position = tf.unique(keys)
        values = tf.gather(_gathered(upstream), samples)
        sums = tf.math.unsorted_segment_sum(values, position, tf.size(each))
        return [tf.IndexedSlices(sums, param.key_map(each), None)]

    tape.record_operation("LookupForward", [combined], [param.handle], backward)
    return combined
