"""Raw rows through the workflow of an adopted pipeline, as `predict --raw` and a server read them.

Whatever the workflow would take without a word, and make other inputs of than at its fit, is
refused, or told of.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import pyarrow as pa

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.missing_numbers import (
    Encode,
    MissingNumbers,
    columns_told_apart,
)
from merlin_cowclip.workflows.data.missing_text import MissingText
from merlin_cowclip.workflows.data.raw_frames import fitted_columns, pandas_frame
from merlin_cowclip.workflows.data.raw_types import raw_types
from merlin_cowclip.workflows.errors import Notice, UserError, clipped

if TYPE_CHECKING:
    import nvtabular as nvt


class RawRows:
    """How raw rows become a model's inputs.

    Args:
      workflow: fitted, with the types of `name_types`.
      ids: columns of ids that it makes.
      encode: what runs it on some rows, row for row.
    """

    def __init__(self, workflow: nvt.Workflow, ids: Collection[str], encode: Encode) -> None:
        self.types = raw_types(workflow)
        otherwise = columns_told_apart(workflow)
        self._numbers = MissingNumbers(self.types, otherwise, ids)
        self._text = MissingText(self.types, otherwise, ids)
        self._encode = encode
        self._told = set[str]()

    def of_columns(self, columns: Mapping[str, pa.Array], place: Place) -> pa.RecordBatch:
        """Encode rows of a file.

        Args:
          columns: those that the workflow reads.
          place: where the rows lie.

        Raises:
          UserError: a column is of another type than at the fit, a value has no equal of it, or
            the workflow does not take the rows, or not as at its fit, or makes others of them.
        """
        fitted = {n: self.types[n].of(column, n, place) for n, column in columns.items()}
        self._tell_of_unknown(fitted, place)
        return self._encoded(pandas_frame(fitted), fitted, place)

    def of_frame(self, frame: pd.DataFrame, place: Place) -> pa.RecordBatch:
        """Encode rows of a frame.

        Args:
          frame: the columns that the workflow reads, of whatever types; others are no matter.
          place: where the rows lie.

        Raises:
          UserError: as `of_columns`.
        """
        found, fitted = fitted_columns(frame, self.types, place)
        self._tell_of_unknown(fitted, place)
        return self._encoded(found, fitted, place)

    def _tell_of_unknown(self, fitted: Mapping[str, pa.Array], place: Place) -> None:
        """Warn of columns whose type at the fit nobody knows, once, unless they are text."""
        for name, column in fitted.items():
            said = self.types[name].unknown(column.type)
            if said is not None and name not in self._told:
                self._told.add(name)
                warnings.warn(f"{place.column(name)} {said}", Notice, stacklevel=5)

    def _encoded(
        self, frame: pd.DataFrame, fitted: Mapping[str, pa.Array], place: Place
    ) -> pa.RecordBatch:
        rows = place.rows(len(frame))
        with refusing_others(place, len(frame)):
            encoded = self._encode(frame)
            misread = self._numbers.misread(frame, fitted, encoded, self._encode)
            told = self._text.told_apart(frame, encoded, self._encode)
        if misread is not None:
            misread.refuse(rows)
        unsure = self._numbers.told_otherwise(frame, fitted, self._encode)
        for said in filter(None, (told, *unsure)):
            if said not in self._told:
                self._told.add(said)
                warnings.warn(f"{said}. The first are in {rows}", Notice, stacklevel=5)
        return encoded


@contextlib.contextmanager
def refusing_others(place: Place, count: int) -> Iterator[None]:
    """Make a sentence of what a workflow raises that is given some rows.

    Args:
      place: where they lie.
      count: how many they are.

    Raises:
      UserError: it does not take them, or makes others of them.
    """
    from merlin_cowclip.workflows.data.row_for_row import (  # it imports NVTabular
        OtherNumberError,
        OtherRowsError,
    )

    rows = place.rows(count)
    try:
        yield
    except UserError:
        raise
    except OtherRowsError as error:  # whose is a probability?
        raise UserError(
            "the run's workflow must make one row of each, in its place. Received: "
            f"{error}, in {rows}. Leave out the rows that it drops, or encode the rows with the "
            "workflow yourself, and give `predict` the parquet that it wrote, without --raw"
        ) from None
    except OtherNumberError as error:
        limits = np.iinfo(error.kind)
        shown = f"{error.value}, of which {error.kind}, {limits.min} to {limits.max}, makes another"
        rule = "a number must fit into the type that ReduceDtypeSize gave its column at the fit"
        place.refuse(rule, shown, error.row, error.column, "Leave it out, or fit without it")
    except Exception as error:  # whatever the user's own operators raise
        raise UserError(
            f"the run's workflow must take the rows. Received: {rows}: "
            f"{type(error).__name__}: {clipped(str(error))}. Give rows as it was fitted on"
        ) from error
