"""One global batch on several ranks: what each has of a step becomes what all have.

Each rank has the gradient of the mean loss of its share, an N-th of the batch. The mean of these
gradients is that of the whole batch's mean loss, and counts add up; L2, the clip and Adam come
after it, on every rank alike. Horovod stands behind this file, and behind no other; where it is
installed, Merlin imports and initialises it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.plugins._stack import FuncGraph, has_horovod, tf
from merlin_cowclip.plugins.row_sums import beside, sum_per_row, unique_rows

_NUMBERS = "_merlin_cowclip_numbers"


class Ranks(NamedTuple):
    """Which of several processes this is; `local` ones are those of this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


ALONE = Ranks(0, 1, 0, 1)


def ranks() -> Ranks:
    """This process among those that Horovod has started; alone without it."""
    if not has_horovod:
        return ALONE
    hvd = _horovod()
    if not hvd.is_initialized():
        return ALONE
    return Ranks(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())


def _horovod() -> Any:
    import horovod.tensorflow as hvd

    return hvd


def broadcasts_variables(callback: Any) -> bool:
    """Whether it is Horovod's callback that gives all ranks the weights of one."""
    if not has_horovod:
        return False
    from horovod._keras.callbacks import BroadcastGlobalVariablesCallbackImpl

    return isinstance(callback, BroadcastGlobalVariablesCallbackImpl)


class RowSums(NamedTuple):
    """A table's gradient, summed per row, without L2.

    Attributes:
      indices: U row numbers, each once, int64.
      gradients: U×d, float32 or wider.
      counts: U, samples that hold the row, float32.
      is_whole: whether it is a dense gradient, U = V.
    """

    indices: tf.Tensor
    gradients: tf.Tensor
    counts: tf.Tensor
    is_whole: bool = False


class JoinedRows(tf.IndexedSlices):
    """A table's gradient of the global batch, the same on all ranks.

    It is slices to Keras, whose loss scaling stands between the join and the update.
    """

    def __init__(self, sums: RowSums, variable: tf.Variable) -> None:
        known = variable.shape.is_fully_defined()  # not of a hash table
        shape = tf.constant(variable.shape.as_list(), tf.int64) if known else None
        super().__init__(sums.gradients, sums.indices, shape)
        self.sums = sums
        self._variable = variable

    def and_nan(self, rows: tf.Tensor) -> JoinedRows:
        """The same, and so many rows of NaN."""
        indices, gradients, counts, is_whole = self.sums
        nan = tf.fill([rows, self._variable.shape[1]], tf.constant(float("nan"), gradients.dtype))
        more = RowSums(
            tf.concat([indices, tf.fill([rows], tf.constant(0, indices.dtype))], axis=0),
            tf.concat([gradients, nan], axis=0),
            tf.concat([counts, tf.fill([rows], tf.constant(1, counts.dtype))], axis=0),
            is_whole,
        )
        return JoinedRows(more, self._variable)


