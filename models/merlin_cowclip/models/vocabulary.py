# SPDX-License-Identifier: Apache-2.0
"""Raw ids and ids of a field: the vocabulary that NVTabular's Categorify wrote for a workflow."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from merlin_cowclip.plugins._tensorflow import ColumnSchema

Ids: TypeAlias = NDArray[np.int64]
Folder: TypeAlias = str | os.PathLike[str] | None

PADDING_ID, MISSING_ID, UNKNOWN_ID = 0, 1, 2
"""NVTabular's ids; real ids start at 3."""


def cardinality(column: ColumnSchema) -> int:
    """Ids of a categorical column, special ones included; a ValueError without an int domain."""
    domain = column.int_domain
    if domain is None or domain.max is None:
        raise ValueError(
            f"Column {column.name!r} must have an int domain with a max (its cardinality - 1), as "
            "Categorify writes it. Behind another operator, such as Bucketize, set it: "
            "column.with_properties({'domain': {'min': 0, 'max': 9}})."
        )
    return int(domain.max) + 1


def has_raw_ids(column: ColumnSchema) -> bool:
    """Whether `merlin-cowclip adopt` found that no operator hashed or changed a field's raw ids."""
    return not column.properties.get("no_raw_ids")


def is_encoded(column: ColumnSchema) -> bool:
    """Whether Categorify made a field's ids."""
    return bool(column.properties.get("cat_path"))


def read_vocabulary(column: ColumnSchema, workflow: Folder = None) -> pd.Series[Any]:
    """The raw id of each id of a field but padding, missing and unknown: text or integers.

    Args:
      column: its `cat_path`, which Categorify wrote, names the file. Without one, ids are raw ids.
      workflow: the folder of the saved `nvtabular.Workflow`, to which `cat_path` may be relative;
        `None` reads `cat_path`.

    Raises:
      ValueError: the file is missing, of combined columns or of another workflow; raw ids are
        neither text nor integers, or the workflow hashed or changed them.
    """
    name = column.name
    if not has_raw_ids(column):
        raise ValueError(
            f"Field {name!r} has no raw ids: its workflow hashed or changed them. Take ids from "
            "workflow.transform."
        )
    if not is_encoded(column):
        ids = np.arange(cardinality(column))
        return pd.Series(ids, index=ids, name="raw")
    named = str(column.properties["cat_path"])
    path = Path(named)
    if workflow is not None:
        # Its own copy first: a later fit may have overwritten the file that cat_path names.
        path = Path(workflow) / "categories" / path.name
        path = path if path.exists() else Path(workflow) / named
    if not path.exists():
        raise ValueError(
            f"The vocabulary of field {name!r} is not at {path}. Pass workflow=, the folder of the "
            "saved NVTabular workflow."
        )
    files = [path] if path.is_file() else path.glob("*.parquet")
    frame = pd.concat(map(pd.read_parquet, files)).sort_index()  # pandas alone drops their indices
    first = UNKNOWN_ID + int(column.properties.get("num_buckets") or 1)
    if len(frame) and frame.index.to_numpy()[0] < first:
        frame.index += first  # a vocabulary of the user's own, numbered from 0
    storage = path.name.removeprefix("unique.").removesuffix(".parquet")
    if storage not in frame:
        raise ValueError(f"Field {name!r} combines {list(frame.columns)}, so it has no raw ids.")
    raw = frame[storage].dropna().rename("raw")
    if pd.api.types.is_float_dtype(raw) and (raw % 1 == 0).all() and (raw.abs() < 2**53).all():
        raw = raw.astype("int64")  # integers beside a missing value
    kind = pd.api.types.infer_dtype(raw)
    if kind not in ("string", "integer", "empty"):
        raise ValueError(
            f"The raw ids of field {name!r} must be text or integers. Received: {kind} in {path}. "
            "Take ids from workflow.transform."
        )
    if len(raw) and raw.index.max() != cardinality(column) - 1:
        raise ValueError(
            f"the vocabulary of field {name!r} must end with the last id of its cardinality, "
            f"{cardinality(column) - 1}. Received: id {raw.index.max()}. It is another workflow's "
            "than the schema."
        )
    return raw


