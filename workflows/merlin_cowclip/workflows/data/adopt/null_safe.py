"""Stock `Categorify` for batches with nulls on which it fails."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from nvtabular.ops import Categorify
    from nvtabular.ops.categorify import NULL_OFFSET


class NullSafeCategorify(Categorify):
    """A fitted `Categorify` that gives a null id 1, and an empty list for a null list.

    Stock fails on a batch of nulls only, and on a null among integers if the fit had none.

    Args:
        fitted: of which it is a copy.
        lists: columns of lists, which a batch of nulls does not show.
    """

    def __init__(self, fitted: Categorify, lists: Collection[str]) -> None:
        self.__dict__.update(fitted.__dict__)
        self.lists = frozenset(lists)

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Encode a batch."""
        names = [n for n in col_selector.names if n in df and df[n].isna().any()]
        if self.encode_type == "combo" or not names:
            return super().transform(col_selector, df)
        out, nulls = df.reset_index(drop=True), {name: df[name].isna().to_numpy() for name in names}
        empty = []
        for name, null in nulls.items():
            if name in self.lists:
                rows = [[] if gone else row for gone, row in zip(null, df[name], strict=True)]
                out[name] = pd.Series(rows, dtype=object)
            elif null.all():
                empty.append(name)
            else:
                out[name] = out[name].mask(null, out[name][int(np.argmin(null))])
        rest = [name for name in col_selector.names if name not in empty]
        encoded = super().transform(type(col_selector)(rest), out) if rest else out
        for name, null in nulls.items():
            if name in empty:
                encoded[name] = np.full(len(df), NULL_OFFSET, np.int64)
            elif name not in self.lists:
                encoded[name] = np.where(null, NULL_OFFSET, encoded[name].to_numpy())
        encoded.index = df.index
        return encoded
