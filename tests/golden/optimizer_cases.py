"""What the optimizer does to tiny models: weights and moments after some steps, and counts per row.

Each case is a model, its batches and its first weights, all from NumPy's generators with fixed
seeds, so the recorded file holds results alone. Nothing here but `trained_variables` and `moments`
uses more of the optimizer than its public interface; a rewrite may adapt these two, and nothing
else in this folder.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import merlin.models.tf as mm
import numpy as np
import tensorflow as tf
from merlin.schema import ColumnSchema, Schema, Tags

from merlin_cowclip.models import MODELS
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, StepStatistics

FILE = "optimizer.npz"
TOLERANCE = 1e-6
BATCH, STEPS = 32, 30
FREQUENT = 0.1  # share of the batch's samples from which on an id is a frequent one
RECORDED_AFTER = (1, 3, 30)
# The clip acts on rows of rare ids more than on others: `record` checks it.
VALUES = Hyperparameters(
    BATCH, dense_lr=2e-3, embedding_lr=1e-3, l2=1e-4, clip_floor=1e-8, warmup_epochs=0.5
)


# Schemas and batches


def ids(name: str, rows: int, *tags: Any, kind: str = "one-hot", domain: str = "") -> Any:
    """A categorical column; kind "one-hot", "ragged" or "padded" (a list of four)."""
    properties: dict[str, Any] = {"domain": {"min": 0, "max": rows - 1, "name": domain or name}}
    if kind == "padded":
        properties["value_count"] = {"min": 4, "max": 4}
    lists = {} if kind == "one-hot" else {"is_list": True, "is_ragged": kind == "ragged"}
    tags = (Tags.CATEGORICAL, *tags)
    return ColumnSchema(name, dtype=np.int64, tags=list(tags), properties=properties, **lists)


NUMBER = ColumnSchema("x", dtype=np.float32, tags=[Tags.CONTINUOUS])
LABEL = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
A, B = ids("a", 40), ids("b", 25)
USER, CITY = ids("user_id", 40, Tags.USER_ID, Tags.USER), ids("city", 25, Tags.USER)
ITEM, BRAND = ids("item_id", 50, Tags.ITEM_ID, Tags.ITEM), ids("brand", 30, Tags.ITEM)
HISTORY = ids("item_id", 50, Tags.ITEM_ID, Tags.ITEM, kind="ragged")
BUYER, SELLER = (ids(name, 50, domain="user") for name in ("buyer", "seller"))
CLICKS = Schema([A, B, NUMBER, LABEL])
SHARED = Schema([BUYER, SELLER, A, NUMBER, LABEL])
RAGGED = Schema([A, ids("l", 35, kind="ragged"), NUMBER, LABEL])
PADDED = Schema([A, ids("l", 35, kind="padded"), NUMBER, LABEL])
PAIR, TOWERS = Schema([USER, ITEM]), Schema([USER, CITY, ITEM, BRAND])
SESSION = Schema([HISTORY, CITY])


# Models


def mlp(*units: int) -> Any:
    return mm.MLPBlock(list(units))


def stock_deepfm(schema: Any) -> Any:
    return mm.DeepFMModel(schema, embedding_dim=4, deep_block=mlp(8))


def stock_dlrm(schema: Any) -> Any:
    return mm.DLRMModel(schema, embedding_dim=4, bottom_block=mlp(4), top_block=mlp(8))


def stock_dcn(schema: Any) -> Any:
    inputs = input_block(schema)
    return mm.DCNModel(schema, depth=2, deep_block=mlp(8), input_block=inputs)


def stock_wide_and_deep(schema: Any) -> Any:
    wide = schema.select_by_tag(Tags.CATEGORICAL)
    deep = input_block(schema)
    return mm.WideAndDeepModel(
        schema, deep_block=mlp(8), wide_schema=wide, deep_schema=schema, deep_input_block=deep
    )


def input_block(schema: Any) -> Any:
    """Merlin's inputs with embeddings of width 4."""
    columns = schema.excluding_by_tag(Tags.TARGET)
    embeddings = mm.Embeddings(columns.select_by_tag(Tags.CATEGORICAL), dim=4)
    return mm.InputBlockV2(columns, categorical=embeddings)


