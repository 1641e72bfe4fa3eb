"""Raw ids and ids of a field: the vocabulary that NVTabular's Categorify left in a workflow folder.

It reads files; it learns nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import functools
import numbers
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.plugins._stack import ColumnSchema
from merlin_cowclip.plugins.checks import DIGITS
from merlin_cowclip.plugins.id_text import as_text

PADDING_ID = 0
MISSING_ID = 1
UNKNOWN_ID = 2
"""NVTabular's ids: 0 padding, 1 missing, 2 unknown, real ids from 3."""


def read_vocabulary(
    column: ColumnSchema,
    workflow: str | os.PathLike[str] | None = None,
    *,
    as_read: bool = False,
) -> pd.Series:
    """The raw id of each id of a field.

    Args:
      column: of a schema that Categorify wrote: its `cat_path` names the file. A column without
        one was never encoded, and its ids are its raw ids, from 0 on: numbers of buckets, say, of
        which none is padding, missing or unknown; but see `has_raw_ids`.
      workflow: the folder of the saved `nvtabular.Workflow`. `cat_path` may be relative to it
        (ours is), or name a place that is gone; `None` takes `cat_path` as it stands.
      as_read: give the values that Categorify read, also where an operator before it may have made
        them of others (`changed_before`).

    Returns:
      Raw ids by id; of Categorify real ones only.

    Raises:
      ValueError: the file is not there, or is of combined columns, or the ids have no raw ones, or,
        but for `as_read`, others than the log's.
    """
    if not has_raw_ids(column):
        raise ValueError(
            f"raw ids of field {column.name!r} must be in a vocabulary. Received: a field without "
            "one, whose ids its workflow hashed, or changed after Categorify. Take ids from "
            "workflow.transform."
        )
    operators = changed_before(column)
    if operators and not as_read:
        raise ValueError(
            f"raw ids of field {column.name!r} must be those of the log, and {operators} may have "
            "changed them before they were encoded. Received: as_read=False. Take ids from "
            f"workflow.transform, or pass as_read=True with values as {operators} made them."
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
    """Ids of raw ids, n, int64.

    1382, 1382.0 and "1382" are one id, whether the vocabulary holds numbers or, as ours do, the
    text of them: pandas makes integers beside a missing one floats.

    Args:
      vocabulary: from `read_vocabulary`.
      raw_ids: n; text, numbers, or missing (None, NaN, NA).
      missing: id of the missing ones; see `missing_id`.
      unknown: id of those that are not in the vocabulary.
      prepared: whether `prepare` made the vocabulary: empty text is a missing id then, and a time
        or a decimal, from parquet, the text that counts/ has.

    Raises:
      ValueError: one value in place of n; a raw id of another type: of text, numbers and times,
        none is found by another; a time or decimal of another form than the prepared ones; or a
        float (float32, float16) of 2^53 (2^24, 2^11) or more, which may have been another integer,
        unless the vocabulary is of such floats itself.
    """
    if not pd.api.types.is_list_like(raw_ids):
        raise ValueError(f"raw ids must be a list. Received: {raw_ids!r}. Give [{raw_ids!r}]")
    _refuse_inexact(raw_ids, vocabulary)
    if getattr(getattr(raw_ids, "dtype", None), "kind", "O") in "mM":
        raw_ids = pd.Index(raw_ids)  # NumPy would make times integers
    raw = pd.Series(np.asarray(raw_ids, dtype=object))
    gone = raw.isna().to_numpy()
    if prepared:
        gone |= (raw == "").to_numpy()
    held = raw[~gone]
    # As objects: pandas would make integers beside a missing one floats, and large ones inexact.
    known = pd.Index(vocabulary.astype(object), dtype=object)
    if vocabulary.dtype.kind in "iuf":
        of_floats = vocabulary.dtype.kind == "f"
        held = held.map(functools.partial(_as_number, of_floats=of_floats))
    elif pd.api.types.infer_dtype(known) == "string":
        if prepared:
            held = _text_of_parquet(held, known)
        held = held.map(_as_text)
    elif len(known):  # in an empty one every id is unknown
        _refuse_another_kind(held, known[0])
    places = known.get_indexer(pd.Index(held, dtype=object))
    ids = np.full(len(raw), missing, np.int64)
    ids[~gone] = np.append(vocabulary.index, unknown)[places]  # place -1, not there: the last
    return ids


def _refuse_inexact(raw_ids: Any, vocabulary: pd.Series) -> None:
    """Refuse floats where several integers are one of them, held as objects or not."""
    kind: Any = getattr(raw_ids, "dtype", None)
    floats: dict[int, Any] = {}  # by their bytes
    if getattr(kind, "kind", "O") == "f":
        floats[kind.itemsize] = (
            pd.Series(raw_ids).astype("Float64").to_numpy(np.float64, na_value=np.nan)
        )
    elif getattr(kind, "kind", "O") == "O":  # a list, too, which may be of them
        for raw in raw_ids:
            if isinstance(raw, (float, np.floating)):
                floats.setdefault(getattr(raw, "itemsize", 8), []).append(float(raw))
    for size, values in floats.items():
        bits = min(8 * size, 64)
        if bits == 64 and vocabulary.dtype.kind == "f":
            continue  # which holds the same
        digits = DIGITS[f"float{bits}"]
        held = np.asarray(values)
        large = held[np.isfinite(held) & (np.abs(held) >= 2.0**digits)]
        if len(large):
            name = "float" if bits == 64 else f"{bits}-bit float"
            raise ValueError(
                f"a raw id must not be a {name} of 2^{digits} or more, where several integers are "
                f"one float. Received: {large[0]!r}. Give ids as integers or text"
            )


def _refuse_another_kind(raw_ids: pd.Series, known: Any) -> None:
    """Refuse raw ids that a vocabulary such as of times cannot hold: each would be unknown."""
    wanted = _kind(known)
    for raw in raw_ids:
        if _kind(raw) != wanted:
            raise ValueError(
                f"a raw id must be of the vocabulary's type, such as {known!r}. Received: {raw!r}, "
                f"{type(raw).__name__}. Give it as it stands in the log"
            )


def _kind(raw: Any) -> str:
    """What can equal only its own kind."""
    if isinstance(raw, str):
        return "text"
    if isinstance(raw, (bool, np.bool_)):
        return "boolean"
    if isinstance(raw, numbers.Number):
        return "number"
    if isinstance(raw, (datetime.date, np.datetime64)):
        return "time" if getattr(raw, "tzinfo", None) is None else "time of a zone"
    return "other"


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


def _as_text(raw: Any) -> str:
    """A raw id as the text that it has in a vocabulary; a whole float as the integer it was."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, (bool, np.bool_)):
        return "true" if raw else "false"
    if isinstance(raw, numbers.Integral):
        return str(int(raw))
    if isinstance(raw, numbers.Real):
        value = float(raw)
        # Beyond 2^53 a float no longer holds every integer.
        if value.is_integer() and abs(value) < 2**53:
            return str(int(value))
        return str(pa.scalar(value, pa.float64()).cast(pa.string()).as_py())
    raise ValueError(
        f"a raw id must be text or a number. Received: {raw!r}, {type(raw).__name__}. "
        "Give it as it stands in the log"
    )


def _text_of_parquet(raw_ids: pd.Series, known: pd.Index) -> pd.Series:
    """Raw ids with the times and decimals among them as `prepare` has them from parquet.

    A date is none of a vocabulary of moments, though pandas may have made it one.
    """
    kinds = (datetime.date, datetime.time, np.datetime64, decimal.Decimal)
    others = raw_ids[raw_ids.map(lambda raw: isinstance(raw, kinds)).astype(bool)]
    texts = raw_ids.astype(object)  # pandas would make times of them
    kind = others.map(lambda raw: f"{type(raw)} {getattr(raw, 'tzinfo', None)}")
    for _, group in others.groupby(kind, sort=False):
        texts[group.index] = as_text(pa.array(pd.Series(group.tolist()))).to_pylist()
    new = others[~texts[others.index].isin(known)]
    if len(new):
        forms = set(map(_form, known))
        for raw, text in zip(new, texts[new.index], strict=True):
            if _form(text) not in forms:
                raise ValueError(
                    f"a raw id must be text, a number, or a time or decimal as {known[0]!r} is. "
                    f"Received: {raw!r}, which is {text!r}. Give its text as counts/ has it"
                )
    return texts


def _form(text: str) -> str:
    """The same of all times that `prepare` took from a column, or of all its decimals."""
    text = re.sub(r"(?<=:\d\d)\.\d+", "", text)  # its zeros are left out
    text = re.sub(r"[+-](?=\d{4}$)", "+", text)  # a zone's offset
    return re.sub(r"\d", "0", re.sub(r"^-?\d+(?=\.|$)", "0", text))


def _as_number(raw: Any, *, of_floats: bool) -> Any:
    """A raw id for a vocabulary of numbers; text that is no number's own stays what it is."""
    text = _as_text(raw)
    if not isinstance(raw, (str, bool, np.bool_)):
        return raw
    for number in (int, float):
        with contextlib.suppress(ValueError):
            value = number(text)
            # Among floats as Python writes one, "7.0"; a large one may be another, rounded.
            is_written_so = of_floats and str(value) == text and abs(value) < 2**53
            if _as_text(value) == text or is_written_so:
                return value
    return text
