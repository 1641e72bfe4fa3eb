"""Ids out of range: rows that are safe to read, and an error that nothing waits for.

On a GPU a check is dear only where something waits for its answer, which is the host's to give. So
ids out of range are read as padding, on the device, and the error is raised beside that by whoever
sees the answer: the lookup itself never waits for it, the optimizer's update does.
"""

from __future__ import annotations

from collections.abc import Sequence

from merlin_cowclip.models.vocabulary import PADDING_ID
from merlin_cowclip.plugins._stack import tf


class IdCheck:
    """Checks the ids of one call of a layer, field by field, with one answer for all.

    Raises, where the answer arrives: `tf.errors.InvalidArgumentError` with the first bad field, its
    cardinality, and an id received.
    """

    def __init__(self) -> None:
        self._fields: list[str] = []
        self._sizes: list[int] = []
        self._least: list[tf.Tensor] = []
        self._most: list[tf.Tensor] = []

    def add(self, ids: tf.Tensor, fields: Sequence[str], sizes: Sequence[int]) -> tf.Tensor:
        """The ids, n×F int64 of F fields, with padding (0) in the place of those out of range."""
        self._fields += fields
        self._sizes += sizes
        # The least id by its bits, inverted: Min has no GPU kernel for int64, and -ids would
        # overflow where there is no id, or the one that NaN becomes.
        self._least.append(tf.bitwise.invert(tf.reduce_max(tf.bitwise.invert(ids), axis=0)))
        self._most.append(tf.reduce_max(ids, axis=0))
        inside = tf.logical_and(ids >= 0, ids < tf.constant([list(sizes)], tf.int64))
        return tf.where(inside, ids, tf.constant(PADDING_ID, tf.int64))

    def answer(self) -> tf.Tensor:
        """A scalar that is there once all ids are known to be in range."""
        sizes = tf.constant(self._sizes, tf.int64)
        least, most = tf.concat(self._least, axis=0), tf.concat(self._most, axis=0)
        outside = tf.logical_or(least < 0, most >= sizes)

        def refuse() -> tf.Tensor:
            at = tf.argmax(outside)
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

        return tf.cond(tf.reduce_any(outside), refuse, lambda: tf.constant(True))
