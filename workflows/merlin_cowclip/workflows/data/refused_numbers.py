"""Numbers of raw rows that are not what the workflow was fitted on, and what is said of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn

import numpy as np
import pandas as pd

from merlin_cowclip.workflows.data.encoded_rows import Place
from merlin_cowclip.workflows.data.number_types import floats_of
from merlin_cowclip.workflows.errors import UserError


@dataclass(frozen=True)
class Refused:
    """A number of a column that the workflow must not be given."""

    column: str
    row: int  # from 0
    value: float

    rule: ClassVar[str]  # what it would have to be
    remedy: ClassVar[str]

    @property
    def shown(self) -> object:
        """The value, in the message."""
        return self.value

    def refuse(self, place: Place) -> NoReturn:
        """Raise UserError."""
        place.refuse(self.rule, self.shown, self.row, self.column, self.remedy)


class NotWhole(Refused):
    """A number that is no id of a column of whole numbers."""

    rule = (
        "an id must be a whole number below 2^53 (as a float32, 2^24), as those that the workflow "
        "was fitted on"
    )
    remedy = "Give whole numbers"


class Rounded(Refused):
    """A float of which ids are made, or that is looked up, and that several integers are."""

    rule = (
        "a number of which the workflow makes ids, or which it looks up, must be below 2^53 (as a "
        "float32, 2^24) or an integer, as at the fit: larger floats are rounded"
    )
    remedy = "Give integers"


class NotBoolean(Refused):
    """A number where the fit had booleans, and that is none."""

    rule = "a boolean must be true, false, 1 or 0, as those that the workflow was fitted on"
    remedy = "Give booleans"


class Uneven(Refused):
    """A number in a column of objects, which no type of numbers holds exactly."""

    rule = "numbers of 2^53 and more must be whole, and no floats among them"
    remedy = "Give numbers of one type"


class Narrowed(Refused):
    """A float32 that is another number than the float64 of the same digits, which was an id."""

    rule = "an id must be a float64, as those that the workflow was fitted on"
    remedy = "Give the column as float64"

    @property
    def shown(self) -> object:
        """The digits, too."""
        return f"{np.float32(self.value)!s} as a float32, which is {self.value!r},"


@dataclass(frozen=True)
class Beyond(Refused):
    """A number that does not fit into the type that `ReduceDtypeSize` chose at the fit."""

    kind: np.dtype
    rule = "a number must fit into the type that ReduceDtypeSize gave its column at the fit"
    remedy = "Leave it out, or fit without it"

    @property
    def shown(self) -> object:
        """With the type."""
        limits = np.iinfo(self.kind)
        return (
            f"{self.value}, which {self.kind}, of {limits.min} to {limits.max}, makes another "
            "number,"
        )


@dataclass(frozen=True)
class Misread:
    """A column of whole numbers of another type than at the fit, which the workflow reads so."""

    column: str
    among: str  # what they are of that type by
    made: str  # what that makes them

    @classmethod
    def of(cls, column: pd.Series, fitted: np.dtype) -> Misread:
        """Of a column as it is."""
        name, kind = str(column.name), column.dtype
        if kind.kind != "f":
            made = f"them wider; of {fitted} the workflow makes other inputs"
            return cls(name, f"one that is no {fitted}", made)
        made = "them floats to pandas; of 7.0 the workflow makes another input than of 7"
        return cls(name, _among(column), made)

    def refuse(self, rows: str) -> NoReturn:
        """Raise UserError for rows, which are where."""
        raise UserError(
            f"whole numbers of column {self.column!r} must have no {self.among} among them, for "
            f"the workflow was fitted on none. Received: {rows}, which makes {self.made}. Fill it "
            "in, or give the rows without one apart"
        )


@dataclass(frozen=True)
class MisreadDigits:
    """A column of floats narrower than at the fit, of which the workflow makes other ids."""

    column: str
    given: np.dtype
    fitted: np.dtype

    def refuse(self, rows: str) -> NoReturn:
        """Raise UserError for rows, which are where."""
        raise UserError(
            f"column {self.column!r}, of which the workflow makes ids, must be {self.fitted}, as "
            f"it was fitted on. Received: {self.given}, {rows}, of which it makes other ids: 0.1 "
            f"is another number. Give the column as {self.fitted}"
        )


def _among(column: pd.Series) -> str:
    values = floats_of(column)
    if np.isnan(values).any():
        return "missing one"
    return "fraction" if (values != np.trunc(values)).any() else "one of 2^53 or more"
