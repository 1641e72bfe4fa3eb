"""`MissingIds`: stock Categorify for rows whose ids are all missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from nvtabular.ops import Categorify
    from nvtabular.ops.categorify import NULL_OFFSET


class MissingIds(Categorify):
    """Stock Categorify, fitted, also for rows that it fails on, whose ids are all missing.

    It fails, too, on a missing one among whole numbers where it learned none, and on a missing
    list. What it takes it encodes; a missing id is 1, and a missing list an empty one.

    Args:
        fitted: of which it is a copy.
        lists: columns of lists, also where a frame does not show it, having missing ones alone. Of
            those that an operator made a schema does not tell: the first ids that come do.
        known: columns of which it is known otherwise whether they are of lists.
    """

    def __init__(self, fitted: Categorify, lists: Sequence[str], known: Sequence[str] = ()) -> None:
        self.__dict__.update(fitted.__dict__)
        self.lists = tuple(lists)
        self.known = tuple(known)  # and those of which ids came

    def transform(self, col_selector: Any, df: Any) -> Any:
        """As stock Categorify.

        Raises:
            RuntimeError: it fails, and not for missing ids.
        """
        self._look_at(col_selector, df)
        try:
            return super().transform(col_selector, df)
        except RuntimeError:
            if not isinstance(df, pd.DataFrame) or not df[col_selector.names].isna().any(axis=None):
                raise
        out, selector = df.reset_index(drop=True), type(col_selector)
        for group in col_selector.grouped_names:
            names = [group] if isinstance(group, str) else list(group)
            if self.encode_type == "combo":
                out[self.name_sep.join(names)] = self._together(names, selector, df[names])
            else:
                for name in names:
                    out[name] = self._alone(name, selector, df[name])
        return out

    def _look_at(self, col_selector: Any, df: Any) -> None:
        """Learn of columns that are new whether they are of lists."""
        known = self.__dict__.get("known", ())
        for name in col_selector.names if isinstance(df, pd.DataFrame) else ():
            if name in known or (first := df[name].first_valid_index()) is None:
                continue
            known = self.known = (*known, name)
            others = tuple(other for other in self.lists if other != name)
            is_list = pd.api.types.is_list_like(df[name][first])
            self.lists = (*others, name) if is_list else others

    def _alone(self, name: str, selector: Any, column: pd.Series) -> np.ndarray:
        missing = column.isna().to_numpy()
        ids: np.ndarray = np.full(len(column), NULL_OFFSET, np.int64)
        if name in self.lists or any(map(pd.api.types.is_list_like, column)):
            filled = pd.Series(
                [[] if gone else row for gone, row in zip(missing, column, strict=True)]
            )
        elif missing.all():
            return ids
        else:
            filled = column.reset_index(drop=True).mask(missing, column[~missing].iloc[0])
        found = super().transform(selector([name]), filled.to_frame(name))[name].to_numpy()
        return found if found.dtype == object else np.where(missing, ids, found)

    def _together(self, names: list[str], selector: Any, rows: pd.DataFrame) -> np.ndarray:
        """The ids of combinations: with a row more, in which no column is missing."""
        storage = self.name_sep.join(names)
        known = pd.read_parquet(self.categories[storage], columns=names)
        whole = {name: known[name].dropna().iloc[:1].tolist() or [""] for name in names}
        rows = pd.concat([rows, pd.DataFrame(whole)], ignore_index=True)
        group = selector([tuple(names)] if names[1:] else names)
        ids: np.ndarray = super().transform(group, rows)[storage].to_numpy()
        return ids[:-1]
