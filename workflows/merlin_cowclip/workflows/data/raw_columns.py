"""The raw columns of a saved NVTabular workflow, and what is left of it without some of them.

NVTabular's own `remove_inputs` goes by what each operator makes of its own columns. It leaves what
reads another beside them (LambdaOp's dependencies, the target of TargetEncoding), and passes over
operators that several others use, and those within a `Subgraph`; what is left then fails on every
row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.id_origins import operators_that_keep_values
from merlin_cowclip.workflows.data.workflow_graph import followed, subgraph_of
from merlin_cowclip.workflows.quiet import quiet_imports

if TYPE_CHECKING:
    import nvtabular as nvt
    from merlin.dag import Node
    from merlin.schema import ColumnSchema, Schema


@dataclass(frozen=True)
class Keys:
    """What a fitted operator looks values of a raw column up in, as they are in the rows."""

    files: tuple[Path, ...]
    column: str  # of the files
    held: pa.Array | None = None  # by the operator itself, in no file

    @property
    def kind(self) -> pa.DataType:
        """Their type in the rows of the fit; of a category, that of its values."""
        if self.held is not None:
            kind = self.held.type
        else:
            kind = pq.read_schema(self.files[0]).field(self.column).type
        return kind.value_type if pa.types.is_dictionary(kind) else kind

    def has(self, value: str | bytes) -> bool:
        """Whether a value is one of them."""
        if not (pa.types.is_string(self.kind) or pa.types.is_binary(self.kind)):
            return False
        sought = pa.scalar(value, self.kind)
        tables = (pq.read_table(file, columns=[self.column]) for file in self.files)
        columns = (table[self.column] for table in tables) if self.held is None else (self.held,)
        return any(pc.index(column.cast(self.kind), sought).as_py() >= 0 for column in columns)


def learned_keys(workflow: nvt.Workflow) -> dict[str, list[Keys]]:
    """Where a workflow looks up its raw columns: vocabularies, statistics of groups, tables joined.

    Only where no operator stands before that may make other values of them: what a LambdaOp gives
    to Categorify says nothing of what it is given.

    Args:
      workflow: fitted, with its vocabularies.
    """
    found: dict[str, list[Keys]] = {}

    def made_by(node: Node, given: dict[str, str | None]) -> dict[str, str | None]:
        """Of what a node makes those that are raw columns as they are: the raw one's name."""
        for name, keys in _looked_up(node):
            if (raw := given.get(name)) is not None:
                found.setdefault(raw, []).append(keys)
        return _kept(node, given)

    followed(workflow.output_node, lambda name: name, made_by, None)
    return found


def _kept(node: Node, given: Mapping[str, str | None]) -> dict[str, str | None]:
    """Of what a node makes those that are as they were given, or filled: the raw one's name."""
    with quiet_imports():
        from nvtabular.ops import FillMissing, JoinExternal

    fills, kept = isinstance(node.op, FillMissing), {}
    if isinstance(node.op, JoinExternal):  # its own columns; the others are the table's
        return {name: given[name] for name in node.output_schema.column_names if name in given}
    if fills or isinstance(node.op, operators_that_keep_values()):
        for name in node.output_schema.column_names:
            source, *others = node.column_mapping.get(name, [name])
            is_flag = fills and name != source
            if not others and not is_flag:
                kept[name] = given.get(source)
    return kept


def _looked_up(node: Node) -> Iterator[tuple[str, Keys]]:
    """Of a node's inputs those that it looks up, and in what."""
    with quiet_imports():
        from nvtabular import ops

    op = node.op
    if isinstance(op, ops.JoinExternal):
        for name, column in zip(_as_list(op.on), _as_list(op.on_ext), strict=True):
            if (held := _joined(op, column)) is not None:
                yield name, Keys((), column, held)
        return
    for name, there, column in _looked_up_in_files(node):
        path = Path(there)
        files = (path,) if path.is_file() else tuple(sorted(path.glob("*.parquet")))
        if there and files and column in pq.read_schema(files[0]).names:
            yield name, Keys(files, column)


def _looked_up_in_files(node: Node) -> Iterator[tuple[str, str, str]]:
    """Of a node's inputs those that it looks up: in which parquet, and which column of it."""
    with quiet_imports():
        from nvtabular import ops

    op = node.op
    if isinstance(op, ops.Categorify):
        for name in node.input_schema.column_names:
            storage = op.storage_name.get(name, name)
            column = storage if op.encode_type == "joint" else name
            yield name, str(op.categories.get(storage, "")), column
    elif isinstance(op, ops.TargetEncoding | ops.JoinGroupby) and node.selector:
        files = op.stats if isinstance(op, ops.TargetEncoding) else op.categories
        for group in node.selector.grouped_names:
            names = [group] if isinstance(group, str) else list(group)
            for name in names:
                yield name, str(files.get(op.name_sep.join(names), "")), name


