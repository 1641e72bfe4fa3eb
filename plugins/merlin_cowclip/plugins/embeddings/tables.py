"""What the optimizer knows of embedding tables: their variable, their rows, their fields.

Any layer that has a `table_specs()` method takes part (`HasTables`); `discovery.py` adapts
Merlin's and Keras's own. Nothing in this file imports our models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, in_save_context, tf
from merlin_cowclip.plugins.distributed.sharding import Shard, look_up
from merlin_cowclip.plugins.embeddings.counting import LookupRecorder


@dataclass(eq=False)
class TableAccess:
    """How a table's rows are to be looked up, so that its update costs least.

    TensorFlow marks a variable whose rows were gathered from the resource by
    `tf.gather(variable, …)` as sparsely used, for good. From then on every read of the whole
    variable, and every dense update, copies it: V×d bytes and their time, twice a step in the
    exact mode. Rows gathered from the read value (`tf.gather(tf.convert_to_tensor(variable), …)`)
    do not mark it, and the read shares the variable's buffer; their gradient is as sparse. The
    lazy mode scatters into the variable, and so needs it marked.

    Attributes:
      whole: gather from the value read as a whole; the optimizer sets it in the exact mode and
        unsets it in the lazy one. `None` before there is an optimizer: so in eager calls, such as
        one that builds the model, for else the exact mode would find the table marked.
      catch_up: called with the variable and the rows before they are read, where rows wait for
        what they missed; with `None` for all of them.
      is_used: whether the layer looks its rows up by `gather`.
      shard: which rows this rank has, where the ranks share them; `None`: it has all.
    """

    whole: bool | None = None
    catch_up: Callable[[tf.Variable, tf.Tensor | None], None] | None = None
    is_used: bool = False
    shard: Shard | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles, whose table has no optimizer yet."""
        return self.__dict__ | {"catch_up": None}

    @property
    def has_pending_rows(self) -> bool:
        """Whether rows are to catch up before they are looked up: in no SavedModel."""
        return self.catch_up is not None and not in_save_context()

    def gather(self, variable: tf.Variable, rows: tf.Tensor) -> tf.Tensor:
        """The rows of a V×d table, by row numbers of any shape: that shape × d.

        Of a table in shards `variable` is this rank's; then it is called on all ranks at once.
        """
        if self.has_pending_rows:
            assert self.catch_up is not None
            self.catch_up(variable, rows)
        known = self.whole is not None  # to an optimizer
        whole = self.whole if known else tf.executing_eagerly()
        if self.shard is not None:
            return look_up(variable, rows, self.shard, whole=bool(whole), trainable=known)
        return tf.gather(tf.convert_to_tensor(variable) if whole else variable, rows)


_OFFSETS = "_merlin_cowclip_row_offsets"


def tell_ranges(variable: tf.Variable, row_offsets: tuple[int, ...]) -> None:
    """Say which ranges of rows a table has to optimizers that are not bound to its `TableSpec`."""
    setattr(variable, _OFFSETS, row_offsets)


def told_ranges(variable: tf.Variable) -> tuple[int, ...]:
    """The `row_offsets` that were told; of any other variable those of one range."""
    offsets: tuple[int, ...] = getattr(variable, _OFFSETS, (0, variable.shape[0]))
    return offsets