def merlins_inputs(schema: Any) -> Any:
    return mm.Model(input_block(schema), mlp(8), mm.BinaryOutput("y"))


def stock_mf(schema: Any) -> Any:
    return mm.MatrixFactorizationModelV2(schema, dim=4)


def two_tower(schema: Any) -> Any:
    user, item = (schema.select_by_tag(tag) for tag in (Tags.USER, Tags.ITEM))
    return mm.TwoTowerModelV2(
        mm.Encoder(input_block(user), mlp(4)), mm.Encoder(input_block(item), mlp(4))
    )


def youtube_dnn(schema: Any) -> Any:
    # As many samples as there are ids to draw from: the same are drawn each time.
    return mm.YoutubeDNNRetrievalModelV2(
        schema, top_block=mlp(4), inputs=input_block(schema), num_sampled=49
    )


def tied_output(schema: Any) -> Any:
    inputs = input_block(schema)
    return mm.Model(inputs, mlp(4), mm.CategoricalOutput(inputs["categorical"]["item_id"]))


def ours(name: str) -> Callable[[Any], Any]:
    return lambda schema: MODELS[name](schema, embedding_dim=4, mlp=(8,))


@dataclass(frozen=True, eq=False)
class Case:
    """A model and its data.

    Attributes:
      name: as keys of the recorded file have it.
      build: makes the model of a schema.
      schema: inputs, and the label if there is one.
      clip_ratio: r, chosen for this model's gradients.
      next_item: whether the target is an item's id.
      updates: the update modes. "deferred" has no results of its own: it is compared with "exact".
    """

    name: str
    build: Callable[[Any], Any]
    schema: Any
    clip_ratio: float
    next_item: bool = False
    updates: tuple[str, ...] = ("exact", "lazy")

    def model(self) -> Any:
        """The model with its variables."""
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(1)
        model = self.build(self.schema)
        model(next(iter(self.data(1)))[0])
        return model

    def data(self, steps: int) -> tf.data.Dataset:
        """Batches as Merlin's loader gives them, of a size unknown to the graph."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        batches = [self._batch(random) for _ in range(steps)]
        signature = tf.nest.map_structure(
            lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype), batches[0]
        )
        data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
        return data.apply(tf.data.experimental.assert_cardinality(steps))

    def _batch(self, random: np.random.Generator) -> tuple[Any, ...]:
        features: dict[str, Any] = {}
        targets: list[Any] = []
        for column in self.schema:
            if Tags.TARGET in column.tags:
                targets.append(random.integers(0, 2, (BATCH, 1)).astype(np.float32))
            elif Tags.CATEGORICAL not in column.tags:
                features[column.name] = random.random((BATCH, 1), np.float32)
            elif not column.is_list:
                features[column.name] = _ids(random, column, (BATCH, 1))
            else:
                lengths = random.integers(0, 5, BATCH)
                if column.is_ragged:
                    features[f"{column.name}__values"] = _ids(random, column, lengths.sum())
                    offsets = np.concatenate([[0], np.cumsum(lengths)])
                    features[f"{column.name}__offsets"] = offsets
                else:
                    held = np.arange(4) < lengths[:, np.newaxis]
                    features[column.name] = _ids(random, column, (BATCH, 4)) * held
        if self.next_item:
            targets.append(_ids(random, ITEM, (BATCH, 1)))
        return tf.nest.map_structure(tf.constant, (features, *targets))


def _ids(random: np.random.Generator, column: Any, size: Any) -> np.ndarray:
    """Ids from 1 on: some in most batches, many rare, the last ones perhaps in none."""
    return np.minimum(random.geometric(0.12, size), int(column.int_domain.max))


ALL_UPDATES = ("exact", "lazy", "deferred")
CASES = (
    Case("stock deepfm", stock_deepfm, CLICKS, 0.008),
    Case("stock dlrm", stock_dlrm, CLICKS, 0.05),
    Case("stock dcn", stock_dcn, CLICKS, 0.06),
    Case("stock wide and deep", stock_wide_and_deep, CLICKS, 0.01),
    Case("stock mf v2", stock_mf, PAIR, 0.03),
    Case("stock two tower v2", two_tower, TOWERS, 0.025),
    Case("stock youtube dnn v2", youtube_dnn, SESSION, 0.03, next_item=True),
    Case("shared table", stock_dlrm, SHARED, 0.08),
    Case("ragged list", merlins_inputs, RAGGED, 0.05),
    Case("padded list", merlins_inputs, PADDED, 0.04),
    Case("tied output", tied_output, SESSION, 0.03, next_item=True),
    Case("our deepfm", ours("deepfm"), SHARED, 0.06, updates=ALL_UPDATES),
    Case("our dcn_v2 with a list", ours("dcn_v2"), RAGGED, 0.1, updates=ALL_UPDATES),
)


# The only functions that a rewrite of the optimizer may adapt


def trained_variables(model: Any, optimizer: CowClipOptimizer) -> dict[str, tf.Variable]:
    """The trainable variables: tables by name, then dense weights in the model's order."""
    named = {f"table {spec.name}": spec.variable for spec in optimizer.table_specs}
    tables = {variable.ref() for variable in named.values()}
    dense = [v for v in model.trainable_variables if v.ref() not in tables]
    return named | {f"dense {place}": variable for place, variable in enumerate(dense)}