@tf.autograph.experimental.do_not_convert
def join_dense(gradients: Sequence[Any]) -> list[Any]:
    """Gradients of dense weights, tensors or slices, as those of the global batch.

    Args:
      gradients: of the mean loss of this rank's share.
    """
    if not gradients:
        return []
    hvd = _horovod()
    slices = [g for g in gradients if isinstance(g, tf.IndexedSlices)]
    tensors = [g for g in gradients if not isinstance(g, tf.IndexedSlices)]
    summed = iter(_sum(hvd, tensors, "dense"))
    parts = [part for g in slices for part in (g.values, g.indices)]
    gathered = iter(_gather(hvd, parts, "dense_slices"))

    def joined(gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return next(summed) / hvd.size()
        values, indices = next(gathered), next(gathered)
        return tf.IndexedSlices(values / hvd.size(), indices, gradient.dense_shape)

    return [joined(gradient) for gradient in gradients]


@tf.autograph.experimental.do_not_convert
def join_rows(shares: Sequence[RowSums], variables: Sequence[tf.Variable]) -> list[JoinedRows]:
    """Tables' gradients of the ranks' shares as those of the global batch.

    Of sparse ones, all ranks' rows are gathered, with their counts as one more column; dense ones
    are all-reduced.

    Args:
      shares: of each table, this rank's.
      variables: the tables.
    """
    hvd = _horovod()
    sparse = [share for share in shares if not share.is_whole]
    dense = [share for share in shares if share.is_whole]
    gathered = iter(_gather(hvd, [part for s in sparse for part in _packed(s)], "rows"))
    summed = iter(_sum(hvd, [part for s in dense for part in (s.gradients, s.counts)], "tables"))

    def joined(share: RowSums, variable: tf.Variable) -> RowSums:
        if share.is_whole:
            gradients, counts = next(summed) / hvd.size(), next(summed)
            return share._replace(gradients=gradients, counts=counts)
        with beside(variable) as on_cpu:
            indices, packed = next(gathered), next(gathered)
            rows, position, _ = unique_rows(indices, variable.shape[0], on_cpu)
            sums = sum_per_row(packed, position, tf.size(rows), on_cpu)
            counts = tf.cast(sums[:, -1], tf.float32)
            return RowSums(rows, sums[:, :-1] / hvd.size(), counts)

    pairs = zip(shares, variables, strict=True)
    return [JoinedRows(joined(share, variable), variable) for share, variable in pairs]


def _packed(share: RowSums) -> tuple[tf.Tensor, tf.Tensor]:
    counts = tf.cast(share.counts, share.gradients.dtype)
    return share.indices, tf.concat([share.gradients, counts[:, tf.newaxis]], axis=1)


def _gather(hvd: Any, tensors: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
    """Each with the same of all ranks behind one another, in the ranks' order."""
    return [hvd.allgather(t, name=_name(f"{what}_{i}")) for i, t in enumerate(tensors)]


def _sum(hvd: Any, tensors: Sequence[tf.Tensor], what: str) -> list[tf.Tensor]:
    return [hvd.allreduce(t, op=hvd.Sum, name=_name(f"{what}_{i}")) for i, t in enumerate(tensors)]


@tf.autograph.experimental.do_not_convert
def send(values: tf.Tensor, sizes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows to the ranks, and those that come from them; on all ranks at once.

    Args:
      values: n×…, behind each other by the rank that they are for.
      sizes: N, how many rows are for each.

    Returns:
      What has come, behind each other by the rank that it is from; and how many from each, N.
    """
    hvd = _horovod()
    return tuple(hvd.alltoall(values, splits=sizes, name=_numbered("sent"), ignore_name_scope=True))


@tf.autograph.experimental.do_not_convert
def over_all(values: tf.Tensor, how: str) -> tf.Tensor:
    """The "sum", "max" or "min" of what the ranks have, value by value; on all ranks at once."""
    hvd = _horovod()
    op = {"sum": hvd.Sum, "max": hvd.Max, "min": hvd.Min}[how]
    return hvd.allreduce(values, op=op, name=_numbered("over_all"), ignore_name_scope=True)


def _name(what: str) -> str:
    return f"cowclip_{what}"  # the same on all ranks: Horovod brings equal names together


def _numbered(what: str) -> str:
    """A name that nothing else in a graph has, and which all ranks give, as they trace the same."""
    if tf.executing_eagerly():
        return _name(what)
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, FuncGraph) and isinstance(graph.outer_graph, FuncGraph):
        graph = graph.outer_graph
    return _name(f"{what}_{next(graph.__dict__.setdefault(_NUMBERS, itertools.count()))}")


def broadcast(variables: Iterable[tf.Variable]) -> None:
    """Give variables the values that they have on rank 0; eagerly, on all ranks at once."""
    hvd = _horovod()
    for number, variable in enumerate(variables):
        value = hvd.broadcast(variable.read_value(), root_rank=0, name=_name(f"state_{number}"))
        variable.assign(value)


def check_same(of_one: Mapping[str, Any], rule: str) -> None:
    """Refuse what the ranks do not have alike; eagerly, on all ranks at once.

    Args:
      of_one: what this rank has, fit for JSON, by name.
      rule: a sentence that says what must be the same.

    Raises:
      ValueError: on all ranks, the first that differs, as each has it.
    """
    first, *others = (dict(_flat(one)) for one in of_all_ranks(of_one))
    for name in dict.fromkeys(itertools.chain(first, *others)):
        values = [one.get(name) for one in (first, *others)]
        if any(value != values[0] for value in values):
            received = (f"{value} on rank {rank}" for rank, value in enumerate(values))
            raise ValueError(f"{rule} Received: {name} {', '.join(received)}.")


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What is in a mapping, or in a list of such, by the names that lead there."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        inner = enumerate(value)
    else:
        yield name.strip(), value
    for key, one in inner:
        yield from _flat(one, f"{name} {key}")


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank has, fit for JSON, by rank; eagerly, on all ranks at once."""
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = gathered(np.array([len(mine)], np.int64))
    texts = np.split(gathered(mine), np.cumsum(sizes)[:-1])
    return [json.loads(text.tobytes()) for text in texts]


@contextlib.contextmanager
def done_for_all(what: str) -> Iterator[None]:
    """What one rank does within it is done for all at its end; eagerly, on all ranks at once.

    Args:
      what: it is.

    Raises:
      RuntimeError: on the others, where one could not do it, which ends with its own error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    said = of_all_ranks(None if failure is None else str(failure) or type(failure).__name__)
    if failure is not None:
        raise failure
    for rank, sentence in enumerate(said):
        if sentence is not None:
            raise RuntimeError(f"All ranks end as rank {rank}, which could not {what}: {sentence}")


def gathered(values: np.ndarray) -> np.ndarray:
    """All ranks' arrays behind one another; eagerly, on all ranks at once."""
    with tf.device("CPU:0"):
        found = _horovod().allgather(tf.constant(values), name=_name("values"))
    return np.asarray(found)
