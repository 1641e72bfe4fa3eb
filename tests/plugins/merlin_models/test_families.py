"""Each of Merlin's model families with our optimizer: steps against NumPy, and saving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from merlin.models.tf.models.benchmark import NCFModel

from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, load_model, save_model
from merlin_cowclip.plugins._tensorflow import Schema, Tags, mm

from ...golden import optimizer_cases as golden
from ...golden.optimizer_cases import BATCH, CLICKS, PAIR, SESSION, TOWERS, Case, mlp
from ...saves import quick_saves
from ..reference import Settings, adam, clip
from . import TARGET

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("graphs_as_traced")]
VALUES = Hyperparameters(
    BATCH, dense_lr=2e-3, embedding_lr=1e-3, l2=1e-4, clip_floor=1e-8, warmup_epochs=0.0
)
MODES = (("lazy", True), ("lazy", False), ("exact", True), ("exact", False))

# Models besides those of the golden data


def of_inputs_v1(schema: Any) -> Any:
    inputs = mm.InputBlock(schema.excluding_by_tag(Tags.TARGET))
    return mm.Model(inputs, mlp(8), mm.BinaryClassificationTask("y"))


def multi_task(shared: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def build(schema: Any) -> Any:
        inputs = mm.InputBlockV2(schema.excluding_by_tag(Tags.TARGET))
        outputs = mm.OutputBlock(schema)
        return mm.Model(inputs, shared(outputs), outputs)

    return build


def youtube_without_logq(schema: Any) -> Any:
    model = golden.youtube_dnn(schema)
    model.blocks[-1].logq_sampling_correction = False
    return model


def untied_output(schema: Any) -> Any:
    item = schema.select_by_tag(Tags.ITEM_ID)
    return mm.Model(golden.input_block(schema), mlp(4), mm.CategoricalOutput(item))


TASKS = Schema([*CLICKS, TARGET.with_name("z")])
RATED = Schema([*PAIR, TARGET])
CASES = [
    *(case for case in golden.CASES if not case.name.startswith("our")),
    Case("DCNModel, depth 1", lambda s: mm.DCNModel(s, depth=1, deep_block=mlp(8)), CLICKS, 0),
    Case("NCFModel", lambda s: NCFModel(s, 8, mlp(8)), RATED, 0),
    Case("InputBlock, ragged lists", of_inputs_v1, golden.RAGGED, 0),
    Case("MMOEBlock", multi_task(lambda o: mm.MMOEBlock(o, mlp(8), num_experts=2)), TASKS, 0),
    Case("CGCBlock", multi_task(lambda o: mm.CGCBlock(o, mlp(8))), TASKS, 0),
    Case("PLEBlock", multi_task(lambda o: mm.PLEBlock(2, o, mlp(8))), TASKS, 0),
    Case("MatrixFactorizationModel", lambda s: mm.MatrixFactorizationModel(s, dim=8), PAIR, 0),
    Case("TwoTowerModel", lambda s: mm.TwoTowerModel(s, query_tower=mlp(8)), TOWERS, 0),
    Case("youtube dnn v2, no logQ correction", youtube_without_logq, SESSION, 0, next_item=True),
    Case("untied output", untied_output, SESSION, 0, next_item=True),
]
# Saved with the traces of all layers, as by users: two thirds of a save's time.
TRACED = ("stock dlrm", "shared table", "ragged list", "padded list", "tied output")
TRACED += ("InputBlock, ragged lists", "TwoTowerModel", "youtube dnn v2, no logQ correction")


# What a batch looks up, and one update, in NumPy


def counts_of(case: Case, rows: int) -> np.ndarray | None:
    """`cnt` of every row of the table with so many rows; `None` where no table has as many."""
    features, *targets = next(iter(case.data(1)))
    lookups: dict[int, list[Any]] = {}
    for column in case.schema.select_by_tag(Tags.CATEGORICAL):
        if column.is_list and column.is_ragged:
            offsets = features[f"{column.name}__offsets"].numpy()
            ids = np.split(features[f"{column.name}__values"].numpy(), offsets[1:-1])
        else:
            ids = list(features[column.name].numpy())
            ids = [row[row > 0] for row in ids] if column.is_list else ids
        lookups.setdefault(column.int_domain.max + 1, []).append(ids)
    if "youtube" in case.name:  # the output looks up the target and its 49 samples
        lookups[50] += [list(targets[0].numpy()), [[i] for i in range(49)]]
    if rows not in lookups:
        return None
    counts = np.zeros(rows)
    for lookup in lookups[rows]:
        for ids in lookup:
            counts[np.unique(ids).astype(int)] += 1
    return counts


class Gradient(NamedTuple):
    """A variable's gradient: its rows summed, float64, and which rows a sparse one has."""

    dense: np.ndarray
    rows: np.ndarray | None