def moments(optimizer: CowClipOptimizer, variable: tf.Variable) -> tuple[tf.Variable, tf.Variable]:
    """Adam's m and v of a variable."""
    for part in optimizer.optimizers:
        with contextlib.suppress(KeyError):
            return part.get_slot(variable, "m"), part.get_slot(variable, "v")
    raise AssertionError(f"{variable.name} has no moments")


# Results


class Trained(NamedTuple):
    """Weights and moments of a training, and what the clip did.

    `layout` has one line per variable, "name 40x4"; `values` is 3 (after 1, 3 and 30 steps) × 3
    (weights, m, v) × all elements of all variables in that order, float32. `statistics` is as
    `_statistics` has it, `None` where not observed.
    """

    layout: np.ndarray
    values: np.ndarray
    statistics: np.ndarray | None


def train(case: Case, update: str, *, eager: bool) -> Trained:
    """Train for 30 steps from the case's first weights; eagerly, with observed steps."""
    model = case.model()
    values = VALUES.replace(clip_ratio=case.clip_ratio)
    optimizer = _optimizer(model, values, update)
    statistics = optimizer.observe(FREQUENT) if eager else None
    variables = trained_variables(model, optimizer)
    kept = []

    def keep(batch: int, logs: Any) -> None:
        if batch + 1 in RECORDED_AFTER:
            optimizer.catch_up()
            states = [(v, *moments(optimizer, v)) for v in variables.values()]
            kept.append([_flat(kind) for kind in zip(*states, strict=True)])

    model.compile(optimizer=optimizer, metrics=[], run_eagerly=eager)
    callback = tf.keras.callbacks.LambdaCallback(on_batch_end=keep)
    model.fit(case.data(STEPS), verbose=0, callbacks=[callback])
    layout = [f"{name} {'x'.join(map(str, v.shape))}" for name, v in variables.items()]
    found = None if statistics is None else _statistics(statistics)
    return Trained(np.array(layout), np.array(kept), found)


def count(case: Case, *, eager: bool) -> np.ndarray:
    """How many samples of the first batch hold each row of the clipped tables, one after another.

    Read from what a step did, by the definition of the clip: without L2, and with bounds far below
    all gradients, ‖g_k‖ is cnt_k·ζ after the clip, and the first moment is (1 - β₁) of that. So 0
    is a row without a gradient, and a row with one that no sample holds has 1.
    """
    model = case.model()
    values = VALUES.replace(l2=0.0, clip_ratio=1e-30, clip_floor=1e-12)
    optimizer = _optimizer(model, values, "exact")
    model.compile(optimizer=optimizer, metrics=[], run_eagerly=eager)
    model.fit(case.data(1), verbose=0)
    tables = [
        variable
        for name, variable in trained_variables(model, optimizer).items()
        if name.startswith("table ") and variable.shape[1] > 1
    ]
    m = np.concatenate([moments(optimizer, table)[0].numpy() for table in tables])
    counts = np.linalg.norm(m.astype(np.float64), axis=1) / ((1 - 0.9) * values.clip_floor)
    np.testing.assert_allclose(counts, np.round(counts), atol=1e-3)
    return np.round(counts).astype(np.int64)