def _as_list(names: str | Iterable[str]) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _joined(op: Any, column: str) -> pa.Array | None:
    """A column of the table that `JoinExternal` joins; None of one that is of several types."""
    table = op._ext
    if hasattr(table, "compute"):  # a Dask collection
        table = table[[column]].compute()
    values = table[column]
    values = values.to_pandas() if hasattr(values, "to_pandas") else values  # of cudf
    try:
        found = pa.array(values, from_pandas=True)
    except pa.ArrowException:
        return None
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def name_types(workflow: nvt.Workflow) -> nvt.Workflow:
    """Give a workflow's schema the types of raw columns that NVTabular did not see.

    Its schema is that of the first row of the fit; of an empty list there it knows no type, and
    booleans with a missing one are objects to pandas: the vocabulary has the type, in which the
    values are looked up.

    Args:
      workflow: fitted, with its vocabularies; changed in place.
    """
    keys = learned_keys(workflow)
    for node in workflow.graph.leaf_nodes:
        for name, column in node.input_schema.column_schemas.items():
            kinds = {key.kind for key in keys.get(name, ()) if not pa.types.is_null(key.kind)}
            are_booleans = column.dtype.name == "object" and kinds == {pa.bool_()}
            if are_booleans or (column.dtype.name == "unknown" and len(kinds) == 1):
                found = kinds.pop()
                is_time = pa.types.is_timestamp(found)  # pandas' own type of a zone is none here
                kind = np.dtype("datetime64[ns]" if is_time else found.to_pandas_dtype())
                for schema in (node.input_schema, node.output_schema):
                    if name in schema.column_names:
                        schema[name] = column.with_dtype(kind)
    return workflow