def raw_of_ids(column: ColumnSchema, workflow: Folder) -> NDArray[Any]:
    """The raw id of each id of a field; `None` of ids without one."""
    raw = np.full(cardinality(column), None, object)
    if has_raw_ids(column):
        vocabulary = read_vocabulary(column, workflow)
        raw[vocabulary.index] = vocabulary.astype(object)
    return raw


def ids_of_raw(column: ColumnSchema, raw_ids: Any, workflow: Folder) -> Ids:
    """Ids of n raw ids as the field's workflow encodes them, n; see `FusedEmbeddings.rows`."""
    given, encoded = column.properties, is_encoded(column)
    missing = UNKNOWN_ID if given.get("missing_as_unknown") else MISSING_ID
    ids = encode(
        read_vocabulary(column, workflow),
        raw_ids,
        missing=missing if encoded else -1,
        unknown=UNKNOWN_ID if encoded and int(given.get("num_buckets") or 1) == 1 else -1,
        empty_is_missing=bool(given.get("empty_is_missing")),
    )
    if (ids < 0).any():
        bad = list(raw_ids)[int(np.argmax(ids < 0))]
        reason = f"its ids are whole numbers from 0 to {cardinality(column) - 1}"
        if encoded:
            reason = "the workflow hashes unknown ids"
        raise ValueError(
            f"Field {column.name!r} has no row for the raw id {bad!r}: {reason}. Take the id from "
            "workflow.transform."
        )
    return ids


def known_rows(
    column: ColumnSchema, frame: pd.DataFrame, workflow: Folder
) -> tuple[Ids, pd.DataFrame]:
    """The rows of a frame with a raw id, its index, that the field knows; and their ids."""
    name = column.name
    if "raw" in frame or (frame.index.name == "id" and is_encoded(column)):
        raise ValueError(
            f"The index of a frame of rows of field {name!r} must be raw ids. Of a frame of "
            "to_df, give .dropna(subset='raw').set_index('raw')."
        )
    ids = encode(read_vocabulary(column, workflow), frame.index, missing=-1, unknown=-1)
    known = frame[ids >= 0]
    again = pd.Series(ids[ids >= 0]).duplicated().to_numpy()
    if again.any():  # 7 and "7" are one id
        twice = known.index[again].tolist()[0]
        raise ValueError(f"raw ids of field {name!r} must be unique. Received: {twice!r}")
    if not len(known):
        raise ValueError(
            f"raw ids of field {name!r} must be in its vocabulary. Received: {len(ids)} ids, "
            f"none of which is: {list(frame.index[:3])}"
        )
    return ids[ids >= 0], known


def encode(
    vocabulary: pd.Series[Any],
    raw_ids: Any,
    missing: int,
    unknown: int,
    empty_is_missing: bool = False,
) -> Ids:
    """Ids of raw ids, n, int64: text, whole numbers (7, 7.0 and "7" are one id), or missing.

    `vocabulary` is from `read_vocabulary`; `missing`, `unknown`: ids of None, NaN and NA, and of
    what it does not contain; `empty_is_missing`: empty text is missing, as in prepared data.
    """
    if not pd.api.types.is_list_like(raw_ids):
        raise ValueError(f"Raw ids must be a list. Received: {raw_ids!r}. Give [{raw_ids!r}]")
    raw = pd.Series(list(raw_ids), dtype=object)
    given = raw.notna().to_numpy()
    if empty_is_missing:
        given &= (raw != "").to_numpy()
    texts = pd.Index([_as_text(one) for one in raw[given]], dtype=object)
    places = pd.Index(vocabulary.astype(str), dtype=object).get_indexer(texts)
    ids = np.full(len(raw), missing, np.int64)
    ids[given] = np.append(vocabulary.index, unknown)[places]  # place -1, not there: the last
    return ids


def _as_text(raw: Any) -> str:
    if isinstance(raw, str):
        return raw
    is_id = isinstance(raw, int | np.integer) and not isinstance(raw, bool)
    # From 2^53 on, several integers are one float.
    if is_id or (isinstance(raw, float) and raw.is_integer() and abs(raw) < 2**53):
        return str(int(raw))
    raise ValueError(
        f"A raw id must be text, as in counts/, or an integer. Received: {raw!r}, "
        f"{type(raw).__name__}."
    )
