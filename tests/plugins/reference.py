# SPDX-License-Identifier: Apache-2.0
"""CowClip in NumPy: read this first.

Three classes, one for each update mode, train one embedding table (V×d) in float64. They define the
results of `CowClipAdam`, without TensorFlow and without speed; the tests compare the two. A step:

1. L2: `g_k ← g_k + 2λ·w_k`.
2. Clip (`clip`): CowClip bounds the gradient of id k by `cnt_k · max(r·‖w_k‖, ζ)`, where cnt_k is
   the number of samples of the batch that hold k. The caller passes the counts.
3. Adam (`adam`).

The modes differ in the rows that are not in the batch. `Exact` (the paper) updates them in each
step. `Lazy` never does. `Deferred` does what `Exact` does, but later: when a row is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Settings:
    """Hyperparameters of the embeddings; the names are those of `CowClipAdam`."""

    learning_rate: float
    l2: float = 0.0
    clip: str | None = "adaptive_column"
    clip_ratio: float = 1.0
    clip_floor: float = 0.0
    clip_threshold: float = np.inf
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7


def clip(gradients: Array, rows: Array, counts: Array, fields: Array, settings: Settings) -> Array:
    """Clip gradients (with L2, U×d) by one of the five rules (Table 6).

    A rule bounds the norm of each unit: all rows, the rows of one field, or each row. The bound
    is a constant c, or `cnt · max(r·‖w‖, ζ)` of the unit. Counts and fields are U.
    """
    rule = settings.clip
    if rule is None:
        return gradients
    unit = fields if rule.endswith("field") else np.arange(len(rows))
    if rule == "global":
        unit = np.zeros(len(rows), int)
    rows, clipped = rows.astype(np.float64), gradients.astype(np.float64)
    for u in np.unique(unit):
        in_unit = unit == u
        if rule.startswith("adaptive"):
            size = max(settings.clip_ratio * np.linalg.norm(rows[in_unit]), settings.clip_floor)
            bound = max(counts[in_unit].sum(), 1.0) * size
        else:
            bound = settings.clip_threshold
        norm = np.linalg.norm(clipped[in_unit])
        if norm > bound:
            clipped[in_unit] *= bound / norm
    return clipped


def adam(
    w: Array, m: Array, v: Array, g: Array, step: int, settings: Settings
) -> tuple[Array, ...]:
    """The w, m and v after Adam's step number `step`, from 1 on, with the gradient g."""
    beta_1, beta_2 = settings.beta_1, settings.beta_2
    m = beta_1 * m + (1 - beta_1) * g
    v = beta_2 * v + (1 - beta_2) * g**2
    rate = settings.learning_rate * np.sqrt(1 - beta_2**step) / (1 - beta_1**step)
    return w - rate * m / (np.sqrt(v) + settings.epsilon), m, v


class Lazy:
    """`update="lazy"`: L2 and Adam on the batch's rows only.

    `table` is V×d, `fields` are the fields of its V rows, and `exempt` rows are not clipped.
    """

    def __init__(
        self, table: Array, settings: Settings, fields: Array, exempt: Array | None = None
    ) -> None:
        self.w = table.astype(np.float64)
        self.m, self.v = np.zeros_like(self.w), np.zeros_like(self.w)
        self.settings, self.step_number, self.fields = settings, 0, fields
        self.exempt = np.zeros(len(table), bool) if exempt is None else exempt
        self.last_step = np.zeros(len(table), int)

    def lookup(self, ids: Array) -> Array:
        """Embeddings of ids of any shape."""
        embeddings: Array = self.w[ids]
        return embeddings

    def table(self) -> Array:
        """All embeddings, V×d."""
        return self.w

    def step(self, ids: Array, gradients: Array, counts: Array) -> None:
        """Update by U distinct ids, U×d gradients of the mean loss summed per id, and U counts."""
        self.step_number += 1
        self._update(ids, self._clipped(ids, gradients, counts), self.step_number)

    def _clipped(self, ids: Array, gradients: Array, counts: Array) -> Array:
        g: Array = gradients + 2 * self.settings.l2 * self.w[ids]
        clipped = ~self.exempt[ids]
        rows = ids[clipped]
        g[clipped] = clip(
            g[clipped], self.w[rows], counts[clipped], self.fields[rows], self.settings
        )
        return g

    def _update(self, ids: Array, g: Array, step: int) -> None:
        new = adam(self.w[ids], self.m[ids], self.v[ids], g, step, self.settings)
        self.w[ids], self.m[ids], self.v[ids] = new


class Exact(Lazy):
    """`update="exact"`, the paper: a row that no sample holds has the gradient 2λw.

    The rule "adaptive_column" clips it, too, with a count of 1. The norms of other rules leave it
    out. Arguments as `Lazy`.
    """

    def step(self, ids: Array, gradients: Array, counts: Array) -> None:
        """As `Lazy.step`, and of all other rows."""
        self.step_number += 1
        g = 2 * self.settings.l2 * self.w
        absent = np.setdiff1d(np.arange(len(g)), ids)
        if self.settings.clip == "adaptive_column":
            g[absent] = self._clipped(absent, np.zeros_like(g[absent]), np.zeros(len(absent)))
        g[ids] = self._clipped(ids, gradients, counts)
        self._update(np.arange(len(g)), g, self.step_number)


class Deferred(Lazy):
    """`update="deferred"`: the results of `Exact`, where a row is updated when it is read.

    Absent rows must not be clipped: r is at least 2λ. (`catch_up.py` applies many steps at once.)
    """

    def lookup(self, ids: Array) -> Array:
        """As `Lazy.lookup`, up to date."""
        self._catch_up(np.unique(ids))
        return super().lookup(ids)

    def table(self) -> Array:
        """As `Lazy.table`, up to date."""
        self._catch_up(np.arange(len(self.w)))
        return super().table()

    def step(self, ids: Array, gradients: Array, counts: Array) -> None:
        """As `Lazy.step`; all other rows miss the step until they are read."""
        self._catch_up(ids)
        super().step(ids, gradients, counts)
        self.last_step[ids] = self.step_number

    def _catch_up(self, rows: Array) -> None:
        for step in range(self.last_step[rows].min(initial=self.step_number), self.step_number):
            pending = rows[self.last_step[rows] == step]
            self._update(pending, 2 * self.settings.l2 * self.w[pending], step + 1)
            self.last_step[pending] = step + 1


REFERENCES: dict[str, Callable[..., Lazy]] = {"exact": Exact, "lazy": Lazy, "deferred": Deferred}
"""The reference of each update mode."""
