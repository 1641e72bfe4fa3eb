# SPDX-License-Identifier: Apache-2.0
"""Rows of a fused table by the raw ids of a log: read, as a frame, and set."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from merlin_cowclip.models.vocabulary import (
    MISSING_ID,
    UNKNOWN_ID,
    Folder,
    Ids,
    encode,
    has_raw_ids,
    is_encoded,
    read_vocabulary,
)
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.horovod import check_same


class RowsByRawId(tf.keras.layers.Layer):
    """The methods of `FusedEmbeddings` that take raw ids."""

    def rows(self, field: str, raw_ids: Any, *, workflow: Folder = None) -> Ids:
        """The table's rows of some raw ids of a field.

        Args:
          field: one of `fields`.
          raw_ids: n, text as in counts/ or whole numbers: 1382, 1382.0 and "1382" are one id. A
            missing one (None, NaN; in prepared data empty text as well) has the row of missing ids,
            one that the vocabulary does not contain the row of unknown ids. The ids of a field that
            no Categorify encoded are its raw ids, from 0.
          workflow: the folder of the saved NVTabular workflow, if the schema does not name it.

        Returns:
          n, int64.

        Raises:
          ValueError: no such field, no vocabulary (see `read_vocabulary`), a raw id that is neither
            text nor a whole number; or an unknown one where the workflow hashes them.
        """
        vocabulary = self._vocabulary(field, workflow)
        column = self.schema[field]
        given, encoded = column.properties, is_encoded(column)
        missing = UNKNOWN_ID if given.get("missing_as_unknown") else MISSING_ID
        ids = encode(
            vocabulary,
            raw_ids,
            missing=missing if encoded else -1,
            unknown=UNKNOWN_ID if encoded and int(given.get("num_buckets") or 1) == 1 else -1,
            empty_is_missing=bool(given.get("empty_is_missing")),
        )
        if (ids < 0).any():
            bad = list(raw_ids)[int(np.argmax(ids < 0))]
            reason = f"its ids are whole numbers from 0 to {self.cardinalities[field] - 1}"
            if encoded:
                reason = "the workflow hashes unknown ids"
            raise ValueError(
                f"Field {field!r} has no row for the raw id {bad!r}: {reason}. Take the id from "
                "workflow.transform."
            )
        ids += self._first_row[field]
        return ids

    def to_df(self, field: str, *, workflow: Folder = None) -> pd.DataFrame:
        """The rows of one field with their raw ids; of a sharded table, on all ranks at once.

        Args:
          field: one of `fields`.
          workflow: as in `rows`.

        Returns:
          Index `id`: 0 to cardinality - 1. Columns: `raw` (None for padding, missing and unknown
          ids, and for all ids of a field that a workflow hashed or changed), then "0" to "d-1", as
          Merlin's tables name them.

        Raises:
          ValueError: no such field, no vocabulary, or the layer is not built.
        """
        self._check_field(field)
        raw = np.full(self.cardinalities[field], None, object)
        if has_raw_ids(self.schema[field]):
            vocabulary = self._vocabulary(field, workflow)
            raw[vocabulary.index] = vocabulary.astype(object)
        rows = tf.range(len(raw), dtype=tf.int64) + self._first_row[field]
        self._whole_table()  # refuses a layer that is not built
        values = self._spec.gather(rows).numpy()
        frame = pd.DataFrame(values, columns=[str(i) for i in range(self.dim)])
        frame.insert(0, "raw", pd.Series(raw, dtype=object))
        return frame.rename_axis("id")

    def load_rows(
        self, field: str, values: pd.DataFrame | NDArray[Any], *, workflow: Folder = None
    ) -> int:
        """Set rows of one field to given, for instance pretrained, ones. Builds the table.

        Of a sharded table, on all ranks at once, with the same rows.

        Args:
          field: one of `fields`.
          values: a frame of d columns whose index holds raw ids, in any order (`to_df(field)`
            gives one by `.dropna(subset="raw").set_index("raw")`); columns named "0" to "d-1" go by
            name, others by position. Or an array cardinality×d, row i for id i.
          workflow: as in `rows`.

        Returns:
          How many rows were set: ids of the frame that the field does not know are left out.

        Raises:
          ValueError: no such field, another shape, values that are not finite, a raw id twice, or
            none that the field knows; a field without raw ids; of a sharded table, other rows on
            another rank. Nothing is changed then.
        """
        self._check_field(field)
        ids = np.arange(self.cardinalities[field])
        if isinstance(values, pd.DataFrame):
            ids = self._ids_of_frame(field, values, workflow)
            names = [str(i) for i in range(self.dim)]
            by_name = values.rename(columns=str)
            values = by_name[names] if sorted(by_name.columns) == sorted(names) else values
        exact = np.float64 if self.variable_dtype == "float64" else np.float32
        given = np.asarray(values, exact)
        if given.shape != (len(ids), self.dim):
            raise ValueError(
                f"rows of field {field!r} must be {len(ids)}×{self.dim}. Received: "
                f"{'×'.join(map(str, given.shape))}"
            )
        if not np.isfinite(given).all():
            bad = int(np.flatnonzero(~np.isfinite(given).all(axis=1))[0])
            raise ValueError(f"rows of field {field!r} must be finite. Received: row {bad}")
        ids, given = ids[ids >= 0], given[ids >= 0]
        self._ensure_built()
        table = self._whole_table()
        rows, shard = ids + self._first_row[field], self._spec.shard
        if shard is not None:
            digest = hashlib.sha256(rows.tobytes() + given.tobytes()).hexdigest()
            check_same(
                {"rows with the digest": digest},
                "All ranks must load the same rows into a sharded table: each keeps its own.",
            )
            mine = rows % shard.size == shard.rank
            rows, given = shard.local_row(rows[mine]), given[mine]
        # Not scatter_nd_update: it would mark the table as sparsely used (`TableSpec.gather`).
        whole, new = tf.convert_to_tensor(table), tf.cast(given, table.dtype)
        table.assign(tf.tensor_scatter_nd_update(whole, rows[:, np.newaxis], new))
        return len(ids)

    def _ids_of_frame(self, field: str, frame: pd.DataFrame, workflow: Folder) -> Ids:
        """The ids of a frame's rows; -1 of those that the field does not know."""
        if "raw" in frame or (frame.index.name == "id" and is_encoded(self.schema[field])):
            raise ValueError(
                f"The index of a frame of rows of field {field!r} must be raw ids. Of a frame of "
                "to_df, give .dropna(subset='raw').set_index('raw')."
            )
        ids = encode(self._vocabulary(field, workflow), frame.index, missing=-1, unknown=-1)
        known = frame.index[ids >= 0]
        again = pd.Series(ids[ids >= 0]).duplicated().to_numpy()
        if again.any():  # 7 and "7" are one id
            raise ValueError(
                f"raw ids of field {field!r} must be unique. Received: {known[again].tolist()[0]!r}"
            )
        if not len(known):
            raise ValueError(
                f"raw ids of field {field!r} must be in its vocabulary. Received: {len(ids)} ids, "
                f"none of which is: {list(frame.index[:3])}"
            )
        return ids

    def _vocabulary(self, field: str, workflow: Folder) -> pd.Series[Any]:
        self._check_field(field)
        vocabulary = read_vocabulary(self.schema[field], workflow)
        last, cardinality = vocabulary.index.max(), self.cardinalities[field]
        if len(vocabulary) and last != cardinality - 1:
            raise ValueError(
                f"the vocabulary of field {field!r} must end with the last id of its cardinality, "
                f"{cardinality - 1}. Received: id {last}. It is another workflow's than the schema."
            )
        return vocabulary
