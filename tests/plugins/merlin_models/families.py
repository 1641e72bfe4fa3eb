"""Merlin's model families as one table of cases: how each is built, and what it looks up.

What a batch looks up is said here from the batch itself, per table, as NumPy arrays: the oracle
counts with it. Tables are told apart by their number of rows, so no two domains have one size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from merlin.models.tf.models.benchmark import NCFModel

from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags, mm

from . import BATCH, NUMBER, TARGET, stock_dcn, stock_deepfm, stock_dlrm, stock_wide_and_deep

Ids = list[np.ndarray]  # of each sample, the ids that one lookup reads for it


def column(name: str, rows: int, *tags: Any, kind: str = "one-hot", domain: str = "") -> Any:
    """A categorical column; kind "one-hot", "ragged" or "padded" (a list of four)."""
    properties: dict[str, Any] = {
        "domain": {"min": 0, "max": rows - 1, "name": domain or name},
        **({"value_count": {"min": 4, "max": 4}} if kind == "padded" else {}),
    }
    more = {} if kind == "one-hot" else {"is_list": True, "is_ragged": kind == "ragged"}
    return ColumnSchema(
        name, dtype=np.int64, tags=[Tags.CATEGORICAL, *tags], properties=properties, **more
    )


def rows_of(col: Any) -> int:
    return int(col.properties["domain"]["max"]) + 1


A, B = column("a", 53), column("b", 71)
USER = column("user_id", 53, Tags.USER_ID, Tags.USER)
ITEM = column("item_id", 71, Tags.ITEM_ID, Tags.ITEM)
CITY = column("city", 43, Tags.USER)
BRAND = column("brand", 37, Tags.ITEM)
HISTORY = column("item_id", 71, Tags.ITEM_ID, Tags.ITEM, kind="ragged")
OTHER = ColumnSchema("z", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
CTR = Schema([A, B, NUMBER, TARGET])
SHARED = Schema([column(n, 61, domain="user") for n in ("buyer", "seller")] + [A, NUMBER, TARGET])
TASKS = Schema([A, B, NUMBER, TARGET, OTHER])
RAGGED = Schema([A, column("l", 41, kind="ragged"), NUMBER, TARGET])
PADDED = Schema([A, column("l", 41, kind="padded"), NUMBER, TARGET])
PAIR = Schema([USER, ITEM])
RATED = Schema([USER, ITEM, TARGET])
TOWERS = Schema([USER, CITY, ITEM, BRAND])
SESSION = Schema([HISTORY, CITY])


@dataclass(frozen=True, eq=False)
class Family:
    """One case.

    Attributes:
      name: as the table in the documentation has it.
      build: makes the model.
      schema: its inputs and targets.
      tables: what the documentation's table says of its embedding tables.
      next_item: rows of the item table, where the target is an item's id.
      contrastive: whether the output looks up the target, and `sampled`, in the item table.
      sampled: the ids that it does so for.
      traces: whether the save holds those of all layers, as a user's does: so for one family of
        each kind of lookup. They take two thirds of a save, and Keras loads the same without.
    """

    name: str
    build: Callable[[Any], Any]
    schema: Any
    tables: str = "one per field"
    next_item: int | None = None
    contrastive: bool = False
    sampled: tuple[int, ...] = ()
    traces: bool = False

    def batch(self, seed: int = 0) -> tuple[dict[str, Any], Any]:
        """Features as Merlin's loader yields them, and targets; few ids, so that they repeat."""
        rng = np.random.default_rng(seed)
        features: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        for col in self.schema:
            if Tags.TARGET in col.tags:
                targets[col.name] = rng.integers(0, 2, (BATCH, 1)).astype(np.float32)
            elif Tags.CATEGORICAL not in col.tags:
                features[col.name] = rng.random((BATCH, 1), np.float32)
            elif not col.is_list:
                features[col.name] = rng.integers(0, 9, (BATCH, 1))
            elif col.is_ragged:
                lengths = rng.integers(0, 5, BATCH)
                features[f"{col.name}__values"] = rng.integers(1, 6, lengths.sum())
                features[f"{col.name}__offsets"] = np.concatenate([[0], np.cumsum(lengths)])
            else:
                features[col.name] = rng.integers(0, 6, (BATCH, 4))
        if self.next_item:
            targets["next"] = rng.integers(1, 9, (BATCH, 1))
        tensors = {name: tf.constant(value) for name, value in features.items()}
        labels = {name: tf.constant(value) for name, value in targets.items()}
        if len(labels) > 1:
            return tensors, labels
        return tensors, next(iter(labels.values()), None)

    def data(self, seed: int = 0) -> tf.data.Dataset:
        """One batch, of a size unknown to the graph as a loader's is."""
        features, targets = self.batch(seed)
        elements = (features,) if targets is None else (features, targets)
        signature = tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), elements
        )
        data = tf.data.Dataset.from_generator(lambda: iter([elements]), output_signature=signature)
        return data.apply(tf.data.experimental.assert_cardinality(1))

    def lookups(self, seed: int = 0) -> dict[int, list[Ids]]:
        """Rows of a table → every lookup in it, one list of ids per sample, padding left out."""
        features, targets = self.batch(seed)
        found: dict[int, list[Ids]] = {}
        for col in self.schema.select_by_tag(Tags.CATEGORICAL):
            if col.is_list and col.is_ragged:
                offsets = features[f"{col.name}__offsets"].numpy()
                ids = np.split(features[f"{col.name}__values"].numpy(), offsets[1:-1])
            else:
                ids = list(features[col.name].numpy())
                ids = [row[row > 0] for row in ids] if col.is_list else ids
            found.setdefault(rows_of(col), []).append(ids)
        if self.contrastive:
            found[self.next_item or 0] += [
                list(targets.numpy()),
                [np.array([i]) for i in self.sampled],
            ]
        return found


