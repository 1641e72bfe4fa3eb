# SPDX-License-Identifier: Apache-2.0
"""NVTabular operators for raw rows: `Vocabulary` and `Scale` in a workflow. Imports NVTabular."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.encoder import Scale
from merlin_cowclip.workflows.data.sources.base import ids_as_text, time_field
from merlin_cowclip.workflows.data.spec import TIME_FIELDS, DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import Vocabulary, copy_index
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.schema import Schema, Tags
    from nvtabular.ops import Categorify, Operator


class EncodeIds(Categorify):
    """Categorify (same files, IDs and schema) for IDs of any type, read as text.

    1382, 1382.0 and "1382" are one ID; an empty text is missing, a missing list is empty. On a CPU,
    stock Categorify encodes wrongly if the frame's index is not 0, 1, 2, …, or IDs are hashed, and
    fails if all IDs of a batch are missing. This class asks `Vocabulary`.

    Args:
        out_path: the folder that gets ``categories/``. No default: workflows that share
            Categorify's (``./``) overwrite each other's vocabularies.
        lists: the fields of lists.
        shared: the name of its vocabulary, by field that shares another's.
        null_values: texts that mean a missing ID, in addition to the empty one.
        options: ``freq_threshold`` or ``num_buckets`` as in Categorify, by field.
    """

    def __init__(
        self,
        out_path: str | Path,
        *,
        lists: Sequence[str] = (),
        shared: Mapping[str, str] = MappingProxyType({}),
        null_values: Sequence[str] = (),
        **options: Any,
    ) -> None:
        with warnings.catch_warnings():  # of hashing that differs on GPUs: not ours
            warnings.simplefilter("ignore", UserWarning)
            super().__init__(out_path=str(out_path), **options)
        self.lists, self.shared = tuple(lists), dict(shared)
        self.null_values = tuple(null_values)
        self._vocabularies: dict[str, Vocabulary] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_vocabularies": {}}  # read again from the files beside it

    def fit_finalize(self, categories: Any) -> None:
        """Take the vocabulary files, ``{field: path}``."""
        self._vocabularies = {}
        super().fit_finalize(categories)

    def transform(self, col_selector: Any, df: Any) -> Any:
        """Ids as int64: 1 for a missing one, 2 (or a bucket) for one not in the vocabulary.

        A cuDF frame must have ids as text, or lists of text. Stock Categorify encodes it on the
        GPU. Lists, hashed ids, columns of nulls, and ``order`` and ``labels``, names that it uses
        itself, are encoded as on a CPU.
        """
        names = list(col_selector.names)
        if not hasattr(df, "to_pandas"):
            return self._transform(df[names])
        out = df[names].reset_index(drop=True)
        for name in names:
            on_cpu = (
                name in (*self.lists, *self.shared, "order", "labels") or self.buckets(name) > 1
            )
            if on_cpu or out[name].isna().all():
                out[name] = type(df).from_pandas(self._transform(out[[name]].to_pandas()))[name]
            else:
                out[name] = super().transform(type(col_selector)([name]), out)[name]
        return out

    def _transform(self, frame: pd.DataFrame) -> pd.DataFrame:
        out = frame.copy(deep=False)
        for name in frame.columns:
            is_list = name in self.lists
            remedy = f'Split text: df["{name}"].str.split("|")' if is_list else "Read it as text"
            with _refusing(f"cannot read column {name!r}", remedy):
                cells = pa.array(frame[name], from_pandas=True)
                if isinstance(cells, pa.ChunkedArray):
                    cells = cells.combine_chunks()
                if is_list and cells.null_count == len(cells):
                    cells = pa.nulls(len(cells))
                texts = ids_as_text(cells, is_list, self.null_values)
            ids: Any = self.vocabulary(name).encode(texts.flatten() if is_list else texts)
            if is_list:
                ends = np.cumsum(pc.list_value_length(texts).to_numpy())
                ids = np.split(ids, ends[:-1]) if len(frame) else []
            out[name] = pd.Series(ids, frame.index, object if is_list else np.int64)
        return out

    def vocabulary(self, field: str) -> Vocabulary:
        """How a field's texts are encoded."""
        if field not in self._vocabularies:
            path = self.categories[field]
            self._vocabularies[field] = Vocabulary.open(path, self.buckets(field))
        return self._vocabularies[field]

    def set_storage_path(self, new_path: str, copy: bool = False) -> None:
        """Move to another folder, to which ``copy`` copies the files."""
        before, self._vocabularies = dict(self.categories), {}
        super().set_storage_path(new_path, copy=copy)
        for field, path in self.categories.items():
            if copy:
                copy_index(Path(before[field]), Path(path))

    def buckets(self, field: str) -> int:
        """Hash buckets of a field; 1 for the unknown id only."""
        return self.num_buckets.get(field, 1) if self.num_buckets else 1

    def _compute_properties(self, col_schema: Any, input_schema: Schema) -> Any:
        schema = super()._compute_properties(col_schema, input_schema)
        path, buckets = schema.properties["cat_path"], self.buckets(col_schema.name)
        domain = self.shared.get(col_schema.name, col_schema.name)
        return schema.with_properties(
            {
                # Categorify writes an absolute path; folders move.
                "cat_path": path and str(Path(path).relative_to(self.out_path)),
                "num_buckets": buckets if buckets > 1 else None,
                "empty_is_missing": True,
                "domain": {**schema.properties["domain"], "name": domain},
            }
        )


