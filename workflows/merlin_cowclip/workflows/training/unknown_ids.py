"""Fields of incoming rows of whose ids a run knows none: written otherwise than where it learned.

Of one id nobody can tell whether it is new or written in another way (True for true, 7 for 007, a
number for text); of all ids of a field it is told.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from merlin_cowclip.workflows.data.prepare.statistics import UNKNOWN
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import Notice, quoted
from merlin_cowclip.workflows.training.rows import Rows

ENOUGH = 100  # ids of a field, of which chance alone makes none known


class UnknownIds:
    """Counts the unknown ids of each field until the first known one.

    Args:
        config: of the run, its `config.json`.
        spec: of its rows.
    """

    def __init__(self, config: Mapping[str, Any], spec: DatasetSpec) -> None:
        first = {name: UNKNOWN + config["special_ids"][name]["buckets"] for name in spec.ids}
        self._spec = spec
        # Of fields that have a vocabulary: the id that it begins with, after the hash buckets.
        self._first = {n: i for n, i in first.items() if i < config["cardinalities"][n]}
        self._unknown = dict.fromkeys(self._first, 0)

    def see(self, rows: Rows) -> None:
        """Count those of some encoded rows."""
        for name in list(self._unknown):
            ids = self._ids(rows, name)
            if len(ids) and ids.max() >= self._first[name]:
                del self._unknown[name]
            else:
                self._unknown[name] += int(np.count_nonzero(ids >= UNKNOWN))

    def _ids(self, rows: Rows, name: str) -> np.ndarray:
        if name in self._spec.categorical:
            return rows.ids[:, self._spec.categorical.index(name)]
        return rows.lists[self._spec.lists.index(name)].flatten().to_numpy(zero_copy_only=False)

    def warn(self) -> None:
        """Say which fields have had ids enough, and none that is known."""
        fields = [name for name, unknown in self._unknown.items() if unknown >= ENOUGH]
        if fields:
            warnings.warn(
                f"the run knows no id of {quoted(fields, brief=True)} in these rows: all count as "
                "unknown. Later times do; others may be written otherwise than in the run's own "
                "data, or be of another type",
                Notice,
                stacklevel=2,
            )