def of_inputs_v2(schema: Any) -> Any:
    inputs = mm.InputBlockV2(schema.excluding_by_tag(Tags.TARGET))
    return mm.Model(inputs, mlp(8), mm.BinaryOutput("y"))


def of_inputs_v1(schema: Any) -> Any:
    inputs = mm.InputBlock(schema.excluding_by_tag(Tags.TARGET))
    return mm.Model(inputs, mlp(8), mm.BinaryClassificationTask("y"))


def mlp(*units: int) -> Any:
    return mm.MLPBlock(list(units))


def multi_task(shared: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(schema: Any) -> Any:
        inputs = mm.InputBlockV2(schema.excluding_by_tag(Tags.TARGET))
        outputs = mm.OutputBlock(schema)
        return mm.Model(inputs, shared(outputs), outputs)

    return build


def two_tower_v2(schema: Any) -> Any:
    query = mm.Encoder(schema.select_by_tag(Tags.USER), mlp(8))
    candidate = mm.Encoder(schema.select_by_tag(Tags.ITEM), mlp(8))
    return mm.TwoTowerModelV2(query, candidate)


def youtube_v2(schema: Any) -> Any:
    # As many samples as there are ids to draw from: what is drawn is then the same each time.
    return mm.YoutubeDNNRetrievalModelV2(schema, top_block=mlp(8), num_sampled=70)


def youtube_v2_without_logq(schema: Any) -> Any:
    model = youtube_v2(schema)
    model.blocks[-1].logq_sampling_correction = False
    return model


def next_item(tied: bool) -> Callable[[Any], Any]:
    def build(schema: Any) -> Any:
        inputs = mm.InputBlockV2(schema)
        item = schema.select_by_tag(Tags.ITEM_ID)
        target = inputs["categorical"]["item_id"] if tied else item
        dim = inputs["categorical"]["item_id"].dim
        return mm.Model(inputs, mlp(int(dim)), mm.CategoricalOutput(target))

    return build


FAMILIES = (
    Family("`DLRMModel`", stock_dlrm, CTR, traces=True),
    Family("`DCNModel`, `depth=1`", lambda s: mm.DCNModel(s, depth=1, deep_block=mlp(16)), CTR),
    Family("`DCNModel`, deeper", stock_dcn, CTR),
    Family("`DeepFMModel`", stock_deepfm, CTR, "one per field; the wide weights are dense"),
    Family(
        "`WideAndDeepModel`", stock_wide_and_deep, CTR, "one per field; the wide weights are dense"
    ),
    Family("`NCFModel`", lambda s: NCFModel(s, 8, mlp(8)), RATED),
    Family("a table that fields share", stock_dlrm, SHARED, "one per domain", traces=True),
    Family("`InputBlockV2`, ragged lists", of_inputs_v2, RAGGED, traces=True),
    Family("`InputBlockV2`, padded lists", of_inputs_v2, PADDED, traces=True),
    Family("`InputBlock`, ragged lists", of_inputs_v1, RAGGED, traces=True),
    Family("`MMOEBlock`", multi_task(lambda o: mm.MMOEBlock(o, mlp(8), num_experts=2)), TASKS),
    Family("`CGCBlock`", multi_task(lambda o: mm.CGCBlock(o, mlp(8))), TASKS),
    Family("`PLEBlock`", multi_task(lambda o: mm.PLEBlock(2, o, mlp(8))), TASKS),
    Family("`MatrixFactorizationModel`", lambda s: mm.MatrixFactorizationModel(s, dim=8), PAIR),
    Family("`MatrixFactorizationModelV2`", lambda s: mm.MatrixFactorizationModelV2(s, dim=8), PAIR),
    Family(
        "`TwoTowerModel`", lambda s: mm.TwoTowerModel(s, query_tower=mlp(8)), TOWERS, traces=True
    ),
    Family("`TwoTowerModelV2`", two_tower_v2, TOWERS),
    Family(
        "`YoutubeDNNRetrievalModelV2`",
        youtube_v2,
        SESSION,
        "one per field; the items' is the output's as well",
        next_item=71,
        contrastive=True,
        sampled=tuple(range(70)),
    ),
    Family(
        "`YoutubeDNNRetrievalModelV2`, no logQ correction",
        youtube_v2_without_logq,
        SESSION,
        "one per field; the items' is the output's as well",
        next_item=71,
        contrastive=True,
        sampled=tuple(range(70)),
        traces=True,
    ),
    Family(
        "`CategoricalOutput`, tied",
        next_item(tied=True),
        SESSION,
        "one per field; the items' is the output's as well",
        next_item=71,
        traces=True,
    ),
    Family(
        "`CategoricalOutput`, untied",
        next_item(tied=False),
        SESSION,
        "one per field; the output's kernel is dense",
        next_item=71,
    ),
)
