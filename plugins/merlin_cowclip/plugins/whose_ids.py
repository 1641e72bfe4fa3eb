"""Whose ids a graph's lookup reads, where they were flattened, joined or repeated before it.

A sample counts once for an id, however often it holds it: `sample_numbers.py` tells whose each is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.moving_ops import axis_of_join, joined_by
from merlin_cowclip.plugins.same_ids import Expressions, before_unique, op_of
from merlin_cowclip.plugins.sample_numbers import SampleNumbers


@dataclass(frozen=True, eq=False)
class Fed:
    """Ids that a table looks up.

    Attributes:
      ids: as they were before they were made unique.
      samples: makes the number of each one's sample, int64, in the shape of the ids; `None` where
        samples are their first axis, or nobody knows better.
      lost_by: the name of the op that was given flattened ids and does not tell whose they are now:
        each then counts as a sample of its own. Empty where there is none.
    """

    ids: Any
    samples: Callable[[], tf.Tensor] | None = None
    lost_by: str = ""

    def tell_if_lost(self, table: str) -> None:
        """Warn, where nobody knows whose the ids are any more that the table looks up."""
        if self.lost_by:
            warnings.warn(
                f"The ids that the table {table!r} looks up were flattened, and the op "
                f"{self.lost_by!r} does not tell whose they are: each counts as a sample of its "
                "own, so that an id that a sample holds several times is clipped less. Do this "
                "before they are flattened, or keep the samples on the first axis.",
                stacklevel=3,
            )


@tf.autograph.experimental.do_not_convert
def as_fed(ids: tf.Tensor, of: Expressions) -> list[Fed]:
    """The ids that a graph's lookup reads, and whose they are.

    Those of several features that were stacked on axis 0, F×b, are the lookups of F features, and
    those that were joined on it are a lookup of each part; but not the same ids, which are there
    twice, and not what was made unique then.
    """
    return _fed(ids, SampleNumbers(of))


@tf.autograph.experimental.do_not_convert
def whole_as_fed(ids: Any) -> Fed:
    """The ids, as they are, and whose they are; nobody knows of eager ones, and of no tensor."""
    if tf.executing_eagerly() or not isinstance(ids, tf.Tensor):
        return Fed(ids)
    return _whole(ids, SampleNumbers(Expressions()))


def _fed(ids: tf.Tensor, walk: SampleNumbers) -> list[Fed]:
    given, ids = ids, before_unique(ids, walk.of)
    parts = _parts(ids, walk) if ids is given else []
    if len({walk.of.ids(part) for part in parts}) == len(parts) > 0:
        return [fed for part in parts for fed in _fed(part, walk)]
    return [_whole(ids, walk)]


def _whole(ids: tf.Tensor, walk: SampleNumbers) -> Fed:
    found = walk.samples_in(ids)
    return Fed(ids, None if found.first else lambda: found.numbers()[0], found.lost_by)


def _parts(ids: tf.Tensor, walk: SampleNumbers) -> list[tf.Tensor]:
    """What was joined on axis 0 and is a lookup of its own each."""
    joined = walk.of.stripped(ids)
    op = op_of(joined)
    if op is None or op.type not in ("ConcatV2", "Pack") or axis_of_join(op) != 0:
        return []
    parts = joined_by(op)
    if walk.are_of_one(parts):
        return []
    if op.type == "Pack" and (joined.shape.rank == 1 or all(walk.is_one_sample(p) for p in parts)):
        return []
    return parts
