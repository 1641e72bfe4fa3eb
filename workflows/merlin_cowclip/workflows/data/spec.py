# SPDX-License-Identifier: Apache-2.0
"""The description of a data set: columns, their roles, the file format and the split.

`CRITEO` and `AVAZU` are built in. Describe your own in a TOML file (`DatasetSpec.from_toml`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from merlin_cowclip.plugins._checks import unsavable_names
from merlin_cowclip.workflows.errors import UserError, check_whole, quoted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SPLIT_KINDS = ("random", "sequential", "time")
TIME_FIELDS = ("hour", "weekday")  # keys that name a column of times, and the fields made of it
MAX_BUCKETS = 1 << 30  # ids are 32 bits wide while data is prepared
_LIMITS = {  # of whole numbers
    "hash_buckets": (1, MAX_BUCKETS),
    "hash_only": (1, MAX_BUCKETS),
    "quantiles": (2, None),
}


@dataclass(frozen=True)
class Split:
    """How rows are divided into training, validation and test parts.

    The test rows are chosen first, then the validation rows among the other rows.

    Args:
        kind: "random" draws rows with the seed; "sequential" takes the last rows; "time" takes the
            rows with the latest times. A time is in one part only, so a share is the nearest
            possible one.
        test: share of the rows, from 0 to below 1, or files that have the test rows. Relative paths
            begin at the working folder.
        column: for "time", the column of times: numbers, timestamps (without a zone: UTC), ISO 8601
            text, or text in `time_format`. It may also be an input of the model.
        valid: share of the rows that are not test rows, or files that have the validation rows.
        time_format: format of text times, as of `datetime.strptime`: "%d/%m/%Y %H:%M".
    """

    kind: Literal["random", "sequential", "time"] = "random"
    test: float | tuple[str, ...] = 0.1
    column: str | None = None
    valid: float | tuple[str, ...] = 0.1
    time_format: str | None = None

    def __post_init__(self) -> None:
        for name in ("test", "valid"):
            value = getattr(self, name)
            if _are_texts(value) and value:
                object.__setattr__(self, name, tuple(value))
            elif type(value) not in (int, float) or not 0 <= value < 1:
                raise UserError(
                    f"split.{name} must be a share from 0 to below 1, or files. Received: {value!r}"
                )
        if not isinstance(self.time_format, str | None):
            raise UserError(
                f"split.time_format must be a strptime format. Received: {self.time_format!r}"
            )
        if self.kind not in SPLIT_KINDS:
            kinds = quoted(SPLIT_KINDS)
            raise UserError(f"split.kind must be one of {kinds}. Received: {self.kind!r}")
        if (self.kind == "time") != (isinstance(self.column, str) and self.column != ""):
            raise UserError(
                "split.column must name the column of times for split.kind 'time', and nothing "
                f"else. Received: split.column {self.column!r} with split.kind {self.kind!r}"
            )


@dataclass(frozen=True)
class DatasetSpec:
    r"""The columns of a click log and how to read them.

    Args:
        name: a short name, for messages and reports.
        label: the column with labels 0 and 1.
        categorical: columns with one id each: any text or integer.
        continuous: columns with a number each; a missing one counts as 0.
        lists: columns with any number of ids each.
        format: "csv" (any separator, compressed or not) or "parquet".
        separator: between two columns of a CSV file; one character.
        header: whether the first line of a CSV file names the columns.
        quotes: whether cells of a CSV file may be quoted (RFC 4180) and so contain separators and
            line ends; if not, a quote is text.
        columns: all column names in order, for CSV files without a header, or in place of those
            in the header.
        list_separator: between two ids in a cell of a list column of a CSV file; one character.
        null_values: texts that mean a missing value, in addition to the empty one: ``['\N']``.
        label_values: the spelling of labels 0 and 1, if they are not numbers:
            ``['False', 'True']``.
        split: how rows are divided into training, validation and test parts.
        freq_threshold: the least count in the training rows for an id to get its own embedding;
            rarer ids are unknown. One number, or one by field; 0 and 1 keep every id.
        hash_buckets: how many embeddings unknown ids share by hash. One number, or one by field.
        hash_only: fields of ids without a vocabulary: how many embeddings the ids of each share.
        shared: lists of fields of ids that have one vocabulary: ``[['seller', 'buyer']]``. It is
            the first one's; thresholds and buckets must be equal.
        log1p: continuous fields of which log(1 + x) is scaled, x ≥ 0.
        standardize: continuous fields that become (x - mean) / standard deviation. Others are
            scaled to [0, 1] by their range, and clipped.
        quantiles: continuous fields scaled to [0, 1] by so many quantiles: outliers do not matter.
        label_above: numbers above it have label 1, all others 0: 3 for ratings.
        hour: the column of times of which the hour, 0 to 23 UTC, becomes a field of ids ``hour``.
            Numbers are seconds since 1970; text is read by split.time_format.
        weekday: the same for the day of the week, 0 for Monday.
        renamed: the columns of fields, or of the label, that have another name in the model.
            `prepare` renames columns whose names TensorFlow cannot save.
        non_finite: inf and NaN: "refuse" raises an error; "missing" treats them as missing.

    Raises:
        UserError: an argument is not valid.
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
    null_values: tuple[str, ...] = ()
    label_values: tuple[str, ...] | None = None
    split: Split = dataclasses.field(default_factory=Split)
    freq_threshold: int | Mapping[str, int] = 0
    hash_buckets: int | Mapping[str, int] = 1
    hash_only: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    log1p: tuple[str, ...] = ()
    standardize: tuple[str, ...] = ()
    quantiles: Mapping[str, int] = dataclasses.field(default_factory=dict)
    label_above: float | None = None
    hour: str | None = None
    weekday: str | None = None
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    non_finite: Literal["refuse", "missing"] = "refuse"

    def __post_init__(self) -> None:
        for keys, rule, is_valid in _RULES:
            for key in keys:
                value = getattr(self, key)
                if not is_valid(value):
                    raise UserError(f"{key} must be {rule}. Received: {value!r}")
                if isinstance(value, list):  # from TOML or JSON
                    plain = tuple(tuple(v) if isinstance(v, list) else v for v in value)
                    object.__setattr__(self, key, plain)
        if not self.header and self.columns is None and self.format == "csv":
            raise UserError("a CSV file with header = false needs columns. List all, in order")
        if self.columns is not None and self.format != "csv":
            raise UserError("columns are for format csv only. Leave them out")
        derived = [name for name in TIME_FIELDS if getattr(self, name) is not None]
        fields = tuple(dict.fromkeys([*self.categorical, *derived]))
        object.__setattr__(self, "categorical", fields)
        if not self.ids:
            raise UserError("categorical must name at least one column. Received: none (no lists)")
        names = [self.label, *self.fields]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise UserError(f"a column must have one role. Received: {quoted(twice)} in several")
        if "" in names:
            raise UserError("fields must have names that are not empty. Leave the empty one out")
        self._check_fields()

    def _check_fields(self) -> None:
        """Keys that name fields: of ids, or numbers."""
        kinds = dict.fromkeys(("log1p", "standardize", "quantiles"), (self.continuous, "numbers"))
        for key in ("freq_threshold", "hash_buckets", "hash_only", "shared", *kinds):
            value, (fields, kind) = getattr(self, key), kinds.get(key, (self.ids, "ids"))
            least, most = _LIMITS.get(key, (0, None))
            names = [*itertools.chain(*value)] if key == "shared" else value
            if not isinstance(names, (Mapping, list, tuple)):
                check_whole(key, value, least, most)
                continue
            if others := [name for name in names if name not in fields or [*names].count(name) > 1]:
                raise UserError(
                    f"{key} must name fields of {kind}, each once: {quoted(fields)}. Received: "
                    f"{quoted(others)}"
                )
            for name, number in value.items() if isinstance(value, Mapping) else ():
                check_whole(f"{key} of {name!r}", number, least, most)
        if self.label_above is not None and self.label_values is not None:
            raise UserError("label_above and label_values exclude each other. Leave one out")
        if both := [name for name in self.standardize if name in self.quantiles]:
            raise UserError(f"{quoted(both)} must be in standardize or quantiles, not in both")
        for group in self.shared:
            options = [
                (self.threshold_of(n), self.buckets_of(n), n in self.hash_only) for n in group
            ]
            if len(set(options)) > 1:
                raise UserError(
                    f"{quoted(group)} share a vocabulary. Give them the same freq_threshold, "
                    "hash_buckets and hash_only"
                )

    def threshold_of(self, field: str) -> int:
        """The field's own `freq_threshold`."""
        value = self.freq_threshold
        return value.get(field, 0) if isinstance(value, Mapping) else value

    def buckets_of(self, field: str) -> int:
        """The field's own `hash_buckets`."""
        if field in self.hash_only:
            return self.hash_only[field]
        value = self.hash_buckets
        return value.get(field, 1) if isinstance(value, Mapping) else value

    @property
    def fields(self) -> tuple[str, ...]:
        """Every input of the model, numbers first, then ids, then lists of ids."""
        return (*self.continuous, *self.categorical, *self.lists)

    @property
    def ids(self) -> tuple[str, ...]:
        """The fields of ids, `categorical`, then `lists`."""
        return (*self.categorical, *self.lists)

    def column_of(self, field: str) -> str:
        """The column of the log that a field, or the label, is made of."""
        if field in TIME_FIELDS and (source := getattr(self, field)):
            return str(source)
        return self.renamed.get(field, field)

    @property
    def raw_columns(self) -> dict[str, type]:
        """The columns that fields are made of, and what they hold: float, str or list of texts."""
        kinds = dict.fromkeys(self.continuous, float) | dict.fromkeys(self.lists, list)
        return {self.column_of(name): kinds.get(name, str) for name in self.fields}

    def vocabulary_of(self, field: str) -> str:
        """The name of the field's vocabulary: of the first field that shares it."""
        return next((group[0] for group in self.shared if field in group), field)

    @property
    def vocabularies(self) -> dict[str, tuple[str, ...]]:
        """Fields of ids by vocabulary."""
        groups: dict[str, tuple[str, ...]] = {}
        for name in self.ids:
            groups[self.vocabulary_of(name)] = (*groups.get(self.vocabulary_of(name), ()), name)
        return groups

    def to_dict(self) -> dict[str, Any]:
        """JSON values for `from_dict`."""
        values = dataclasses.asdict(self)
        lists = {k: list(v) for k, v in values.items() if isinstance(v, tuple)}
        return {**values, **lists, "shared": [list(group) for group in self.shared]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DatasetSpec:
        """A spec from JSON values; raises UserError for a key or value that is not valid."""
        split = values.get("split", {})
        try:
            split = Split(**split) if isinstance(split, Mapping) else split
            return cls(**{"categorical": (), **values, "split": split})
        except TypeError as error:
            reason = str(error).split("() ")[-1]  # behind the name of a function
            raise UserError(f"a key is unknown or missing: {reason}") from None

    @classmethod
    def from_toml(cls, path: str | Path) -> DatasetSpec:
        """A spec from a TOML file with the same keys, split as a table ``[split]``.

        Raises:
            UserError: the file cannot be read, or is not valid; names file and key.
        """
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"cannot read {path} as TOML: {error}") from None
        except UserError as error:
            raise UserError(f"{path}: {error}") from None


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)