@dataclass(eq=False)
class TableSpec:
    """One embedding variable as the optimizer sees it.

    Attributes:
      name: how messages and summaries call it.
      layer: the layer that owns the variable.
      get_variable: returns the V×d variable, of a table in shards this rank's rows; may only be
        called once the layer is built.
      row_offsets: first row of each range of rows, then V; `(0, V)` for one field or for a table
        that several fields share. What is chosen or clipped by field is so by range: fields that
        share rows are one field there.
      columns: the schema of the fields.
      range_of_column: for each column, the number of the range that it reads; left out, column i
        reads range i, or all columns the only one.
      width: d. Tables of width 1 are linear weights: they take L2 but are not clipped, unless
        `clip_tables` names them or their fields.
      recorder: the lookups of the current step.
      access: how the layer is to look rows up; Merlin's own tables do it their way.
      set_variable: gives the layer another variable as its table; of a table that may be in shards.
      is_tied: whether an output layer reads the whole table, so that its gradient is dense.

    Raises:
      ValueError: columns and ranges of rows that do not go together.
    """

    name: str
    layer: tf.keras.layers.Layer
    get_variable: Callable[[], tf.Variable]
    row_offsets: tuple[int, ...]
    columns: tuple[ColumnSchema, ...]
    width: int
    recorder: LookupRecorder = field(default_factory=LookupRecorder)
    access: TableAccess = field(default_factory=TableAccess)
    range_of_column: tuple[int, ...] = ()
    set_variable: Callable[[tf.Variable], None] | None = None
    is_tied: bool = False

    def __post_init__(self) -> None:
        ranges, columns, read = len(self.row_offsets) - 1, len(self.columns), self.range_of_column
        if read and (len(read) != columns or not all(0 <= number < ranges for number in read)):
            raise ValueError(
                f"range_of_column must name one of {ranges} ranges for each of {columns} columns. "
                f"Received: {read} for the table {self.name!r}"
            )
        if columns and not read and ranges not in (1, columns):
            raise ValueError(
                "A table must have one range of rows, or one for each column. Received: "
                f"{ranges} ranges and {columns} columns for the table {self.name!r}. Pass "
                "range_of_column."
            )

    @property
    def variable(self) -> tf.Variable:
        """The V×d variable of the built table; of one in shards, this rank's rows."""
        return self.get_variable()

    @property
    def shard(self) -> Shard | None:
        """Which rows this rank has, where the ranks share them."""
        return self.access.shard

    @property
    def num_rows(self) -> int:
        """V."""
        return self.row_offsets[-1]

    @property
    def range_names(self) -> tuple[str, ...]:
        """For each range of rows, the fields that read it, with a "+" between; or the table."""
        ranges = range(len(self.row_offsets) - 1)
        read = list(zip(self._read(), self.columns, strict=True))
        joined = ("+".join(column.name for at, column in read if at == number) for number in ranges)
        return tuple(names or self.name for names in joined)

    def _read(self) -> Sequence[int]:
        """For each column, the number of the range that it reads."""
        ranges, columns = range(len(self.row_offsets) - 1), len(self.columns)
        return self.range_of_column or (ranges if len(ranges) == columns else [0] * columns)

    def selected(self, wanted: Sequence[Any]) -> tuple[bool, ...]:
        """For each range of rows, whether `wanted` names it, or a field that reads it.

        Args:
          wanted: names of tables or fields, tags, and layers.
        """
        names = {item for item in wanted if isinstance(item, str) and not isinstance(item, Tags)}
        owned = any(item is self.layer or _owns(item, self) for item in wanted)
        whole = owned or self.name in names
        tags = [item for item in wanted if isinstance(item, Tags)]
        hits = [
            column.name in names
            or any(Schema([column]).select_by_tag(tag) for tag in tags)  # USER_ID: USER and ID
            for column in self.columns
        ]
        pairs = list(zip(self._read(), hits, strict=True))
        ranges = range(len(self.row_offsets) - 1)
        return tuple(whole or (number, True) in pairs for number in ranges)


def check_whole(specs: Iterable[TableSpec], what: str) -> None:
    """Refuse to read or set this rank's rows as if they were the table.

    Args:
      specs: the tables.
      what: by which call.

    Raises:
      ValueError: one is in shards.
    """
    names = [spec.name for spec in specs if spec.shard is not None]
    if names:
        raise ValueError(
            "A model whose tables are in shards must be saved and read as a whole: by "
            "save_model(model, path), which all ranks call, or on rank 0 within "
            f"whole_tables(model). Received: {what}, which would take this rank's rows of "
            f"{names[0]!r} for all."
        )


def _owns(item: Any, spec: TableSpec) -> bool:
    return getattr(getattr(item, "table", None), "_merlin_cowclip_spec", None) is spec


def distinct_names(specs: Iterable[TableSpec]) -> dict[TableSpec, str]:
    """What each table is called where they are listed: by its name, or one of no other table.

    Two tables may have one name, such as those of `NCFModel`'s two branches: "item_id" and
    "item_id (2)", in the model's order.
    """
    specs = list(specs)
    taken = {spec.name for spec in specs}
    names: dict[TableSpec, str] = {}
    for spec in specs:
        name, number = spec.name, 1
        while name in names.values() or (number > 1 and name in taken):
            number += 1
            name = f"{spec.name} ({number})"
        names[spec] = name
    return names


@runtime_checkable
class HasTables(Protocol):
    """A layer that tells its tables to the optimizer and records its lookups."""

    def table_specs(self) -> Sequence[TableSpec]:
        """The layer's embedding tables; the same objects at every call."""
        ...
