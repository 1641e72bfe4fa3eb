"""NVTabular operators with the traps taken out: id text, ids to integers, numbers to [0, 1].

Each is a thin subclass, named and importable, so that a saved workflow loads anywhere this package
is installed. Importing this module imports NVTabular, which takes seconds: import it where used.
It reads no log and counts nothing: that is `etl.py`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.arrow_ids import (
    column_as_text,
    exact_ids,
    mixed_as_text,
)
from merlin_cowclip.workflows.data.encoding import hash_bucket, scaled, widened
from merlin_cowclip.workflows.data.id_text import as_text, is_list_type
from merlin_cowclip.workflows.data.raw_logs import parse_number
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.core.dispatch import encode_list_column, flatten_list_column_values, is_list_dtype
    from merlin.schema import Schema
    from nvtabular.ops import Categorify, NormalizeMinMax, Operator
    from nvtabular.ops.categorify import NULL_OFFSET, OOV_OFFSET

FIRST_ID = OOV_OFFSET + 1  # 0 padding, 1 missing, 2 unknown, 3 the most frequent id


class IdText(Operator):
    """Ids of any type, or lists of them, to text: 1382, 1382.0 and "1382" are one id.

    pandas turns integers beside a missing value into floats, so a whole float is written as the
    integer it was. Empty text is missing; a missing list is an empty one.

    Args:
        lists: columns of lists, also where a frame does not show it, having missing ones alone.
    """

    lists: tuple[str, ...] = ()  # of workflows saved before they were told

    def __init__(self, lists: Sequence[str] = ()) -> None:
        super().__init__()
        self.lists = tuple(lists)

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The same columns as text; every row stays where it is.

        Raises:
            UserError: floats too large to be one integer (`exact_ids`), or a cell of a column of
                lists that is none.
        """
        out = df[col_selector.names].copy(deep=False)
        for name in col_selector.names:
            where, listed = f" in column {name!r}", name in self.lists
            if isinstance(df, pd.DataFrame):
                ids = _to_arrow(df[name], listed)
                if listed and not is_list_type(ids.type):
                    raise _unsplit(name, df[name].dropna())
                texts = as_text(exact_ids(ids, where))
                out[name] = pd.Series(texts.to_pandas().to_numpy(), index=df.index, dtype=object)
            else:
                out[name] = _text_on_gpu(df[name], listed, where)
        return out

    @property
    def output_dtype(self) -> Any:
        """Text."""
        return np.dtype("O")


