"""What the optimizer does to tiny models: weights and moments after some steps.

Each case is a model, its batches and its first weights, all from NumPy's generators with fixed
seeds, so the recorded file contains only results.
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
from merlin.schema import Schema, Tags

from merlin_cowclip.models import MODELS
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, StepStatistics

from ..plugins.merlin_models import NUMBER, TARGET, category, dataset_of

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

A, B = category("a", 40), category("b", 25)
USER, CITY = category("user_id", 40, Tags.USER_ID, Tags.USER), category("city", 25, Tags.USER)
ITEM, BRAND = category("item_id", 50, Tags.ITEM_ID, Tags.ITEM), category("brand", 30, Tags.ITEM)
HISTORY = category("item_id", 50, Tags.ITEM_ID, Tags.ITEM, ragged=True)
BUYER, SELLER = (category(name, 50, domain="user") for name in ("buyer", "seller"))
CLICKS = Schema([A, B, NUMBER, TARGET])
SHARED = Schema([BUYER, SELLER, A, NUMBER, TARGET])
RAGGED = Schema([A, category("l", 35, ragged=True), NUMBER, TARGET])
PADDED = Schema([A, category("l", 35, padded=True), NUMBER, TARGET])
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
    """A model and its data."""

    name: str  # as keys of the recorded file have it
    build: Callable[[Any], Any]
    schema: Any
    clip_ratio: float  # chosen for this model's gradients
    next_item: bool = False  # whether the target is an item's id
    updates: tuple[str, ...] = ("exact", "lazy")  # "deferred" is compared with "exact"

    def model(self) -> Any:
        """The model with its variables."""
        tf.keras.backend.clear_session()
        tf.keras.utils.set_random_seed(1)
        model = self.build(self.schema)
        model(next(iter(self.data(1)))[0])
        return model

    def data(self, steps: int) -> tf.data.Dataset:
        """Batches as Merlin's loader gives them."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        return dataset_of([self._batch(random) for _ in range(steps)])

    def _batch(self, random: np.random.Generator) -> tuple[Any, ...]:
        features: dict[str, Any] = {}
        targets: dict[str, Any] = {}
        for column in self.schema:
            if Tags.TARGET in column.tags:
                targets[column.name] = random.integers(0, 2, (BATCH, 1)).astype(np.float32)
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
                    is_id = np.arange(4) < lengths[:, np.newaxis]
                    features[column.name] = _ids(random, column, (BATCH, 4)) * is_id
        if self.next_item:
            targets["next"] = _ids(random, ITEM, (BATCH, 1))
        labels = [targets] if len(targets) > 1 else targets.values()
        return tf.nest.map_structure(tf.constant, (features, *labels))


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


def trained_variables(model: Any, optimizer: CowClipOptimizer) -> dict[str, tf.Variable]:
    """The trainable variables: tables by name, then dense weights in the model's order."""
    named = {f"table {spec.name}": spec.variable for spec in optimizer.table_specs}
    tables = {variable.ref() for variable in named.values()}
    dense = [v for v in model.trainable_variables if v.ref() not in tables]
    return named | {f"dense {place}": variable for place, variable in enumerate(dense)}


class Trained(NamedTuple):
    """Weights and moments of a training, and what the clip did."""

    layout: np.ndarray  # a line for each variable, "name 40x4"
    values: np.ndarray  # 3 (after 1, 3, 30 steps) × 3 (weights, m, v) × elements, in that order
    statistics: np.ndarray | None  # of each field: see `_statistics`


def train(case: Case, update: str, *, eager: bool) -> Trained:
    """Train for 30 steps from the case's first weights; eagerly, with observed steps."""
    model = case.model()
    optimizer = _optimizer(model, VALUES.replace(clip_ratio=case.clip_ratio), update)
    statistics = optimizer.observe(FREQUENT) if eager else None
    variables = trained_variables(model, optimizer)
    kept = []

    def keep(batch: int, logs: Any) -> None:
        if batch + 1 in RECORDED_AFTER:
            optimizer.catch_up()
            moments = [_moments(optimizer, variable) for variable in variables.values()]
            kinds = (variables.values(), *zip(*moments, strict=True))
            kept.append([np.concatenate([v.numpy().ravel() for v in kind]) for kind in kinds])

    model.compile(optimizer=optimizer, metrics=[], run_eagerly=eager)
    callback = tf.keras.callbacks.LambdaCallback(on_batch_end=keep)
    model.fit(case.data(STEPS), verbose=0, callbacks=[callback])
    layout = [f"{name} {'x'.join(map(str, v.shape))}" for name, v in variables.items()]
    return Trained(np.array(layout), np.array(kept), statistics and _statistics(statistics))


def _moments(optimizer: CowClipOptimizer, variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Adam's m and v of a variable."""
    for part in optimizer.optimizers:
        with contextlib.suppress(KeyError):
            return part.get_slot(variable, "m"), part.get_slot(variable, "v")
    raise AssertionError(f"{variable.name} has no moments")


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


def compare_training(case: Case, update: str, trained: Trained, golden: Mapping[str, Any]) -> None:
    """Weights within 1e-6, m and √v within 1e-6 of the model's largest, statistics exactly.

    With one thread, or graphs as they were traced, all results stay within this.
    """
    like = "exact" if update == "deferred" else update
    np.testing.assert_array_equal(trained.layout, golden[f"{case.name}/layout"])
    shapes = [line.rpartition(" ")[2].split("x") for line in trained.layout]
    ends = np.cumsum([math.prod(map(int, shape)) for shape in shapes])
    for step, values, expected in zip(
        RECORDED_AFTER, trained.values, golden[f"{case.name}/{like}"], strict=True
    ):
        for kind, a, b in zip(("weights", "m", "v"), values, expected, strict=True):
            if kind == "v":
                a, b = np.sqrt(a), np.sqrt(b)
            atol = TOLERANCE * (1.0 if kind == "weights" else np.abs(b).max())
            parts = (np.split(x, ends[:-1]) for x in (a, b))
            for name, one, other in zip(trained.layout, *parts, strict=True):
                np.testing.assert_allclose(
                    one, other, TOLERANCE, atol, err_msg=f"{kind} of {name} after {step} steps"
                )
    if trained.statistics is not None:
        np.testing.assert_array_equal(trained.statistics, golden[f"{case.name}/{like} statistics"])


def record(folder: Path) -> None:
    """Write the file, after a check that graph and eager training agree and that the clip acts."""
    golden: dict[str, np.ndarray] = {}
    for case in CASES:
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
