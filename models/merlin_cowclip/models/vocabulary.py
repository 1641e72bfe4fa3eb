"""Raw ids and ids of a field: the vocabulary that NVTabular's Categorify left in a workflow folder.

It reads files; it learns nothing.
"""

from __future__ import annotations

import numbers
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.plugins._stack import ColumnSchema
from merlin_cowclip.plugins.id_text import as_text

PADDING_ID = 0
MISSING_ID = 1
UNKNOWN_ID = 2
"""NVTabular's ids: 0 padding, 1 missing, 2 unknown, real ids from 3."""


def read_vocabulary(
    column: ColumnSchema,
    workflow: str | os.PathLike[str] | None = None,
) -> pd.Series:
    """The raw id of each id of a field.

    Args:
      column: of a schema that Categorify wrote: its `cat_path` names the file. A column without
        one was never encoded, and its ids are its raw ids, from 0 on: numbers of buckets, say, of
        which none is padding, missing or unknown; but see `has_raw_ids`.
      workflow: the folder of the saved `nvtabular.Workflow`. `cat_path` may be relative to it
        (ours is), or name a place that is gone; `None` takes `cat_path` as it stands.

    Returns:
      Raw ids by id; of Categorify real ones only.

    Raises:
      ValueError: the file is not there, or is of combined columns, or the ids have no raw ones, or
        others than the log's (`changed_before`).
    """
    if not has_raw_ids(column):
        raise ValueError(
            f"raw ids of field {column.name!r} must be in a vocabulary. Received: a field without "
            "one, whose ids its workflow hashed, or changed after Categorify. Take ids from "
            "workflow.transform."
        )
    operators = changed_before(column)
    if operators:
        raise ValueError(
            f"raw ids of field {column.name!r} must be those of the log, and {operators} may have "
            "changed them before they were encoded. Take ids from workflow.transform."
        )
    if not is_encoded(column):
        domain = column.int_domain
        ids = np.arange((domain.max if domain else -1) + 1)
        return pd.Series(ids, index=ids, name="raw")
    named = str(column.properties["cat_path"])
    tried = [Path(named)]
    if workflow is not None:
        # Its own copy first: a later fit may have overwritten the file that cat_path names.
        tried = [Path(workflow) / "categories" / Path(named).name, Path(workflow) / named]
    for path in tried:
        if path.exists():
            storage = path.name.removeprefix("unique.").removesuffix(".parquet")
            frame = _read(path, UNKNOWN_ID + int(column.properties.get("num_buckets") or 1))
            if storage not in frame:
                raise ValueError(
                    f"the vocabulary of field {column.name!r} must have a column {storage!r}. "
                    f"Received: {path}, with {list(frame.columns)}: an encoding of combined "
                    "columns has no single raw ids."
                )
            vocabulary = frame[storage]
            return vocabulary[vocabulary.notna()].rename("raw")
    raise ValueError(
        f"the vocabulary of field {column.name!r} must be a file. Received: {tried[0]}, which is "
        "not there. Pass workflow=, the folder of the saved NVTabular workflow."
    )


def _read(path: Path, first: int) -> pd.DataFrame:
    """A vocabulary's file, or folder of them, with its ids for an index, as Categorify takes them.

    They are the files' own index; where that begins before the first real id, in a file of the
    user's, they are the places behind it.
    """
    files = [path] if path.is_file() else path.glob("*.parquet")
    frame = pd.concat(map(pd.read_parquet, files)).sort_index()  # pandas alone drops their indices
    if len(frame) and frame.index.to_numpy()[0] < first:
        frame.index += first
    return frame


def encode(
    vocabulary: pd.Series,
    raw_ids: Any,
    *,
    missing: int = MISSING_ID,
    unknown: int = UNKNOWN_ID,
    prepared: bool = False,
) -> np.ndarray:
    """Ids of raw ids, n, int64, by their text as counts/ has it: 1382, 1382.0, "1382" are one id.

    Args:
      vocabulary: from `read_vocabulary`.
      raw_ids: n; text, whole numbers, or missing (None, NaN, NA).
      missing: id of the missing ones; see `missing_id`.
      unknown: id of those that are not in the vocabulary.
      prepared: whether `prepare` made the vocabulary: empty text is a missing id then.

    Raises:
      ValueError: one value in place of n; a raw id of another type; or a float (float32, float16)
        of 2^53 (2^24, 2^11) or more, which may have been another integer.
    """
    if not pd.api.types.is_list_like(raw_ids):
        raise ValueError(f"raw ids must be a list. Received: {raw_ids!r}. Give [{raw_ids!r}]")
    # Of an array its own scalars: as objects NumPy makes integers of times, and float32 a float.
    values = list(np.asarray(raw_ids) if hasattr(raw_ids, "dtype") else raw_ids)
    raw = pd.Series(values, dtype=object)
    gone = raw.isna().to_numpy()
    if prepared:
        gone |= (raw == "").to_numpy()
    known = vocabulary
    if pd.api.types.infer_dtype(known) != "string":  # where it is, empty text is an id
        known = pd.Series(as_text(pa.array(known, from_pandas=True)).to_pylist(), dtype=object)
    places = pd.Index(known, dtype=object).get_indexer(
        pd.Index([_as_text(one) for one in raw[~gone]], dtype=object)
    )
    ids = np.full(len(raw), missing, np.int64)
    ids[~gone] = np.append(vocabulary.index, unknown)[places]  # place -1, not there: the last
    return ids


def _as_text(raw: Any) -> str:
    """A raw id as the text that it has in counts/; a whole float as the integer it was."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, numbers.Integral) and not isinstance(raw, bool):
        return str(int(raw))
    if isinstance(raw, (float, np.floating)) and float(raw).is_integer():
        digits = np.finfo(type(raw)).nmant + 1
        if abs(float(raw)) < 2.0**digits:
            return str(int(raw))
        raise ValueError(
            f"a raw id must not be a float of 2^{digits} or more, where several integers are one "
            f"float. Received: {raw!r}. Give ids as integers or text"
        )
    raise ValueError(
        f"a raw id must be text or a whole number. Received: {raw!r}, {type(raw).__name__}. "
        "Give ids as text, as counts/ has them"
    )


def has_raw_ids(column: ColumnSchema) -> bool:
    """Whether a field's ids are raw ones, or numbers of them.

    They are not where a workflow hashed them (`HashBucket`), or changed them after Categorify:
    `merlin-cowclip adopt`, which knows the workflow, writes `no_raw_ids` into its schema.
    """
    return not column.properties.get("no_raw_ids")


def is_encoded(column: ColumnSchema) -> bool:
    """Whether Categorify made a field's ids, and not the log, or an operator such as Bucketize."""
    return bool(column.properties.get("cat_path"))


def changed_before(column: ColumnSchema) -> str:
    """Which operators may have changed a field's raw ids before they were encoded.

    Their names, such as "LambdaOp, Bucketize", or "" where there is none. `merlin-cowclip adopt`,
    which knows the workflow, writes them into its schema.
    """
    return str(column.properties.get("changed_before") or "")


def is_filled(column: ColumnSchema) -> bool:
    """Whether a workflow fills in a field's missing raw ids: `adopt` writes that, too."""
    return bool(column.properties.get("missing_filled"))


def is_prepared(column: ColumnSchema) -> bool:
    """Whether `prepare` made a field's vocabulary."""
    return bool(column.properties.get("empty_is_missing"))


def missing_id(column: ColumnSchema) -> int:
    """The id of a field's missing ids: 2 where they were made unknown, as top-k data does."""
    return UNKNOWN_ID if column.properties.get("missing_as_unknown") else MISSING_ID
