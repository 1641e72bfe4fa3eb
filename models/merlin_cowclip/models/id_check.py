# SPDX-License-Identifier: Apache-2.0
"""Ids out of range: rows that are safe to read, and an error that nothing waits for.

On a GPU a check is dear only where something waits for its answer, which is the host's to give. So
ids out of range are read as padding, on the device, and the error is raised beside that by whoever
sees the answer: the lookup itself never waits for it, the optimizer's update does.
"""

from __future__ import annotations

from collections.abc import Sequence

from merlin_cowclip.models.vocabulary import PADDING_ID
from merlin_cowclip.plugins._tensorflow import tf


class IdCheck:
    """Checks the ids of one call of a layer, field by field, with one answer for all."""

    def __init__(self) -> None:
        self._fields: list[str] = []
        self._sizes: list[int] = []
        self._ids: list[tf.Tensor] = []
        self._inside: list[tf.Tensor] = []

    def add(self, ids: tf.Tensor, fields: Sequence[str], sizes: Sequence[int]) -> tf.Tensor:
        """The ids, n×F int64 of F fields, with padding (0) in the place of those out of range."""
        self._fields += fields
        self._sizes += sizes
        # Unsigned, a negative id is larger than any size: one comparison instead of two.
        unsigned = tf.bitcast(ids, tf.uint64)
        inside = unsigned < tf.constant([list(sizes)], tf.uint64)
        self._ids.append(ids)
        self._inside.append(tf.reduce_all(inside))
        return tf.where(inside, ids, tf.constant(PADDING_ID, tf.int64))

    def answer(self) -> tf.Tensor:
        """A scalar that is there once all ids are known to be in range."""

        def refuse() -> tf.Tensor:
            sizes = tf.constant(self._sizes, tf.int64)
            # The least id by its bits, inverted: Min has no GPU kernel for int64, and -ids would
            # overflow where there is no id, or the one that NaN becomes.
            least = tf.bitwise.invert(_largest([tf.bitwise.invert(ids) for ids in self._ids]))
            most = _largest(self._ids)
            at = tf.argmax(tf.logical_or(least < 0, most >= sizes))
            message = [
                "ids must be from 0 to cardinality - 1. Field, cardinality, received:",
                tf.gather(tf.constant(self._fields), at),
                sizes[at],
                tf.where(least[at] < 0, least[at], most[at]),
            ]
            # The op itself: what is in `tf.debugging` would look at the answer once more.
            check = tf.raw_ops.Assert(condition=tf.constant(False), data=message)
            with tf.control_dependencies([] if check is None else [check]):
                return tf.constant(False)

        inside = tf.reduce_all(tf.stack(self._inside))
        return tf.cond(inside, lambda: tf.constant(True), refuse)


def _largest(ids: Sequence[tf.Tensor]) -> tf.Tensor:
    """Of each field, for ids n×F of F fields each."""
    return tf.concat([tf.reduce_max(some, axis=0) for some in ids], axis=0)
