"""What a click log looks like: its fields, their roles, its file format and its split.

`CRITEO` and `AVAZU` are built in; describe your own in a TOML file (`DatasetSpec.from_toml`) or
`register` one from Python. Nothing here reads a log: that is `raw_logs.py`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from merlin_cowclip.plugins._checks import is_whole, unsavable_names, whole_range
from merlin_cowclip.workflows.errors import UserError, quoted, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMATS = ("csv", "parquet")
SPLIT_KINDS = ("random", "sequential", "time")
NON_FINITE = ("refuse", "missing")
MAX_NAME = 200  # bytes of a field's name, which becomes a part of file names
MAX_BUCKETS = 1 << 30  # ids are 32 bits wide while data is prepared


@dataclass(frozen=True)
class Split:
    """How rows part into training and test.

    Args:
        kind: "random" draws the test rows with the seed; "sequential" takes the last ones of the
            log; "time" the latest ones, by a column: no time is in both parts, so their share is
            the nearest possible one.
        test: the test part's share of all rows, above 0 and below 1.
        column: the column of times for "time": numbers, or text that sorts by time, such as
            2014-10-30 23:59:00. It may be an input of the model as well.
    """

    kind: Literal["random", "sequential", "time"] = "random"
    test: float = 0.1
    column: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in SPLIT_KINDS:
            raise UserError(
                f"split.kind must be one of {quoted(SPLIT_KINDS)}. Received: {self.kind!r}"
            )
        if isinstance(self.test, bool) or not isinstance(self.test, (int, float)):
            raise UserError(f"split.test must be a number. Received: {self.test!r}")
        if not 0 < self.test < 1:
            raise UserError(f"split.test must lie between 0 and 1. Received: {self.test!r}")
        named = isinstance(self.column, str) and self.column != ""
        if named != (self.kind == "time") or (self.column is not None and not named):
            raise UserError(
                "split.column must name the column of times for split.kind 'time', and nothing "
                f"else. Received: split.column {self.column!r} with split.kind {self.kind!r}"
            )


@dataclass(frozen=True)
class DatasetSpec:
    """The fields of a click log and how to read them.

    Args:
        name: a short name, for messages and reports.
        label: the column that holds 0 or 1.
        categorical: columns that hold one id each; any text or integer.
        continuous: columns that hold a number each; a missing one counts as 0.
        lists: columns that hold any number of ids each.
        format: "csv" (any separator, gzipped or not) or "parquet".
        separator: between two columns of a csv file; one character.
        header: whether the first line of a csv file names the columns.
        quotes: whether a csv file's cells may stand in quotes, as RFC 4180 says (and so hold
            separators and line ends); if not, a quote is text like any other.
        columns: all column names in order, for csv files without a header; None otherwise.
        list_separator: between two ids of a list column's cell in a csv file; one character.
        split: how rows part into training and test.
        freq_threshold: the least count in the training part for an id of its own; rarer ids are
            unknown. One number for all fields, or field → number; 0 and 1 keep every id.
        hash_buckets: how many rows the ids below the threshold, and unseen ones, share by hash, for
            all fields or by field; 1 is one row for all unknown ids.
        non_finite: what becomes of inf and NaN: "refuse" names the first; "missing" takes them
            for missing, and `PreparedData.report` counts them.

    Raises:
        UserError: names the field that breaks its rule.
    """

    name: str
    label: str
    categorical: tuple[str, ...]
    continuous: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    format: Literal["csv", "parquet"] = "csv"
    separator: str = ","
    header: bool = True
    quotes: bool = True
    columns: tuple[str, ...] | None = None
    list_separator: str = "|"
    split: Split = dataclasses.field(default_factory=Split)
    freq_threshold: int | Mapping[str, int] = 0
    hash_buckets: int | Mapping[str, int] = 1
    non_finite: Literal["refuse", "missing"] = "refuse"

    def __post_init__(self) -> None:
        for key in ("name", "label"):
            value = getattr(self, key)
            if not isinstance(value, str) or not value:
                raise UserError(f"{key} must be a text that is not empty. Received: {value!r}")
            if "\0" in value:
                raise UserError(f"{key} must be a text without a zero byte. Received: {value!r}")
        for key in ("categorical", "continuous", "lists", "columns"):
            value = getattr(self, key)
            if value is None and key == "columns":
                continue
            if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
                raise UserError(f"{key} must be a list of column names. Received: {value!r}")
            object.__setattr__(self, key, tuple(value))  # a list from TOML or JSON
        if self.format not in FORMATS:
            raise UserError(f"format must be one of {quoted(FORMATS)}. Received: {self.format!r}")
        for key in ("header", "quotes"):
            value = getattr(self, key)
            if not isinstance(value, bool):
                raise UserError(f"{key} must be true or false. Received: {value!r}")
        for key in ("separator", "list_separator"):
            value = getattr(self, key)
            if not isinstance(value, str) or len(value) != 1 or not value.isascii():
                raise UserError(f"{key} must be one ASCII character. Received: {value!r}")
            if value in '"\n\r\0':
                raise UserError(
                    f"{key} must not be a quote, a line end or a zero byte. Received: {value!r}"
                )
        if self.lists and self.format == "csv" and self.separator == self.list_separator:
            raise UserError(
                f"separator and list_separator must differ. Received: {self.separator!r} for both"
            )
        if not isinstance(self.split, Split):
            raise UserError(f"split must be a Split. Received: {self.split!r}")
        if self.non_finite not in NON_FINITE:
            raise UserError(
                f"non_finite must be one of {quoted(NON_FINITE)}. Received: {self.non_finite!r}"
            )
        self._check_roles()
        self._check_columns()
        self._check_rare_ids()

    def _check_rare_ids(self) -> None:
        for key, least in (("freq_threshold", 0), ("hash_buckets", 1)):
            value = getattr(self, key)
            by_field = dict(value) if isinstance(value, Mapping) else {"": value}
            for field, number in by_field.items():
                if isinstance(value, Mapping) and field not in self.ids:
                    raise UserError(
                        f"{key} must name fields of ids: {quoted(self.ids)}. Received: {field!r}"
                    )
                if not is_whole(number, least):
                    raise UserError(
                        f"{key} must be {whole_range(least)}. Received: {number!r}"
                        + (f" for {field!r}" if field else "")
                    )
            if isinstance(value, Mapping):
                object.__setattr__(self, key, by_field)
        if self.split.column in self.lists:
            raise UserError(
                f"split.column must hold one time per row. Received: {self.split.column!r}, a "
                "column of lists"
            )
        for field in self.ids:
            if self.buckets_of(field) > MAX_BUCKETS:
                raise UserError(
                    f"hash_buckets must be at most {MAX_BUCKETS:,}. Received: "
                    f"{self.buckets_of(field):,} for {field!r}"
                )
            if self.buckets_of(field) > 1 and self.threshold_of(field) < 2:
                raise UserError(
                    "hash_buckets needs a freq_threshold of at least 2, for without one no "
                    f"training row has a hashed id. Received: {self.buckets_of(field)} buckets, "
                    f"threshold {self.threshold_of(field)} for {field!r}"
                )

    def threshold_of(self, field: str) -> int:
        """The field's own `freq_threshold`."""
        value = self.freq_threshold
        return value.get(field, 0) if isinstance(value, Mapping) else value

    def buckets_of(self, field: str) -> int:
        """The field's own `hash_buckets`."""
        value = self.hash_buckets
        return value.get(field, 1) if isinstance(value, Mapping) else value

    def _check_roles(self) -> None:
        if not self.categorical and not self.lists:
            raise UserError(
                "categorical must name at least one column. Received: none (and no lists)"
            )
        role_of: dict[str, str] = {self.label: "label"}
        for role in ("categorical", "continuous", "lists"):
            for field in getattr(self, role):
                # A field's name becomes a file name (counts/<field>.parquet).
                if not field or field.startswith(".") or any(c in field for c in "/\\\0\n\r"):
                    raise UserError(
                        f"{role} must hold names that can be file names "
                        f"(not empty, no slash, no leading dot). Received: {field!r}"
                    )
                if len(field.encode("utf-8", "replace")) > MAX_NAME:
                    raise UserError(
                        f"{role} must hold names that can be file names (of {MAX_NAME} bytes at "
                        f"most). Received: {shown(repr(field))}"
                    )
                if field in role_of:
                    raise UserError(
                        f"a column must have one role. Received: {field!r} as "
                        f"{role_of[field]} and as {role}"
                    )
                role_of[field] = role
        for name in self.lists:
            taken = [f for f in self.fields if f in (f"{name}__values", f"{name}__offsets")]
            if taken:
                raise UserError(
                    "no field may have a list's name with __values or __offsets, for these are the "
                    f"list's two inputs of a model. Received: {taken[0]!r} beside the list "
                    f"{name!r}. Rename one of them where the data comes from"
                )

    def _check_columns(self) -> None:
        if self.format == "csv" and not self.header and self.columns is None:
            raise UserError("columns must be given when header is false. Received: none")
        if self.columns is None:
            return
        if self.format != "csv" or self.header:
            raise UserError(
                "columns must be left out unless the format is csv and header is false "
                f"(the file names its columns). Received: {quoted(self.columns)}"
            )
        twice = sorted({c for c in self.columns if self.columns.count(c) > 1})
        if twice:
            raise UserError(f"columns must be unique. Received twice: {quoted(twice)}")
        wanted = [self.label, *self.fields, *([self.split.column] if self.split.column else [])]
        missing = [c for c in wanted if c not in self.columns]
        if missing:
            raise UserError(
                "columns must hold the label, every field and the split's column. Missing: "
                f"{quoted(missing)}. Received: {quoted(self.columns)}"
            )

    @property
    def fields(self) -> tuple[str, ...]:
        """Every input of the model: numbers first, then ids, then lists of ids."""
        return (*self.continuous, *self.categorical, *self.lists)

    @property
    def ids(self) -> tuple[str, ...]:
        """The fields that hold ids: one each (`categorical`), then any number (`lists`)."""
        return (*self.categorical, *self.lists)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` reads them back."""
        return {
            "name": self.name,
            "label": self.label,
            "categorical": list(self.categorical),
            "continuous": list(self.continuous),
            "lists": list(self.lists),
            "format": self.format,
            "separator": self.separator,
            "header": self.header,
            "quotes": self.quotes,
            "columns": None if self.columns is None else list(self.columns),
            "list_separator": self.list_separator,
            "split": dataclasses.asdict(self.split),
            "freq_threshold": _plain(self.freq_threshold),
            "hash_buckets": _plain(self.hash_buckets),
            "non_finite": self.non_finite,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DatasetSpec:
        """A spec from plain values with the field names as keys; split is a `Split`'s.

        Raises:
            UserError: an unknown or missing key, or a value that breaks its rule.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        _check_keys(values, known, required=("name", "label"), place="")
        given = dict(values)
        given.setdefault("categorical", ())
        if "split" in given:
            split = given["split"]
            if not isinstance(split, Mapping):
                raise UserError(f"split must be a table with kind and test. Received: {split!r}")
            _check_keys(
                split, ("kind", "test", "column"), required=("kind", "test"), place="split."
            )
            given["split"] = Split(**split)
        return cls(**given)

    @classmethod
    def from_toml(cls, path: str | Path) -> DatasetSpec:
        """A spec from a TOML file with the same keys; the split is a table ``[split]``.

        Raises:
            UserError: names the file and the key.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise UserError(f"data set file must exist. Received: {path}") from None
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"data set file must be readable text. Received: {shown(path)}: {reason}"
            ) from None
        try:
            return cls.from_dict(tomllib.loads(text))
        except RecursionError:
            raise UserError(
                f"data set file must be TOML. Received: {path}, nested too deep"
            ) from None
        except ValueError as error:  # TOMLDecodeError, or a number of thousands of digits
            raise UserError(f"data set file must be TOML. Received: {path}: {error}") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


CRITEO = DatasetSpec(
    name="criteo",
    label="label",
    categorical=tuple(f"C{i}" for i in range(1, 27)),
    continuous=tuple(f"I{i}" for i in range(1, 14)),
    separator="\t",
    header=False,
    quotes=False,
    columns=("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
    split=Split("random", 0.1),  # 90/10, as the paper
)

AVAZU = DatasetSpec(
    name="avazu",
    label="click",
    quotes=False,
    # 22 fields: every column but the row's own id and the label; the paper embeds them all.
    categorical=(
        *("hour", "C1", "banner_pos", "site_id", "site_domain", "site_category"),
        *("app_id", "app_domain", "app_category"),
        *("device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
        *(f"C{i}" for i in range(14, 22)),
    ),
    split=Split("random", 0.2),  # 80/20, as the paper
)

#: Every data set known by name; `register` adds yours.
SPECS: dict[str, DatasetSpec] = {spec.name: spec for spec in (CRITEO, AVAZU)}


def register(spec: DatasetSpec) -> DatasetSpec:
    """Make a spec known by its name to `find_spec`, and so to the command line's functions.

    Raises:
        UserError: another spec already has the name.
    """
    if SPECS.get(spec.name, spec) != spec:
        raise UserError(
            f"a data set's name must be unique. Received: {spec.name!r}, which is another data set"
        )
    SPECS[spec.name] = spec
    return spec


def find_spec(name_or_path: str | Path) -> DatasetSpec:
    """The registered spec of that name, or the one in that .toml file.

    Raises:
        UserError: neither; lists the names.
    """
    key = str(name_or_path)
    if key in SPECS:
        return SPECS[key]
    if key.endswith(".toml"):
        return DatasetSpec.from_toml(key)
    raise UserError(
        f"data set must be one of {quoted(sorted(SPECS))}, or the path of a .toml file. "
        f"Received: {shown(repr(key))}"
    )


def check_input_names(spec: DatasetSpec) -> None:
    """Refuse columns whose names TensorFlow could not save, before a model is trained on them.

    Raises:
        UserError: names them.
    """
    # The label is a part of an output's name: a word of Python's will do.
    label = [spec.label] if unsavable_names([f"{spec.label}.label"]) else []
    refused = label + unsavable_names(spec.fields)
    if refused:
        raise UserError(
            "a model's inputs and its label must have names that TensorFlow can save: of A-Z a-z "
            "0-9 _ . -, a letter or digit first, not a word of Python's, and different but for "
            f"_ . - or capitals. Received: {quoted(refused)}. Rename them where the data comes from"
        )


def _plain(value: int | Mapping[str, int]) -> int | dict[str, int]:
    return dict(value) if isinstance(value, Mapping) else value


def _check_keys(
    values: Mapping[str, Any], known: Any, *, required: tuple[str, ...], place: str
) -> None:
    unknown = [place + key for key in values if key not in known]
    if unknown:
        raise UserError(f"a key must be one of {quoted(known)}. Received: {quoted(unknown)}")
    missing = [place + key for key in required if key not in values]
    if missing:
        raise UserError(f"{quoted(missing)} must be given. Received: {quoted(values) or 'nothing'}")