def _is_sign(value: Any) -> bool:
    one = isinstance(value, str) and len(value) == 1 and value.isascii()
    return one and value not in '"\n\r\0'


# Arguments of `DatasetSpec`, what they must be, and whether a value is.
_RULES: tuple[tuple[tuple[str, ...], str, Callable[[Any], bool]], ...] = (
    (("name", "label"), "a text that is not empty", lambda v: isinstance(v, str) and v != ""),
    (
        ("categorical", "continuous", "lists", "null_values", "log1p", "standardize"),
        "a list of texts",
        _are_texts,
    ),
    (
        ("shared",),
        "a list of lists of two fields or more",
        lambda v: isinstance(v, (list, tuple)) and all(_are_texts(g) and len(g) > 1 for g in v),
    ),
    (("hash_only", "quantiles"), "a table of numbers by field", lambda v: isinstance(v, Mapping)),
    (
        ("renamed",),
        "a table of columns by field",
        lambda v: isinstance(v, Mapping) and _are_texts([*v.values()]),
    ),
    (
        ("label_above",),
        "a number",
        lambda v: v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)),
    ),
    (TIME_FIELDS, "the name of a column", lambda v: v is None or (isinstance(v, str) and v != "")),
    (("columns",), "a list of texts", lambda v: v is None or _are_texts(v)),
    (
        ("label_values",),
        "two different texts, of label 0 and of label 1",
        lambda v: v is None or (_are_texts(v) and len(v) == len(set(v)) == 2),
    ),
    (("header", "quotes"), "true or false", lambda v: isinstance(v, bool)),
    (("separator", "list_separator"), "one ASCII character, not a quote or line end", _is_sign),
    (("format",), "one of 'csv', 'parquet'", lambda v: v in ("csv", "parquet")),
    (("non_finite",), "one of 'refuse', 'missing'", lambda v: v in ("refuse", "missing")),
    (("split",), "a table with kind and test", lambda v: isinstance(v, Split)),
)