class EncodeIds(Categorify):
    """Categorify (same files, same ids, same schema) whose transform can be trusted.

    Stock Categorify encodes wrongly, and silently, when the frame's index is not 0, 1, 2, …, and
    fails on a part in which a column is all missing. This one looks ids up by position. On cudf
    it hands a re-indexed frame to Categorify.

    Args:
        out_path: the folder that gets ``categories/``. No default: workflows that share
            Categorify's (``./``) overwrite each other's vocabularies.
        freq_threshold: as in Categorify, ids that occur less often are unknown; field → count.
        num_buckets: as in Categorify, ids that unknown ones share by hash, field → number, for
            every field (stock miscounts the rows of a field that is not named). Hashed by
            `encoding.hash_bucket`, the same on CPUs and GPUs.
        max_size: rows of a field's table at most, as in Categorify: the ids beyond are unknown.
        missing_as_unknown: fields whose missing ids are unknown (2) as well, instead of 1.
        lists: fields of lists, as `IdText`'s.
    """

    missing_as_unknown: tuple[str, ...] = ()  # of workflows saved before there was such a thing
    lists: tuple[str, ...] = ()

    def __init__(
        self,
        out_path: str | Path,
        *,
        freq_threshold: int | dict[str, int] = 0,
        num_buckets: dict[str, int] | None = None,
        max_size: int | dict[str, int] = 0,
        missing_as_unknown: Sequence[str] = (),
        lists: Sequence[str] = (),
    ) -> None:
        with warnings.catch_warnings():  # of hashing that differs on GPUs: not ours
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(
                out_path=str(out_path),
                freq_threshold=freq_threshold,
                num_buckets=num_buckets,
                max_size=max_size,
            )
        self.missing_as_unknown, self.lists = tuple(missing_as_unknown), tuple(lists)
        self._vocabularies: dict[str, pd.Index] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_vocabularies": {}}  # read again from the files beside it

    def fit_finalize(self, categories: Any) -> None:
        """Take the vocabulary files, ``{field: path}``."""
        self._vocabularies = {}
        super().fit_finalize(categories)

    def clear(self) -> None:
        """Forget the vocabularies."""
        self._vocabularies = {}
        super().clear()

    def set_storage_path(self, new_path: Any, copy: bool = False) -> None:
        """Point at vocabularies that have moved; with ``copy``, take the counts (meta.*) along."""
        old = dict(self.categories)
        super().set_storage_path(new_path, copy=copy)
        if copy:
            for field, path in old.items():
                source = Path(path).with_name(f"meta.{field}.parquet")
                target = Path(self.categories[field]).with_name(source.name)
                if source.is_file() and source != target:
                    target.write_bytes(source.read_bytes())

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Ids as int64: 1 for a missing one, 2 (or a bucket) for one not in the vocabulary.

        Fields of `missing_as_unknown` have 2 for both.
        """
        if not isinstance(df, pd.DataFrame):
            out = self._on_gpu(super().transform, col_selector, df)
            for name in set(self.missing_as_unknown) & set(col_selector.names):
                out[name] = _missing_to_unknown(out[name])
            return out
        out = df[col_selector.names].copy(deep=False)
        for name in col_selector.names:
            values = _to_arrow(df[name], name in self.lists)
            if not pa.types.is_list(values.type):
                ids = self._encode(name, df[name].to_numpy(dtype=object))
                out[name] = pd.Series(ids, index=df.index)
            else:
                lengths = pc.fill_null(pc.list_value_length(values), 0).to_numpy()
                ids = self._encode(name, values.flatten().to_numpy(zero_copy_only=False))
                rows = np.empty(len(df), dtype=object)
                rows[:] = np.split(ids, np.cumsum(lengths)[:-1]) if len(df) else []
                out[name] = pd.Series(rows, index=df.index)
        return out

    def _encode(self, field: str, texts: np.ndarray) -> np.ndarray:
        if field not in self._vocabularies:
            storage = self.storage_name.get(field, field)
            vocabulary = pd.read_parquet(self.categories[storage], columns=[storage])[storage]
            self._vocabularies[field] = pd.Index(vocabulary.astype(object))
        places = self._vocabularies[field].get_indexer(texts).astype(np.int64)
        buckets = self._buckets(field)
        ids = np.where(places < 0, OOV_OFFSET, places + OOV_OFFSET + buckets)
        if buckets > 1:
            hashed = (places < 0) & ~pd.isna(texts)
            ids[hashed] += hash_bucket(texts[hashed], buckets)
        ids[pd.isna(texts)] = OOV_OFFSET if field in self.missing_as_unknown else NULL_OFFSET
        return ids

    def _buckets(self, field: str) -> int:
        return self.num_buckets.get(field, 1) if self.num_buckets else 1

    def _on_gpu(self, transform: Any, col_selector: Any, df: Any) -> Any:
        """Stock Categorify on cudf, but for hashed fields, which are encoded on the host."""
        stock = [name for name in col_selector.names if self._buckets(name) == 1]
        out = _encode_on_gpu(transform, type(col_selector)(stock), df) if stock else df[[]].copy()
        hashed = [name for name in col_selector.names if name not in stock]
        if hashed:
            frame = self.transform(type(col_selector)(hashed), df[hashed].to_pandas())
            for name in hashed:
                out[name] = type(df[name])(frame[name].to_numpy())
        return out[col_selector.names]

    def _compute_properties(self, col_schema: Any, input_schema: Schema) -> Any:
        # Categorify writes the absolute path of the folder it was fitted in; folders move.
        schema = super()._compute_properties(col_schema, input_schema)
        path = schema.properties["cat_path"]
        relative = path and str(Path(path).relative_to(self.out_path))
        buckets = self._buckets(col_schema.name)
        added = {
            "cat_path": relative,
            "num_buckets": buckets if buckets > 1 else None,
            "empty_is_missing": True,  # `IdText` makes it so
        }
        if col_schema.name in self.missing_as_unknown:
            added["missing_as_unknown"] = True
        return schema.with_properties(added)


class NonFiniteToMissing(Operator):
    """inf, -inf and NaN become missing, as in `prepare` where the data set's description says so.

    Without it a clipped inf would be a 1 in the saved workflow alone.
    """

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The same columns, text as float64; every other number stays as it is.

        Raises:
            UserError: text that is no number.
        """
        out = type(df)()
        for name in col_selector.names:
            given = df[name]
            numbers = _float64(name, given, finite=False) if given.dtype.kind == "O" else given
            out[name] = numbers.where(abs(numbers) < float("inf"))
        return out


