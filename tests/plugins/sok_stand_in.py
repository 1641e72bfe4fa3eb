"""What `sparse_operation_kit` does, on a CPU: its tables and lookups, in plain TensorFlow.

Its interface is that of merlin-sok 2.1.0 (PyPI's source; 2.0.0 differs in no part that is here but
DynamicVariable's default var_type), of NVIDIA-Merlin/HugeCTR
`sparse_operation_kit/sparse_operation_kit/`, by file:

- `dynamic_variable.py`: `DynamicVariable`, its arguments, properties, what it refuses to do, reads
  that insert what is missing, writes that do not (`kit_src/variable/impl/det_variable.cu`,
  `hkv_variable.cu`), gradients by key, `export`, `assign`;
- `distributed_variable.py`: `Variable`, `DistributedVariable`, `LocalizedVariable`, `key_map`;
- `lookup.py`: `lookup_sparse`: keys gathered on all ranks, a rank's own being key mod N
  (`HugeCTR/embedding/operators/index_calculation.cu`), rows combined there and sent by all-to-all,
  gradients of single keys, summed over samples and ranks (`LookupBackward` in
  `kit_src/lookup/kernels/embedding_collection.cc`); and `all2all_dense_embedding`, whose gradients
  repeat keys;
- `communication.py`: Horovod between the ranks; `__init__.py`: `filter_variables`, `init`.

Left out: weights of ids, eviction, dump and load, `OptimizerWrapper`. `tests/gpu/test_sok.py` holds
this against the package itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable, variable_accessed

from merlin_cowclip.plugins._tensorflow import record as tape

try:
    import horovod.tensorflow as hvd
except ImportError:
    hvd = None

_made = {"static": 0, "dynamic": 0}


def _several() -> bool:
    return hvd is not None and hvd.is_initialized() and hvd.size() > 1


def num_gpus() -> int:
    return hvd.size() if _several() else 1


def global_gpu_id() -> int:
    return hvd.rank() if _several() else 0


def alltoall(tensor: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return hvd.alltoall(tensor, splits) if _several() else (tensor, splits)


def allgather(tensor: tf.Tensor) -> tf.Tensor:
    return hvd.allgather(tensor) if _several() else tensor


def init(comm_tool: str = "horovod", use_legacy_optimizer: bool = True) -> None:
    raise RuntimeError("Communication tool cannot be set more than once")  # Merlin has done so


def _localized(mode: str | None) -> int:
    return int(mode.split(":")[1]) if mode is not None and mode.startswith("localized") else -1


class DynamicVariable(ResourceVariable):
    """A hash table of rows; its base, an ordinary variable, is read by nobody."""

    def __init__(
        self,
        dimension,
        initializer=None,
        var_type=None,
        name=None,
        constraint=None,
        trainable=True,
        key_type=None,
        dtype=None,
        mode=None,
        **kwargs,
    ):
        if name is None:
            name = f"sok_dynamic_Variable_{_made['dynamic']}"
            _made["dynamic"] += 1
        self.key_type = tf.int64 if key_type is None else key_type
        self.handle_dtype = tf.float32 if dtype is None else dtype
        self.dimension = dimension
        self.backend_type = "hybrid" if var_type is None else var_type
        self.config_dict = kwargs
        self.mode = mode
        self.initializer_str = "" if initializer is None else initializer
        super().__init__(
            initial_value=[[0.0] * dimension],
            trainable=trainable,
            name=name,
            dtype=self.handle_dtype,
            constraint=constraint,
            shape=[None, dimension],
        )
        nothing = tf.fill([dimension], float("nan"))
        self._rows = tf.lookup.experimental.MutableHashTable(self.key_type, tf.float32, nothing)
        self._tf_handle = self._handle
        self._handle = self._rows.resource_handle

    @property
    def size(self):
        return tf.stack([self._rows.size(), self.dimension])

    @property
    def target_gpu(self):
        return _localized(self.mode)

    @property
    def num_gpus(self):
        return num_gpus()

    def key_map(self, indices):
        return indices

    def sparse_read(self, indices, name=None):
        variable_accessed(self)
        if indices.dtype == tf.int32:
            indices = tf.cast(indices, tf.int64)
        with tape.stop_recording():
            rows = self._read(indices)

        def backward(upstream):
            return [tf.IndexedSlices(tf.reshape(upstream, [-1, self.dimension]), indices, None)]

        tape.record_operation("DummyVarSparseRead", [rows], [self.handle], backward)
        return rows

    def _read(self, keys):
        keys, position = tf.unique(keys)
        rows = tf.reshape(self._rows.lookup(keys), [-1, self.dimension])
        if self.initializer_str in ("", "random"):
            most = 0.05  # so it is with "hbm"; "hybrid" draws from N(0, 1)
            first = tf.random.uniform(tf.shape(rows), -most, most)
        else:
            first = tf.fill(tf.shape(rows), float(self.initializer_str))
        rows = tf.where(tf.math.is_nan(rows), first, rows)
        self._rows.insert(keys, rows)
        return tf.gather(rows, position)

    def _write(self, keys, change):
        """Rows that are there, each once, by a function of what they were."""
        if self.key_type != keys.dtype:
            raise TypeError(f"keys of {keys.dtype} for a table of {self.key_type}")
        before = tf.reshape(self._rows.lookup(keys), [-1, self.dimension])
        held = tf.logical_not(tf.math.is_nan(before[:, 0]))
        return self._rows.insert(tf.boolean_mask(keys, held), tf.boolean_mask(change(before), held))

    def scatter_sub(self, sparse_delta, use_locking=False, name=None):
        negative = tf.IndexedSlices(-sparse_delta.values, sparse_delta.indices)
        return self.scatter_add(negative, use_locking, name)

    def scatter_add(self, sparse_delta, use_locking=False, name=None):
        if not isinstance(sparse_delta, tf.IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {sparse_delta}")
        keys, position = tf.unique(sparse_delta.indices)
        sums = tf.math.unsorted_segment_sum(sparse_delta.values, position, tf.size(keys))
        return self._write(keys, lambda before: before + sums)

    def scatter_update(self, sparse_delta, use_locking=False, name=None):
        if not isinstance(sparse_delta, tf.IndexedSlices):
            raise TypeError(f"sparse_delta is not IndexedSlices: {sparse_delta}")
        return self._write(sparse_delta.indices, lambda before: sparse_delta.values)

    def _not_supported(self, *args, **kwargs):
        raise NotImplementedError("not supported in dynamic mode")

    __deepcopy__ = __reduce__ = to_proto = set_shape = is_initialized = _not_supported
    _read_variable_op = value = _dense_var_to_tensor = _not_supported
    _gather_saveables_for_checkpoint = gather_nd = assign = assign_add = _not_supported
    scatter_max = scatter_min = scatter_mul = scatter_nd_sub = scatter_nd_update = _not_supported


def Variable(*args: Any, **kwargs: Any) -> tf.Variable:  # noqa: N802
    mode = kwargs.pop("mode", None)
    kwargs["global_gpu_id"] = global_gpu_id()
    if mode is None or mode == "distributed":
        return DistributedVariable(*args, num_gpus=num_gpus(), **kwargs)
    if mode.startswith("localized"):
        return LocalizedVariable(*args, target_gpu=_localized(mode), **kwargs)
    raise RuntimeError(f"Not supported mode: {mode}")


class _Static(ResourceVariable):
    def _begin(self, mine: slice, initial_value, shape, initializer, name, **kwargs):
        if name is None:
            name = f"sok_static_Variable_{_made['static']}"
            _made["static"] += 1
        if initial_value is None:
            self.global_shape = shape
            number = len(range(shape[0])[mine])
            initial_value = initializer(shape=(number, shape[1]), dtype=kwargs.get("dtype"))
        else:
            initial_value = np.asarray(initial_value)
            self.global_shape = initial_value.shape
            initial_value = tf.constant(initial_value[mine], kwargs.get("dtype"))
        super().__init__(initial_value=initial_value, name=name, **kwargs)


class DistributedVariable(_Static):
    def __init__(
        self,
        initial_value=None,
        trainable=None,
        name=None,
        dtype=None,
        shape=None,
        initializer=None,
        global_gpu_id=None,
        num_gpus=None,
    ):
        self.global_gpu_id, self.num_gpus, self.target_gpu = global_gpu_id, num_gpus, -1
        mine = slice(global_gpu_id, None, num_gpus)
        self._begin(mine, initial_value, shape, initializer, name, trainable=trainable, dtype=dtype)

    def key_map(self, indices):
        return indices // self.num_gpus


class LocalizedVariable(_Static):
    def __init__(
        self,
        initial_value=None,
        trainable=None,
        name=None,
        dtype=None,
        shape=None,
        initializer=None,
        global_gpu_id=None,
        target_gpu=None,
    ):
        self.global_gpu_id, self.num_gpus, self.target_gpu = global_gpu_id, num_gpus(), target_gpu
        if target_gpu >= self.num_gpus:
            raise RuntimeError(f"There are only {self.num_gpus} GPU(s)")
        mine = slice(None) if target_gpu == global_gpu_id else slice(0, 0)
        self._begin(mine, initial_value, shape, initializer, name, trainable=trainable, dtype=dtype)

    def key_map(self, indices):
        return indices


def filter_variables(vars):
    kinds = (DynamicVariable, DistributedVariable, LocalizedVariable)
    sok_vars = [v for v in vars if isinstance(v, kinds)]
    return sok_vars, [v for v in vars if not isinstance(v, kinds)]


def export(var):
    return var._rows.export()


def assign(var, indices, values):
    var._rows.insert(indices, values)


def lookup_sparse(params, sp_ids, sp_weights=None, combiners=None):
    if sp_weights is not None:
        raise NotImplementedError
    if not isinstance(sp_ids, (list, tuple)):
        return lookup_sparse([params], [sp_ids], None, combiners and [combiners])[0]
    combiners = ["mean"] * len(params) if combiners is None else combiners
    targets = {param.target_gpu for param in params}
    if -1 not in targets and len(targets) < num_gpus():
        raise Exception("every gpu must have table!")
    return [_look_up(*one) for one in zip(params, sp_ids, combiners, strict=True)]


def _look_up(param, sp_id, combiner):
    """Of all ranks' lists, what this rank's rows come to; then of this rank's lists, all of it."""
    if isinstance(sp_id, tf.SparseTensor):
        sp_id = tf.RaggedTensor.from_sparse(sp_id)
    variable_accessed(param)
    with tape.stop_recording():
        number = tf.cast(sp_id.nrows(), tf.int64)
        lengths = tf.cast(sp_id.row_lengths(), tf.int64)
        keys, of_all = allgather(sp_id.values), allgather(lengths)
        if isinstance(param, DynamicVariable):
            keys = tf.cast(keys, param.key_type)
        samples = tf.repeat(tf.range(tf.size(of_all, tf.int64)), of_all)
        if param.target_gpu < 0:
            mine = tf.equal(keys % num_gpus(), global_gpu_id())
        else:
            mine = tf.fill(tf.shape(keys), param.target_gpu == global_gpu_id())
        keys, samples = tf.boolean_mask(keys, mine), tf.boolean_mask(samples, mine)
        rows = tf.gather(param, param.key_map(keys))
        partial = tf.math.unsorted_segment_sum(rows, samples, tf.size(of_all))
        splits = tf.fill([num_gpus()], tf.cast(number, tf.int32))  # as many samples on each rank
        received, _ = alltoall(partial, splits)
        found = tf.reduce_sum(tf.reshape(received, [num_gpus(), number, param.shape[1]]), axis=0)
        scale = tf.cast(lengths, found.dtype)[:, None] if combiner == "mean" else 1.0
        found = tf.math.divide_no_nan(found, scale)

    def backward(upstream):
        sent = allgather(tf.math.divide_no_nan(upstream, scale))
        unique_keys, position = tf.unique(keys)
        values = tf.gather(sent, samples)
        sums = tf.math.unsorted_segment_sum(values, position, tf.size(unique_keys))
        return [tf.IndexedSlices(sums, param.key_map(unique_keys), None)]

    tape.record_operation("LookupForward", [found], [param.handle], backward)
    return found


def all2all_dense_embedding(param, indices):
    owner = tf.cast(indices % param.num_gpus, tf.int32)
    order = tf.argsort(owner, stable=True)
    splits = tf.math.bincount(owner, minlength=param.num_gpus, maxlength=param.num_gpus)
    ex_indices, rsplits = alltoall(tf.gather(indices, order), splits)
    embeddings = tf.nn.embedding_lookup(param, param.key_map(ex_indices))
    ex_embeddings, _ = alltoall(embeddings, rsplits)
    return tf.gather(ex_embeddings, tf.argsort(order))