class ScaleNumbers(Operator):
    """Numbers, or their text, scaled as `prepare` does, in float32.

    Args:
        scales: by column.
        null_values: texts that mean a missing number, as the empty one does.
        non_finite: whether inf is missing, too; if not, it raises an error.
    """

    def __init__(
        self,
        scales: Mapping[str, Scale],
        null_values: Sequence[str] = (),
        non_finite: bool = False,
    ) -> None:
        super().__init__()
        self.scales, self.null_values, self.non_finite = scales, tuple(null_values), non_finite

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The same columns as float32; raises UserError for text that is not a number."""
        out = type(df)()
        for name in col_selector.names:
            cells = df[name].to_pandas() if hasattr(df, "to_pandas") else df[name]
            with _refusing(f"column {name!r} must hold numbers, or their text", "Correct it"):
                if cells.dtype.kind == "O":
                    cells = cells.mask(cells.isna() | cells.isin(["", *self.null_values]))
                numbers = cells.to_numpy(dtype=np.float64, na_value=np.nan)
            if not self.non_finite and np.isinf(numbers).any():
                raise UserError(f"column {name!r} has an infinite number. Leave it missing")
            out[name] = self.scales[name](np.where(np.isinf(numbers), np.nan, numbers))
        out.index = df.index
        return out

    @property
    def output_dtype(self) -> Any:
        """float32."""
        return np.dtype("float32")

    @property
    def output_tags(self) -> list[Tags]:
        """Numbers."""
        return [Tags.CONTINUOUS]


class RawFields(Operator):
    """Fields from columns of another name, and ``hour`` and ``weekday`` from columns of times."""

    def __init__(self, spec: DatasetSpec, fields: Sequence[str]) -> None:
        super().__init__()
        self.spec, self.sources = spec, {name: spec.column_of(name) for name in fields}

    def transform(self, col_selector: Any, df: Any) -> Any:
        """The fields; those of times as text."""
        out = type(df)(index=df.index)
        for field, column in self.sources.items():
            out[field] = df[column]
            if field in TIME_FIELDS and getattr(self.spec, field):
                cells = pa.array(df[column].to_pandas() if hasattr(df, "to_pandas") else df[column])
                ids = time_field(field, cells, self.spec).dictionary_decode()
                out[field] = ids.to_pandas().to_numpy()
        return out

    def column_mapping(self, col_selector: Any) -> dict[str, list[str]]:
        """The column of each field."""
        return {field: [column] for field, column in self.sources.items()}


@contextlib.contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    """Raise UserError for what Arrow or pandas cannot convert."""
    try:
        yield
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise UserError(f"{what}: {clipped(str(error))}. {remedy}") from None