class UnitRange(NormalizeMinMax):
    """NormalizeMinMax that maps a constant column to 0 (stock: 0.5, or NaN where it is 0).

    In float64 and by any finite range (`encoding.scaled`), as `prepare` does, to the bit.
    """

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The same columns, scaled; numbers beyond the range lie beyond [0, 1].

        Raises:
            UserError: text that is no finite number.
        """
        out = type(df)()
        for name in col_selector.names:
            low, high = float(self.mins[name]), float(self.maxs[name])
            with np.errstate(over="ignore"):
                numbers = scaled(_float64(name, df[name], finite=True), low, high)
                out[name] = numbers.astype(self.output_dtype)
        return out

    def fit_finalize(self, dask_stats: Any) -> None:
        """Take ``{"mins": Series, "maxs": Series}``, widening a range of length 0."""
        super().fit_finalize(dask_stats)
        for name, low in self.mins.items():
            _, self.maxs[name] = widened(float(low), float(self.maxs[name]))


def _float64(name: str, column: Any, *, finite: bool) -> Any:
    """A column of numbers, or of their text as `prepare` reads it, as float64; pandas or cudf."""

    def number(cell: Any) -> Any:
        found = parse_number(cell) if isinstance(cell, str) else cell
        if found is None or (isinstance(cell, str) and finite and not math.isfinite(found)):
            raise ValueError(f"{cell!r} is no {'finite ' * finite}number, as in -12.5e3")
        return found

    try:
        if isinstance(column, pd.Series) and column.dtype.kind == "O":
            numbers = _all_numbers(column)
            if numbers is not None and (not finite or not np.isinf(numbers).any()):
                return numbers
            missing = column.isna()
            found = [None if gone else number(v) for gone, v in zip(missing, column, strict=True)]
            column = pd.Series(found, column.index, dtype=object)
        return column.astype("float64")
    except ValueError as error:
        raise UserError(
            f"column {name!r} must hold numbers, or their text. Received: {error}. Correct it"
        ) from None


def _all_numbers(column: pd.Series) -> pd.Series | None:
    """A column of nothing but text of numbers, read by Arrow as a log is; None of another."""
    missing = column.isna().to_numpy()
    try:
        numbers = pa.array(column[~missing], pa.string()).cast(pa.float64())
    except (pa.ArrowException, TypeError):
        return None
    found = np.full(len(column), np.nan)
    found[~missing] = numbers.to_numpy(zero_copy_only=False)
    return None if np.isnan(found[~missing]).any() else pd.Series(found, column.index)


def _unsplit(name: str, held: pd.Series) -> UserError:
    """What is wrong with cells of a column of lists, of which one is none."""
    cells = (cell for cell in held if not pd.api.types.is_list_like(cell))
    first = next(cells, f"cells of {held.dtype}")
    return UserError(
        f"column {name!r} must hold lists. Received: {first!r}. Split the cells of a CSV file at "
        f'their separator first: df["{name}"].str.split("|")'
    )


def _to_arrow(series: pd.Series, listed: bool = False) -> pa.Array:
    try:
        array = pa.array(series, from_pandas=True)
        held = array.type.value_type if is_list_type(array.type) else array.type
        if pa.types.is_decimal(held) and series.dtype == object:
            array = mixed_as_text(series.tolist())  # each with the digits that it has itself
    except (pa.ArrowInvalid, pa.ArrowTypeError):  # a column of texts and numbers
        array = mixed_as_text(series.tolist())
    if listed and array.null_count == len(array):
        array = pa.nulls(len(array), pa.list_(pa.string()))
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _text_on_gpu(series: Any, listed: bool, where: str) -> Any:
    """`as_text` of cuDF's column. Written from its documentation: it has not run on a GPU yet."""
    import cudf  # type: ignore[import-not-found]

    if is_list_dtype(series):
        leaves = _text_on_gpu(series.list.leaves, False, where)
        return encode_list_column(series, leaves, dtype=leaves.dtype)
    if listed and series.isnull().all():
        return type(series)([[]] * len(series), index=series.index, dtype=cudf.ListDtype("str"))
    if listed:
        raise _unsplit(series.name, series.dropna().to_pandas())
    if series.dtype == "object":  # text
        return series.where(series != "", None)
    if series.dtype.kind == "f":
        series = series.nans_to_nulls()
    return column_as_text(
        series, lambda distinct: exact_ids(distinct.to_arrow(), where), cudf.Series.from_arrow
    )


def _encode_on_gpu(transform: Any, col_selector: Any, df: Any) -> Any:
    out = df[col_selector.names].reset_index(drop=True)
    empty = [name for name in col_selector.names if out[name].isnull().all()]
    rest = [name for name in col_selector.names if name not in empty]
    if rest:
        out = transform(type(col_selector)(rest), out)
    for name in empty:
        out[name] = NULL_OFFSET
    return out[col_selector.names]


def _missing_to_unknown(ids: Any) -> Any:
    """Encoded ids, or lists of them, with 2 in the place of 1; pandas or cudf."""
    if not is_list_dtype(ids):
        return ids.where(ids != NULL_OFFSET, OOV_OFFSET)
    flat = flatten_list_column_values(ids)
    return encode_list_column(ids, flat.where(flat != NULL_OFFSET, OOV_OFFSET), dtype=flat.dtype)