def _optimizer(model: Any, values: Hyperparameters, update: str) -> CowClipOptimizer:
    """The model's optimizer; sets the first weights, by what they are and not by their order."""
    optimizer = CowClipOptimizer.for_model(model, values, update=update, steps_per_epoch=STEPS)
    for name, variable in trained_variables(model, optimizer).items():
        random = np.random.default_rng(zlib.crc32(f"{name} {variable.shape}".encode()))
        if variable.shape.rank == 1:
            value = np.abs(random.normal(0, 0.1, variable.shape))
        elif name.startswith("table "):
            value = random.normal(0, 0.1, variable.shape)
        else:
            value = random.normal(0, (2 / variable.shape[0]) ** 0.5, variable.shape)
        variable.assign(value)
    return optimizer


def _flat(variables: Any) -> np.ndarray:
    return np.concatenate([variable.numpy().ravel() for variable in variables])


def _statistics(statistics: StepStatistics) -> np.ndarray:
    """Of the fields in the model's order: of rare ids, then of frequent ones, four integers."""
    return np.array(
        [
            [
                getattr(kind, name)
                for kind in (field.rare, field.frequent)
                for name in ("rows", "occurrences", "clipped_rows", "clipped_occurrences")
            ]
            for field in statistics.read()
        ]
    )


# Comparing and recording


def load(folder: Path) -> dict[str, np.ndarray]:
    """All recorded arrays: "case/update" and so on."""
    with np.load(folder / FILE) as file:
        return dict(file)


def compare_training(case: Case, update: str, found: Trained, golden: Mapping[str, Any]) -> None:
    """Weights within 1e-6, moments within 1e-6 of the model's largest, statistics exactly.

    Of v the root, which is of a gradient's size as m is: 1e-6 of the largest v would hide most of
    the others. With one thread, or graphs as they were traced, all results stay within this.

    Raises:
      AssertionError: a result is another.
    """
    like = "exact" if update == "deferred" else update
    np.testing.assert_array_equal(found.layout, golden[f"{case.name}/layout"])
    shapes = [line.rpartition(" ")[2].split("x") for line in found.layout]
    ends = np.cumsum([math.prod(map(int, shape)) for shape in shapes])
    for step, values, expected in zip(
        RECORDED_AFTER, found.values, golden[f"{case.name}/{like}"], strict=True
    ):
        for kind, a, b in zip(("weights", "m", "v"), values, expected, strict=True):
            if kind == "v":
                a, b = np.sqrt(a), np.sqrt(b)
            atol = TOLERANCE * (1.0 if kind == "weights" else np.abs(b).max())
            parts = (np.split(x, ends[:-1]) for x in (a, b))
            for name, one, other in zip(found.layout, *parts, strict=True):
                np.testing.assert_allclose(
                    one, other, TOLERANCE, atol, err_msg=f"{kind} of {name} after {step} steps"
                )
    if found.statistics is not None:
        np.testing.assert_array_equal(found.statistics, golden[f"{case.name}/{like} statistics"])


def record(folder: Path) -> None:
    """Write the file, after a check that graph and eager training agree and that the clip acts."""
    golden: dict[str, np.ndarray] = {}
    for case in CASES:
        golden[f"{case.name}/counts"] = count(case, eager=False)
        for update in case.updates:
            graph, eager = (train(case, update, eager=mode) for mode in (False, True))
            if update != "deferred":
                golden[f"{case.name}/layout"] = graph.layout
                golden[f"{case.name}/{update}"] = graph.values
                golden[f"{case.name}/{update} statistics"] = eager.statistics
            compare_training(case, update, eager, golden)
        rare, _, clipped, _, frequent, _, clipped_too, _ = eager.statistics.sum(axis=0)
        shares = f"{clipped / rare:.0%} of rare ids' rows, {clipped_too / frequent:.0%} of others"
        print(f"{case.name}: clips {shares}", flush=True)
        assert 0.1 < clipped / rare < 0.9
        assert clipped_too / frequent < clipped / rare
    np.savez_compressed(folder / FILE, **golden)