CRITEO = DatasetSpec(
    name="criteo",
    label="label",
    categorical=tuple(f"C{i}" for i in range(1, 27)),
    continuous=tuple(f"I{i}" for i in range(1, 14)),
    separator="\t",
    header=False,
    quotes=False,
    columns=("label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))),
    split=Split("random", test=0.1),  # as the paper, which has no validation part
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
    split=Split("random", test=0.2),
)

#: The data sets that are known by name.
SPECS: dict[str, DatasetSpec] = {spec.name: spec for spec in (CRITEO, AVAZU)}


def find_spec(name_or_path: str | Path) -> DatasetSpec:
    """The built-in spec of that name, or the one in that .toml file; UserError if neither."""
    key = str(name_or_path)
    if key in SPECS:
        return SPECS[key]
    if key.endswith(".toml"):
        return DatasetSpec.from_toml(key)
    raise UserError(
        f"data set must be one of {quoted(sorted(SPECS))}, or the path of a .toml file. "
        f"Received: {key!r}"
    )


def with_saved_names(spec: DatasetSpec) -> DatasetSpec:
    """The same fields with names that TensorFlow can save, where it cannot save theirs."""
    names: dict[str, str] = {}
    for name in (spec.label, *spec.fields):
        plain = re.sub(r"[^A-Za-z0-9_.-]+", "_", name).strip("_.-") or "field"
        numbered = (f"{plain}_{number}" for number in itertools.count(2))
        for new in (name, plain, *itertools.islice(numbered, len(spec.fields) + 1)):
            ends = ("", "__values", "__offsets") if name in spec.lists else ("",)
            taken = [*names.values(), *(f"{new}{end}" for end in ends)]
            if not unsavable_names(taken) and new not in names.values():
                names[name] = new
                break
    if all(name == new for name, new in names.items()):
        return spec
    changed: dict[str, Any] = {"label": names[spec.label]}
    for key in ("categorical", "continuous", "lists", "log1p", "standardize"):
        changed[key] = [names[name] for name in getattr(spec, key)]
    for key in ("freq_threshold", "hash_buckets", "hash_only", "quantiles"):
        value = getattr(spec, key)
        if isinstance(value, Mapping):
            changed[key] = {names[name]: number for name, number in value.items()}
    changed["shared"] = [[names[name] for name in group] for group in spec.shared]
    renamed = {new: spec.column_of(name) for name, new in names.items() if new != name}
    return dataclasses.replace(spec, **changed, renamed={**spec.renamed, **renamed})


def check_input_names(spec: DatasetSpec) -> None:
    """Raise UserError if TensorFlow cannot save a model with these column names."""
    # The label is a part of an output's name: a word of Python's will do.
    label = [spec.label] if unsavable_names([f"{spec.label}.label"]) else []
    inputs = [f"{name}__{end}" for name in spec.lists for end in ("values", "offsets")]
    refused = label + (unsavable_names(spec.fields) or unsavable_names((*inputs, *spec.fields)))
    if refused:
        raise UserError(
            "a model's inputs and its label must have names that TensorFlow can save: of A-Z a-z "
            "0-9 _ . -, a letter or digit first, not a word of Python's, and different but for "
            f"_ . - or capitals. Received: {quoted(refused)}. Rename them in the "
            "workflow"
        )
