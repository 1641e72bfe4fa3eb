# SPDX-License-Identifier: Apache-2.0
"""The optimizers that are parts of a `CowClipOptimizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from merlin_cowclip.plugins._checks import RefusesOptions
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.optimizers.adagrad import CowClipAdagrad, CowClipRowWiseAdagrad
from merlin_cowclip.plugins.optimizers.adam import CowClipAdam
from merlin_cowclip.plugins.optimizers.row_clip import ClipsRows
from merlin_cowclip.plugins.scaling import Hyperparameters


class Part(RefusesOptions):
    """What is no option of an optimizer that is a part of a `CowClipOptimizer`."""

    not_offered: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("learning_rate", "lr"),
        "Set optimizer.learning_rate, which scales those of all parts, or give for_model a "
        "schedule.",
    )


class AdamPart(Part, CowClipAdam):
    """`CowClipAdam` as a part."""

    updates: ClassVar[Sequence[str]] = (*CowClipAdam.updates, "deferred")


class AdagradPart(Part, CowClipAdagrad):
    """`CowClipAdagrad` as a part."""


class RowWiseAdagradPart(Part, CowClipRowWiseAdagrad):
    """`CowClipRowWiseAdagrad` as a part."""


class DensePart(Part, tf.keras.optimizers.legacy.Adam):
    """Keras's Adam as a part."""


BASES: Mapping[str, type[ClipsRows]] = MappingProxyType(
    {"adam": AdamPart, "adagrad": AdagradPart, "rowwise_adagrad": RowWiseAdagradPart}
)
"""The optimizers of tables by name."""

_Part = TypeVar("_Part", bound=ClipsRows)


def table_parts(
    kind: type[_Part], rate: Any, hp: Hyperparameters, update: str
) -> tuple[_Part, _Part]:
    """Optimizers of the clipped tables and of the others, of one class."""
    given: dict[str, Any] = {"clip_ratio": hp.clip_ratio, "clip_floor": hp.clip_floor}
    given |= {"l2": hp.l2, "update": update}
    make: Any = kind
    clipped = make(rate, clip=hp.clip, clip_threshold=hp.clip_threshold, name="clipped", **given)
    return clipped, make(rate, clip=None, name="unclipped", **given)
