# SPDX-License-Identifier: Apache-2.0
"""What the optimizer knows of embedding tables: their variable, their rows, their fields.

Any layer that has a `table_specs()` method takes part (`HasTables`); `discovery.py` adapts
Merlin's and Keras's own. Nothing in this file imports our models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, in_save_context, tf
from merlin_cowclip.plugins.distributed.sharding import Shard, look_up
from merlin_cowclip.plugins.embeddings.counting import LookupRecorder


@dataclass(eq=False)
class TableSpec:
    """One embedding variable as the optimizer sees it.

    Attributes:
      name: how messages and summaries call it.
      layer: the layer that owns the variable.
      get_variable: returns the built layer's V×d variable; of a sharded table this rank's rows.
      row_offsets: first row of each range of rows, then V; `(0, V)` for one field or for a table
        that several fields share. Clips by field are by range.
      columns: the schema of the fields.
      width: d. Tables of width 1 are linear weights: not clipped, unless `clip_tables` names them.
      recorder: the lookups of the current step.
      range_of_column: for each column, the number of the range that it reads; left out, column i
        reads range i, or all columns the only one.
      set_variable: gives the layer another variable as its table; of a table that may be in shards.
      is_tied: whether an output layer reads the whole table, so that its gradient is dense.
      uses_gather: whether the layer looks rows up by `gather`; Merlin's own do it their way.
      shard: which rows this rank has, where the ranks share them.
    """

    name: str
    layer: tf.keras.layers.Layer
    get_variable: Callable[[], tf.Variable]
    row_offsets: tuple[int, ...]
    columns: tuple[ColumnSchema, ...]
    width: int
    recorder: LookupRecorder = field(default_factory=LookupRecorder)
    range_of_column: tuple[int, ...] = ()
    set_variable: Callable[[tf.Variable], None] | None = None
    is_tied: bool = False
    uses_gather: bool = False
    shard: Shard | None = None
    # Set by the optimizer: whether `gather` reads the value of the variable (`None`: in eager
    # calls), and what is called before rows are read, with the variable and rows (`None`: all).
    reads_value: bool | None = None
    catch_up: Callable[[tf.Variable, tf.Tensor | None], None] | None = None

    def __post_init__(self) -> None:
        ranges, columns = len(self.row_offsets) - 1, len(self.columns)
        if not self.range_of_column:
            self.range_of_column = (0,) * columns if ranges == 1 else tuple(range(columns))

    @property
    def variable(self) -> tf.Variable:
        """The V×d variable of the built table; of one in shards, this rank's rows."""
        return self.get_variable()

    @property
    def num_rows(self) -> int:
        """V."""
        return self.row_offsets[-1]

    @property
    def range_names(self) -> tuple[str, ...]:
        """For each range of rows, the fields that read it, with a "+" between; or the table."""
        names: list[list[str]] = [[] for _ in self.row_offsets[1:]]
        for number, column in zip(self.range_of_column, self.columns, strict=True):
            names[number].append(column.name)
        return tuple("+".join(fields) or self.name for fields in names)

    def selected(self, wanted: Sequence[Any]) -> tuple[bool, ...]:
        """For each range of rows, whether `wanted` (names, tags) has it, or its field."""
        if self.name in wanted:
            return (True,) * (len(self.row_offsets) - 1)
        tags = [item for item in wanted if isinstance(item, Tags)]
        hits = {
            number
            for number, column in zip(self.range_of_column, self.columns, strict=True)
            if column.name in wanted or any(Schema([column]).select_by_tag(tag) for tag in tags)
        }  # USER_ID: USER and ID
        return tuple(number in hits for number in range(len(self.row_offsets) - 1))

    @property
    def has_pending_rows(self) -> bool:
        """Whether rows are to catch up before they are looked up: in no SavedModel."""
        return self.catch_up is not None and not in_save_context()

    def gather(self, rows: tf.Tensor) -> tf.Tensor:
        """Embeddings by row numbers of any shape: that shape × d.

        Of a sharded table, called on all ranks at once. `tf.gather(variable, …)` makes TensorFlow
        copy the variable in every later dense update, V×d bytes; gathering from the read value does
        not. The lazy mode scatters, and needs the first.
        """
        variable = self.variable
        if self.catch_up is not None and self.has_pending_rows:
            self.catch_up(variable, rows)
        is_known = self.reads_value is not None  # to an optimizer
        from_value = bool(self.reads_value if is_known else tf.executing_eagerly())
        if self.shard is not None:
            return look_up(variable, rows, self.shard, from_value=from_value, trainable=is_known)
        return tf.gather(tf.convert_to_tensor(variable) if from_value else variable, rows)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: refused of a table with pending rows, or with one rank's rows."""
        if self.catch_up is not None or self.shard is not None:
            raise ValueError(
                "A model with update='deferred' or sharded tables cannot be copied or pickled: its "
                "rows are pending, or on other ranks. Use save_model and load_model."
            )
        return self.__dict__


def normalize_clip_tables(clip_tables: Any, clip: str | None) -> tuple[Any, ...] | None:
    """Names and tags of `clip_tables`; `None` for all tables. Text may be `tag:…`."""
    if clip_tables is None:
        return None
    is_list = isinstance(clip_tables, Iterable) and not isinstance(clip_tables, str | bytes)
    wanted = tuple(clip_tables) if is_list else ()
    if not wanted or clip is None:
        raise ValueError(
            "clip_tables must be a list that names something, with a clip rule. Received: "
            f"clip_tables={clip_tables!r} with clip={clip!r}. Use clip=None to clip nothing."
        )
    return tuple(map(_name_or_tag, wanted))


def _name_or_tag(item: Any) -> Any:
    if isinstance(item, Tags):
        return item
    if not isinstance(item, str):  # a layer
        return getattr(item, "table_name", None) or item.name
    return Tags(item.removeprefix("tag:")) if item.startswith("tag:") else item


def check_whole(specs: Iterable[TableSpec], what: str) -> None:
    """Refuse a call, `what`, that would read or set this rank's rows as if they were the table."""
    names = [spec.name for spec in specs if spec.shard is not None]
    if names:
        raise ValueError(
            f"{what} would take this rank's rows of the sharded table {names[0]!r} for all. Use "
            "save_model(model, path) on all ranks, or whole_tables(model) on rank 0."
        )


def distinct_names(specs: Iterable[TableSpec]) -> dict[TableSpec, str]:
    """Tables' names; the second of one name, as in `NCFModel`, is "item_id (2)"."""
    seen: Counter[str] = Counter()
    names = {}
    for spec in specs:
        seen[spec.name] += 1
        names[spec] = f"{spec.name} ({seen[spec.name]})" if seen[spec.name] > 1 else spec.name
    return names


@runtime_checkable
class HasTables(Protocol):
    """A layer that tells its tables to the optimizer and records its lookups."""

    def table_specs(self) -> Sequence[TableSpec]:
        """The layer's embedding tables; the same objects at every call."""
        ...