def target_columns(workflow: nvt.Workflow, label: str) -> set[str]:
    """Raw columns of which a workflow makes the label, and targets of `TargetEncoding` as well.

    Args:
      workflow: fitted.
      label: the column of its output.
    """
    with quiet_imports():
        from nvtabular.ops import TargetEncoding

    targets, none = set[str](), frozenset[str]()

    def made_by(node: Node, given: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
        if isinstance(node.op, TargetEncoding):
            targets.update(*(given.get(name, none) for name in node.op.target_columns))
        return {
            name: none.union(*(given.get(one, none) for one in inputs))
            for name, inputs in _made_of(node).items()
        }

    made = followed(workflow.output_node, lambda name: frozenset({name}), made_by, none)
    return targets & made.get(label, none)


class RawColumns:
    """The raw columns of a workflow.

    Args:
      workflow: fitted.
      wanted: the columns that it is to make.
    """

    def __init__(self, workflow: nvt.Workflow, wanted: Iterable[str]) -> None:
        self._workflow = workflow
        self._wanted = set(wanted)
        self._graph = _Graph(workflow.output_node)
        self.names = list(workflow.input_schema.column_names)

    def may_lack(self, columns: Collection[str]) -> bool:
        """Whether the wanted columns are made without these."""
        return self._wanted <= self._graph.made - self._graph.lost(columns)

    def spare(self) -> list[str]:
        """The columns that rows may lack, all at once."""
        found: list[str] = []
        for name in self.names:
            if self.may_lack([*found, name]):
                found.append(name)
        return found

    def remove(self, columns: Collection[str]) -> nvt.Workflow:
        """Make the workflow one for rows that lack some columns, without what is made of them."""
        self._graph.remove(columns)
        return self._workflow


class _Graph:
    """What the operators make of which columns, those within a `Subgraph` as well."""

    def __init__(self, output_node: Node) -> None:
        with quiet_imports():
            from merlin.dag import postorder_iter_nodes

        self._nodes = list(postorder_iter_nodes(output_node))  # that of the output last
        self._made_of = [_made_of(node) for node in self._nodes]
        inner = ((node, subgraph_of(node)) for node in self._nodes)
        self._inner = {id(node): _Graph(within) for node, within in inner if within is not None}
        self.made = set(self._made_of[-1])

    def lost(self, columns: Collection[str]) -> set[str]:
        """What is no longer made without some of the columns that are read."""
        *_, (_, gone) = self._lost(columns)
        return gone

    def remove(self, columns: Collection[str]) -> None:
        """Do without some of the columns that are read."""
        with quiet_imports():
            from merlin.dag import ColumnSelector

        lost = list(self._lost(columns))  # as long as every node is there
        for node, (lacking, gone) in zip(self._nodes, lost, strict=True):
            node.input_schema = node.input_schema.without(list(lacking))
            node.output_schema = node.output_schema.without(list(gone))
            if node.selector:
                groups = [g for g in node.selector.subgroups if not lacking & set(g.names)]
                names = [name for name in node.selector._names if name not in lacking]
                node.selector = ColumnSelector(names, subgroups=groups)
            node.op = _without(node.op, lacking)
            node.parents = _with_outputs(node.parents)
            node.dependencies = _with_outputs(node.dependencies)
            if (inner := self._inner.get(id(node))) is not None:
                inner.remove(lacking)

    def _lost(self, columns: Collection[str]) -> Iterator[tuple[set[str], set[str]]]:
        """Of each node which inputs and outputs are gone without some raw columns."""
        gone: dict[int, set[str]] = {}
        left: dict[int, set[str]] = {}
        for node, made in zip(self._nodes, self._made_of, strict=True):
            above = [id(one) for one in node.parents_with_dependencies]
            lacking = set().union(*(gone[one] for one in above)) if above else set(columns)
            lacking = lacking.difference(*(left[one] for one in above))
            if (inner := self._inner.get(id(node))) is not None:
                gone[id(node)] = inner.lost(lacking) & made.keys()
            else:
                gone[id(node)] = {name for name, inputs in made.items() if inputs & lacking}
            left[id(node)] = made.keys() - gone[id(node)]
            yield lacking, gone[id(node)]


def _made_of(node: Node) -> dict[str, set[str]]:
    """Of which inputs a node makes each of its outputs."""
    inputs, mapping = set(node.input_schema.column_names), node.column_mapping
    beside: set[str] = set()
    if node.op.dependencies:  # of which some operators' mappings know, and some do not
        beside = set(node.dependency_columns.names).difference(*mapping.values())
    keys = _keys(node) & inputs
    beside |= keys
    # Those of the table that JoinExternal joins are made of its keys alone.
    of_others = keys if _joins_a_table(node.op) else inputs
    groups = [set(group.names) for group in node.selector.subgroups] if node.selector else []
    made = {}
    for name in node.output_schema.column_names:
        own = set(mapping.get(name, [name])) & (inputs | beside)
        own |= set().union(*(group for group in groups if group & own))  # encoded together
        made[name] = (own or of_others) | beside
    return made


def _keys(node: Node) -> set[str]:
    """Columns without which an operator makes nothing, of which its mapping does not tell."""
    with quiet_imports():
        from nvtabular.ops import Filter, Groupby, JoinExternal

    op = node.op
    if isinstance(op, Filter):
        return _read_by(op.f, a_row(node.input_schema))
    if isinstance(op, Groupby):
        return {*op.groupby_cols, *op.sort_cols}
    if isinstance(op, JoinExternal):
        return {op.on} if isinstance(op.on, str) else set(op.on)
    return set()


def _read_by(function: Callable[[pd.DataFrame], Any], row: pd.DataFrame) -> set[str]:
    """Without which columns of a row a function fails otherwise than with all of them.

    A row of our making may have none of the values that it knows, and of no rows a function that
    goes from row to row reads nothing: both are asked.
    """

    def failure(frame: pd.DataFrame) -> str:
        try:
            function(frame.copy())
        except Exception as error:  # whatever a function of the user's raises
            return repr(error)
        return ""

    read = set()
    for tried in (row.iloc[:0], row):
        whole = failure(tried)
        read |= {n for n in row.columns if failure(tried.drop(columns=[n])) != whole}
    return set(map(str, read))


def _joins_a_table(op: Any) -> bool:
    with quiet_imports():
        from nvtabular.ops import JoinExternal

    return isinstance(op, JoinExternal)


def _without(op: Any, columns: Collection[str]) -> Any:
    """An operator that looks for none of its columns that are gone: ReduceDtypeSize, HashBucket."""
    for name in ("dtypes", "ranges", "num_buckets"):
        by_column = getattr(op, name, None)
        if isinstance(by_column, dict) and by_column.keys() & set(columns):
            op = copy.copy(op)
            setattr(op, name, {key: by_column[key] for key in by_column.keys() - set(columns)})
    return op


def _with_outputs(nodes: Iterable[Any]) -> list[Any]:
    """The nodes that still make something; some stand in lists of their own."""
    left = []
    for node in nodes:
        if isinstance(node, list):
            left += [some] if (some := _with_outputs(node)) else []
        elif node.output_schema.column_names:
            left.append(node)
    return left


def a_row(schema: Schema) -> pd.DataFrame:
    """A row of the types of a schema, each value of which is 1."""
    return pd.DataFrame({column.name: pd.Series([_one(column)]) for column in schema})


def _one(column: ColumnSchema) -> Any:
    is_known = column.dtype.name != "unknown"
    kind = np.dtype(column.dtype.to_numpy if is_known else object)
    value = "1" if kind.kind in "OSU" else np.ones(1, np.int64).astype(kind)[0]
    return [value] if column.is_list else value
