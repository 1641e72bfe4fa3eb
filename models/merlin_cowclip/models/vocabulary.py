"""Raw ids and ids of a field: the vocabulary that NVTabular's Categorify left in a workflow folder.

It reads files; it learns nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.plugins._stack import ColumnSchema

PADDING_ID = 0
MISSING_ID = 1
UNKNOWN_ID = 2
"""NVTabular's ids: 0 padding, 1 missing, 2 unknown, real ids from 3."""


def read_vocabulary(
    column: ColumnSchema, workflow: str | os.PathLike[str] | None = None
) -> pd.Series:
    """The raw id of each id of a field.

    Args:
      column: of a schema that Categorify wrote: its `cat_path` names the file. A column without
        one was never encoded, and its ids are its raw ids.
      workflow: the folder of the saved `nvtabular.Workflow`. `cat_path` may be relative to it
        (ours is), or name a place that is gone; `None` takes `cat_path` as it stands.

    Returns:
      Raw ids by id, real ones only.

    Raises:
      ValueError: the file is not there, or is of combined columns.
    """
    named = column.properties.get("cat_path")
    if not named:
        domain = column.int_domain
        ids = np.arange(UNKNOWN_ID + 1, (domain.max if domain else -1) + 1)
        return pd.Series(ids, index=ids, name="raw")
    tried = [Path(named)]
    if workflow is not None:
        # Its own copy first: a later fit may have overwritten the file that cat_path names.
        tried = [Path(workflow) / "categories" / Path(named).name, Path(workflow) / named]
    for path in tried:
        if path.exists():
            storage = path.name.removeprefix("unique.").removesuffix(".parquet")
            frame = pd.read_parquet(path)
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


def encode(vocabulary: pd.Series, raw_ids: Any) -> np.ndarray:
    """Ids of raw ids, n, int64: 1 for a missing one, 2 for one that is not in the vocabulary."""
    raw = pd.Series(np.asarray(raw_ids, dtype=object))
    # As objects: pandas would make integers beside a missing one floats, and large ones inexact.
    known = pd.Index(vocabulary.astype(object), dtype=object)
    places = known.get_indexer(pd.Index(raw, dtype=object))
    ids = np.append(vocabulary.index, UNKNOWN_ID)[places]  # place -1, not there, is the last
    ids[raw.isna().to_numpy()] = MISSING_ID
    return ids.astype(np.int64)