class Tape(tf.keras.optimizers.legacy.SGD):
    """Takes the gradients that Keras computes, and updates nothing."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.gradients: dict[Any, Gradient] = {}

    def apply_gradients(self, grads_and_vars: Any, *arguments: Any, **named: Any) -> Any:
        for gradient, variable in grads_and_vars:
            dense, rows = np.zeros(variable.shape), None
            if isinstance(gradient, tf.IndexedSlices):
                rows = np.unique(gradient.indices.numpy())
                np.add.at(dense, gradient.indices.numpy(), gradient.values.numpy())
            elif gradient is not None:
                dense += gradient.numpy()
            if gradient is not None:
                self.gradients[variable.ref()] = Gradient(dense, rows)
        return tf.no_op()


def update(
    value: np.ndarray, gradient: Gradient, counts: np.ndarray | None, ratio: float, mode: str
) -> tuple[np.ndarray, ...]:
    """The value, m and v after the first step; `counts` are `None` for dense weights."""
    w, g = value.astype(np.float64), gradient.dense.copy()
    rate = VALUES.dense_lr if counts is None else VALUES.embedding_lr
    settings = Settings(rate, clip_ratio=ratio, clip_floor=VALUES.clip_floor)
    absent = np.zeros(len(w), bool)
    if counts is not None:
        g += 2 * VALUES.l2 * w
        if w.shape[1] > 1:
            g = clip(g, w, counts, np.zeros(len(w)), settings)
        if mode == "lazy" and gradient.rows is not None:
            absent = counts == 0
            absent[gradient.rows] = False
    after = adam(w, np.zeros_like(w), np.zeros_like(w), g, 1, settings)
    for array, before in zip(after, (w, 0 * w, 0 * w), strict=True):
        array[absent] = before[absent]
    return after


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_steps_and_saving(case, tmp_path, request):
    if case.name == "stock dlrm":
        request.getfixturevalue("graphs_rewritten")
    model, tape = case.model(), Tape()
    model.compile(optimizer=tape, metrics=[], run_eagerly=True)
    model.fit(case.data(1), verbose=0)
    start = model.get_weights()
    before = dict(zip((w.ref() for w in model.weights), start, strict=True))
    tables = {
        reference: counts
        for reference in tape.gradients
        if (variable := reference.deref()).shape.rank == 2
        and (counts := counts_of(case, variable.shape[0])) is not None
    }
    ratio = ratio_of(tables, before, tape.gradients)
    for mode, eager in MODES:
        model.set_weights(start)
        optimizer = CowClipOptimizer.for_model(model, VALUES.replace(clip_ratio=ratio), update=mode)
        model.compile(optimizer=optimizer, metrics=[], run_eagerly=eager)
        model.fit(case.data(1), verbose=0)
        owner = {owned.variable.ref(): owned.optimizer for owned in optimizer.owned()}
        assert owner.keys() == {v.ref() for v in model.trainable_variables}
        clipped = 0
        for reference, gradient in tape.gradients.items():
            variable, counts = reference.deref(), tables.get(reference)
            value, m, v = update(before[reference], gradient, counts, ratio, mode)
            for slot, expected, rtol in (("m", m, 2e-4), ("v", v, 5e-4)):
                np.testing.assert_allclose(
                    owner[reference].get_slot(variable, slot).numpy(),
                    expected,
                    rtol=rtol,
                    atol=1e-6 * np.abs(expected).max(),
                    err_msg=f"{slot} of {variable.name}",
                )
            np.testing.assert_allclose(variable, value, atol=2e-6, err_msg=variable.name)
            if counts is not None:
                _, free, _ = update(before[reference], gradient, counts, 1e9, mode)
                shorter = np.linalg.norm(m, axis=1) < 0.99 * np.linalg.norm(free, axis=1)
                clipped += int(shorter.any() and not shorter[counts > 0].all())
        assert clipped  # some rows of a table, and not all
    check_saving(model, case, tmp_path / "model")


def ratio_of(tables: Any, before: Any, gradients: Any) -> float:
    """r in the middle of what rows need, so that the clip acts on some."""
    ratios = []
    for reference, counts in tables.items():
        w = before[reference]
        norms = np.linalg.norm(gradients[reference].dense + 2 * VALUES.l2 * w, axis=1)
        per_sample = norms / np.maximum(counts, 1) / np.linalg.norm(w, axis=1)
        ratios.append(per_sample[counts > 0])
    return float(np.median(np.concatenate(ratios)))


def check_saving(model: Any, case: Case, folder: Any) -> None:
    """Saved and loaded, a trained model predicts the same, and its next step is the same."""
    with quick_saves(traces=case.name in TRACED):
        save_model(model, folder)
    loaded = load_model(folder, metrics=[], run_eagerly=True)
    model.compile(optimizer=model.optimizer, loss=model.loss, metrics=[], run_eagerly=True)
    features, *_ = next(iter(case.data(1)))
    outputs = [tf.nest.flatten(one(features)) for one in (model, loaded)]
    for a, b in zip(*outputs, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-6)
    for one in (model, loaded):
        one.fit(case.data(1), verbose=0)
    # In an order that Keras's loading does not change.
    weights = [sorted(one.weights, key=lambda w: w.name) for one in (model, loaded)]
    for a, b in zip(*weights, strict=True):
        np.testing.assert_allclose(
            b.numpy().astype(np.float64), a.numpy().astype(np.float64), rtol=1e-5, atol=1e-6
        )
