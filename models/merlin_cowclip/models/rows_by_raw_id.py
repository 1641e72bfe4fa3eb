"""Rows of a fused table by the raw ids of a log: read, as a frame, and set."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from merlin.schema import ColumnSchema, Schema

from merlin_cowclip.models.vocabulary import (
    MISSING_ID,
    UNKNOWN_ID,
    changed_before,
    encode,
    has_raw_ids,
    is_encoded,
    is_filled,
    is_prepared,
    missing_id,
    read_vocabulary,
)
from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.joining import check_same
from merlin_cowclip.plugins.tables import TableSpec

_SAME_ROWS = "All ranks must load the same rows into a table in shards: each keeps its own."


class RowsByRawId:
    """What `FusedEmbeddings` offers to those who think in raw ids."""

    if TYPE_CHECKING:  # what the layer has
        schema: Schema
        dim: int
        cardinalities: Mapping[str, int]
        variable_dtype: str
        _first_row: Mapping[str, int]
        _spec: TableSpec

        def _check_field(self, field: str) -> None: ...

        def _whole_table(self, build: bool = False) -> tf.Variable: ...

    def rows(
        self,
        field: str,
        raw_ids: Any,
        *,
        workflow: str | os.PathLike[str] | None = None,
    ) -> np.ndarray:
        """The table's rows of some raw ids of a field.

        Args:
          field: one of `fields`.
          raw_ids: n, as they stand in counts/, text or whole numbers: 1382, 1382.0 and "1382" are
            one id. A missing one (None, NaN; in prepared data empty text, too) has the row of
            missing ids (of unknown ones in top-k data that did not keep it), one that the
            vocabulary does not hold the row of unknown ids. A field that no Categorify encoded has
            neither: its ids are its raw ids, from 0.
          workflow: the saved NVTabular workflow, if the schema does not say where it lies.

        Returns:
          n, int64.

        Raises:
          ValueError: no such field, its vocabulary is not there, a raw id that is neither text nor
            a whole number, an unknown id of a field whose unknown ids are hashed, a missing id or
            one out of range of a field that no Categorify encoded, a missing one of a field whose
            missing values are filled in (`FillMissing`), or a field of which the workflow hashed
            all ids, or may have changed them before or after Categorify.
        """
        column = self._column(field)
        vocabulary = self._vocabulary(field, workflow)
        if not is_encoded(column):
            return self._ids_as_they_are(field, vocabulary, raw_ids) + self._first_row[field]
        ids = encode(
            vocabulary,
            raw_ids,
            missing=missing_id(column),
            prepared=is_prepared(column),
        )
        if is_filled(column) and (ids == MISSING_ID).any():
            raise ValueError(
                f"raw ids of field {field!r} must not be missing, for its workflow fills them in. "
                "Received: a missing one. Give the value that it has instead"
            )
        hashed = int(column.properties.get("num_buckets") or 1) > 1
        if hashed and (ids == UNKNOWN_ID).any():
            raise ValueError(
                f"raw ids of field {field!r} must be in its vocabulary, for the others share rows "
                "by a hash that the workflow knows. Received: one that is not. Take its id from "
                "workflow.transform."
            )
        return ids + self._first_row[field]

    def to_df(
        self,
        field: str,
        *,
        workflow: str | os.PathLike[str] | None = None,
    ) -> pd.DataFrame:
        """The rows of one field with their raw ids; of a table in shards, on all ranks at once.

        Args:
          field: one of `fields`.
          workflow: as in `rows`.

        Returns:
          Index `id`: 0 to cardinality - 1. Columns: `raw` (None for padding, missing and unknown,
          none of which a field has that no Categorify encoded; throughout, where a workflow hashed
          the ids or may have changed them), then "0" to "d-1", as Merlin's tables name them.

        Raises:
          ValueError: no such field, its vocabulary is not there, or the layer is not built.
        """
        column = self._column(field)
        known = has_raw_ids(column) and not changed_before(column)
        vocabulary = self._vocabulary(field, workflow) if known else None
        table = self._whole_table()
        first = self._first_row[field]
        last, access = first + self.cardinalities[field], self._spec.access
        found = table[first:last]
        if access.shard is not None:
            found = access.gather(table, tf.range(first, last, dtype=tf.int64))
        values = found.numpy()
        frame = pd.DataFrame(values, columns=[str(i) for i in range(self.dim)])
        frame.index.name = "id"
        raw = np.full(len(frame), None, object)
        if vocabulary is not None:
            raw[vocabulary.index] = vocabulary.astype(object)
        frame.insert(0, "raw", pd.Series(raw, frame.index, object))  # None beside times, too
        return frame

    def load_rows(
        self,
        field: str,
        values: pd.DataFrame | np.ndarray,
        *,
        workflow: str | os.PathLike[str] | None = None,
    ) -> int:
        """Set rows of one field to given, for instance pretrained, ones. Builds the table.

        Of a table in shards, on all ranks at once, with the same rows.

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
            none that the field knows; a frame for a field that has no raw ids, or may have others
            than the log, as in `rows`; of a table in shards, other rows on another rank. Nothing is
            changed then.
        """
        self._check_field(field)
        is_frame = isinstance(values, pd.DataFrame)
        if isinstance(values, pd.DataFrame):
            self._refuse_ids(field, values)
        exact = np.float64 if self.variable_dtype == "float64" else np.float32
        given = np.asarray(self._in_order(values), exact)
        wanted = (len(given) if is_frame else self.cardinalities[field], self.dim)
        if given.shape != wanted:
            raise ValueError(
                f"rows of field {field!r} must be {wanted[0]}×{wanted[1]}. Received: "
                f"{'×'.join(map(str, given.shape))}"
            )
        if not np.isfinite(given).all():
            bad = int(np.flatnonzero(~np.isfinite(given).all(axis=1))[0])
            raise ValueError(f"rows of field {field!r} must be finite. Received: row {bad}")
        ids = np.arange(len(given))
        if is_frame:
            assert isinstance(values, pd.DataFrame)
            if not values.index.is_unique:
                twice = values.index[values.index.duplicated()][0]
                raise ValueError(f"raw ids of field {field!r} must be unique. Received: {twice!r}")
            prepared = is_prepared(self._column(field))
            vocabulary = self._vocabulary(field, workflow)
            ids = encode(vocabulary, values.index, missing=-1, unknown=-1, prepared=prepared)
            known = ids >= 0
            again = pd.Series(ids[known]).duplicated().to_numpy()
            if again.any():  # 7 and "7"
                twice = values.index[known][again][0]
                raise ValueError(f"raw ids of field {field!r} must be unique. Received: {twice!r}")
            if not known.any():
                raise ValueError(
                    f"raw ids of field {field!r} must be in its vocabulary. Received: "
                    f"{len(given)} ids, none of which is: {list(values.index[:3])}"
                )
            ids, given = ids[known], given[known]
        table = self._whole_table(build=True)
        rows, shard = ids + self._first_row[field], self._spec.shard
        if shard is not None:
            digest = hashlib.sha256(rows.tobytes() + given.tobytes()).hexdigest()
            check_same({"rows with the digest": digest}, _SAME_ROWS)
            mine = rows % shard.size == shard.rank
            rows, given = shard.place(rows[mine]), given[mine]
        rows = rows[:, np.newaxis]
        # Not scatter_nd_update: it would mark the table as sparsely used (see `TableAccess`).
        whole, new = tf.convert_to_tensor(table), tf.cast(given, table.dtype)
        table.assign(tf.tensor_scatter_nd_update(whole, rows, new))
        return len(ids)

    def _refuse_ids(self, field: str, frame: pd.DataFrame) -> None:
        """Refuse a frame as `to_df` gives it: some ids are the raw ones of others."""
        by_id = frame.index.name == "id" and is_encoded(self._column(field))
        if by_id or "raw" in frame:
            given = "with a column raw" if "raw" in frame else "whose index is called id"
            raise ValueError(
                f"a frame of rows of field {field!r} must have raw ids for its index. Received: "
                f"one {given}, as to_df gives it. Give that by .dropna(subset='raw')"
                ".set_index('raw'), and raw ids of your own by .rename_axis(None)"
            )

    def _in_order(self, frame: pd.DataFrame | np.ndarray) -> pd.DataFrame | np.ndarray:
        """A frame's columns by number, if they are named "0" to "d-1"."""
        if not isinstance(frame, pd.DataFrame):
            return frame
        wanted = [str(i) for i in range(self.dim)]
        named = [str(name) for name in frame.columns]
        if sorted(named) != sorted(wanted):
            return frame
        return frame.iloc[:, [named.index(name) for name in wanted]]

    def _ids_as_they_are(self, field: str, vocabulary: pd.Series, raw_ids: Any) -> np.ndarray:
        """Ids that no Categorify made, n, int64: of padding, missing and unknown ones it has none.

        Raises:
          ValueError: one that is not from 0 to cardinality - 1.
        """
        ids = encode(vocabulary, raw_ids, missing=-1, unknown=-1)
        if (ids < 0).any():
            bad = pd.Series(np.asarray(raw_ids, dtype=object))[ids < 0].iloc[0]
            raise ValueError(
                f"raw ids of field {field!r}, which no Categorify encoded, must be whole numbers "
                f"from 0 to {self.cardinalities[field] - 1}. Received: {bad!r}. Leave it out, or "
                "give the number that its rows have"
            )
        return ids

    def _vocabulary(self, field: str, workflow: str | os.PathLike[str] | None) -> pd.Series:
        vocabulary = read_vocabulary(self._column(field), workflow)
        last, cardinality = vocabulary.index.max(), self.cardinalities[field]
        if len(vocabulary) and last != cardinality - 1:
            raise ValueError(
                f"the vocabulary of field {field!r} must end with the last id of its cardinality, "
                f"{cardinality - 1}. Received: id {last}. It is another workflow's than the schema."
            )
        return vocabulary

    def _column(self, field: str) -> ColumnSchema:
        self._check_field(field)
        return self.schema[field]
