# SPDX-License-Identifier: Apache-2.0
"""An interval of training as named numbers, from `CowClipOptimizer.observe`, and the clip."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from merlin_cowclip.plugins import FieldStatistics, RowStatistics

# Quantity, the first part of a tag → its value for a field that was updated.
_QUANTITIES: dict[str, Callable[[FieldStatistics], float | None]] = {
    "ids_per_batch": lambda field: field.all.rows / field.steps,
    "rows_clipped": lambda field: field.all.share_of_rows_clipped,
    "occurrences_clipped": lambda field: field.all.share_of_occurrences_clipped,
    "gradient_norm_frequent": lambda field: field.frequent.gradient_norm,
    "gradient_norm_rare": lambda field: field.rare.gradient_norm,
    "weight_norm_frequent": lambda field: field.frequent.weight_norm,
    "weight_norm_rare": lambda field: field.rare.weight_norm,
}
_OF_THE_CLIP = ("rows_clipped", "occurrences_clipped")


def _values(field: FieldStatistics) -> dict[str, float | None]:
    unseen = () if field.is_clipped else _OF_THE_CLIP
    return {
        name: None if not field.steps or name in unseen else value_of(field)
        for name, value_of in _QUANTITIES.items()
    }


def field_rows(fields: Iterable[FieldStatistics]) -> list[dict[str, Any]]:
    """For each field its `table`, its `field` (name) and every quantity.

    `None`: the field was not updated, the clip does not apply to it, or a mean over no ids. Shares
    are from 0 to 1, norms are means over ids and steps.
    """
    return [{"table": field.table, "field": field.field, **_values(field)} for field in fields]


def field_scalars(fields: Iterable[FieldStatistics]) -> dict[str, float]:
    """The values that there are in `field_rows`, by tag, "quantity/table/field"."""
    return {
        f"{name}/{field.table}/{field.field}": value
        for field in fields
        for name, value in _values(field).items()
        if value is not None
    }


def summary_scalars(fields: Sequence[FieldStatistics]) -> dict[str, float | None]:
    """The same over all fields of the embeddings (tables of width 2 and more, where there are any).

    What is of the clip is of all fields that it applies to, and of none other.
    """
    chosen = [field for field in fields if field.width > 1] or list(fields)
    steps = max((field.steps for field in chosen), default=0)
    frequent, rare = (_sum(getattr(f, kind) for f in chosen) for kind in ("frequent", "rare"))
    clipped = _sum(field.all for field in fields if field.is_clipped)
    return {
        **_values(FieldStatistics("", "", 0, True, steps, frequent, rare)),
        "rows_clipped": clipped.share_of_rows_clipped,
        "occurrences_clipped": clipped.share_of_occurrences_clipped,
    }


def _sum(parts: Iterable[RowStatistics]) -> RowStatistics:
    return sum(parts, RowStatistics(0, 0, 0, 0, 0.0, 0.0))


def clip_sentence(fields: Sequence[FieldStatistics], clip: str | None) -> str:
    """A sentence on what the clip did to the ids of a run; shares are of the clipped fields."""
    clipped = [one for one in fields if one.is_clipped and one.steps]
    if not clipped:
        return "No table is clipped."
    whole = _sum(field.all for field in clipped)
    if not whole.clipped_rows:
        name = "CowClip" if clip == "adaptive_column" else "The clip"
        return (
            f"{name} was inactive in this run (no row reached its bound); the result comes from "
            "the hyperparameters."
        )
    touched = sum(field.all.clipped_rows > 0 for field in clipped)
    return (
        f"The clip shortened {100 * whole.clipped_rows / whole.rows:.3g} % of the rows "
        f"({100 * whole.clipped_occurrences / whole.occurrences:.3g} % of the occurrences), in "
        f"{touched} of {len(clipped)} clipped fields."
    )
