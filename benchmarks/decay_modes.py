"""L2 in the gradient, or decay of the weights apart from it: a study in docs/internals/decay.md.

Three modes, each on the same draws of learning rates and of its own strength of decay:

- coupled: `update="exact"`. The gradient of every row has 2λ·w, and goes through the clip and Adam.
- decoupled: AdamW. Every row becomes w · (1 - η_t·λ) in each step; absent rows have the gradient 0.
- on touch: lazy Adam. A row of the batch gets the decay of all steps since it was last in one.
- averaged: as coupled, with constant learning rates, and averages of the weights. All other modes
  let them decay to 0.

    python benchmarks/decay_modes.py run RECORD NAME DATA    # for each data set
    python benchmarks/decay_modes.py table RECORD

A search has 12 trials: eight of a Latin hypercube, and four closer to the best of them. The last
epoch's AUC on the validation part chooses; the best trial is trained from three other seeds, and
the AUC on the test part counts. The strength of the last two modes is λ·Σ η_t of a mean epoch: the
logarithm by which a weight shrinks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from scipy.stats import qmc

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.plugins.optimizers import cowclip
from merlin_cowclip.plugins.optimizers.parts import AdamPart
from merlin_cowclip.workflows import PreparedData, TrainConfig
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.training.builder import dummy_batch, network, set_seeds
from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH, Predictor
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.train import check_trainable

MODES = ("coupled", "decoupled", "on touch", "averaged")
RATES = {"dense_lr": (2e-3, 3e-2), "embedding_lr": (1e-3, 6e-2)}
STRENGTHS = {
    **dict.fromkeys(("coupled", "averaged"), (1e-6, 1e-2)),
    **dict.fromkeys(("decoupled", "on touch"), (1.8e-3, 18.0)),
}
EMA = 0.98  # of "averaged": over 50 of the 120 steps
FIRST, CLOSER, WIDTH = 8, 4, 0.3  # trials; the width of the second box in shares of the first
SEEDS = (101, 102, 103)  # of the best trial
Found = dict[str, Any]


class Decoupled(AdamPart):
    """AdamW on every row of a table; `l2` must be 0."""

    strength: ClassVar[float] = 0.0  # λ

    def _resource_apply_dense(self, grad: Any, var: tf.Variable, apply_state: Any = None) -> Any:
        kept = 1.0 - self._decayed_lr(var.dtype) * self.strength
        with tf.control_dependencies([var.assign(kept * var, read_value=False)]):
            return super()._resource_apply_dense(grad, var, apply_state)


class OnTouch(AdamPart):
    """Lazy Adam; a row in the batch gets the decay of all steps since it was last in one."""

    strength: ClassVar[float] = 0.0  # λ

    def _create_slots(self, var_list: Sequence[tf.Variable]) -> None:
        super()._create_slots(var_list)
        for variable in var_list:
            self.add_slot(variable, "total", shape=[])  # Σ log(1 - η_t·λ) of all steps
            self.add_slot(variable, "applied", shape=[variable.shape[0], 1])  # of each row

    def _apply_rows(self, grad: Any, var: tf.Variable, indices: tf.Tensor) -> Any:
        total, applied = self.get_slot(var, "total"), self.get_slot(var, "applied")
        now = total.assign_add(tf.math.log1p(-self._decayed_lr(var.dtype) * self.strength))
        kept = tf.exp(now - tf.gather(applied, indices))
        write = self._resource_scatter_update
        decayed = write(var, indices, kept * tf.gather(var, indices))
        marked = write(applied, indices, tf.fill([tf.size(indices), 1], now))
        with tf.control_dependencies([decayed, marked]):
            return super()._apply_rows(grad, var, indices)


PARTS: dict[str, type[AdamPart]] = {"decoupled": Decoupled, "on touch": OnTouch}


def draws(search: int) -> tuple[np.ndarray, np.ndarray]:
    """Points in the unit cube for all trials: of the first, and of those closer to the best."""
    first = qmc.LatinHypercube(3, seed=search).random(FIRST)
    return first, qmc.LatinHypercube(3, seed=100 + search).random(CLOSER)


def values(mode: str, point: np.ndarray) -> dict[str, float]:
    """Learning rates and strength of decay of a point in the unit cube."""
    ranges = {**RATES, "strength": STRENGTHS[mode]}
    pairs = zip(ranges.items(), point, strict=True)
    return {name: float(low * (high / low) ** x) for (name, (low, high)), x in pairs}


class Study:
    """A DeepFM on prepared data that is trained with many values by one graph, for it is small."""

    def __init__(self, data: PreparedData, mode: str, batch_size: int, epochs: int) -> None:
        set_seeds(0, deterministic=False)
        self.mode, self.epochs = mode, epochs
        self.parts = {n: Loader(data, n, batch_size=EVALUATION_BATCH) for n in ("valid", "test")}
        shared = {"batch_size": batch_size, "base_batch_size": batch_size}
        self.config = TrainConfig(mlp=(32, 32), epochs=epochs, **shared)
        self.train_part = partial(check_trainable, data)
        self.steps = len(self.train_part(self.config))
        self.values = {name: tf.Variable(1.0, trainable=False) for name in (*RATES, "strength")}
        to_zero = tf.keras.optimizers.schedules.PolynomialDecay
        power = 0.0 if mode == "averaged" else 1.0  # 0: constant
        dense, embedding = (
            to_zero(self.values[n], epochs * self.steps, end_learning_rate=0.0, power=power)
            for n in RATES
        )
        self.schema, self.model = data.schema, network(self.config, data.schema)
        part = PARTS.get(mode, AdamPart)
        kind = type(part.__name__, (part,), {"strength": self.values["strength"]})
        with mock.patch.object(cowclip, "BASES", {"adam": kind}):
            self.optimizer = cowclip.CowClipOptimizer.for_model(
                self.model,
                self.config.hyperparameters.replace(l2=0.0),
                update="lazy" if mode == "on touch" else "exact",
                ema=EMA if mode == "averaged" else None,
                steps_per_epoch=data.rows["train"] // batch_size,
                dense_schedule=dense,
                embedding_schedule=embedding,
            )
        self.model.compile(optimizer=self.optimizer, metrics=[])
        self.inputs = dummy_batch(vars(data.spec))
        self.model(self.inputs)
        self.step, self.predictor = self.model.make_train_function(), Predictor(self.model)
        self.zero = [variable.numpy() for variable in self.optimizer.weights]

    def train(self, tried: dict[str, float], seed: int, part: str) -> float:
        """The AUC on a part after the last epoch; 0 if the training diverged."""
        set_seeds(seed, deterministic=False)
        first = network(self.config, self.schema)
        first(self.inputs)
        self.model.set_weights(first.get_weights())
        for variable, zero in zip(self.optimizer.weights, self.zero, strict=True):
            variable.assign(zero)
        # As η decays to 0, a mean epoch has Σ η_t = η · steps / 2.
        per_step = tried["strength"] / (tried["embedding_lr"] * self.steps / 2)
        for name, value in {**tried, "strength": per_step}.items():
            self.values[name].assign(value)
        for one in self.optimizer.optimizers[:2]:
            one.l2 = tried["strength"] if self.mode in ("coupled", "averaged") else 0.0
        loader = self.train_part(dataclasses.replace(self.config, seed=seed))
        batches = iter(loader.dataset(epochs=None))
        for _ in range(self.epochs * self.steps):
            self.step(batches)
        try:
            with self.optimizer.averages():
                return float(self.predictor.quality(self.parts[part]).auc)
        except NotFiniteError:
            return 0.0


def search(study: Study, number: int) -> Iterator[Found]:
    """What is found by these draws: all trials, then the best of them from other seeds."""
    first, closer = draws(number)
    trials: list[tuple[np.ndarray, float]] = []
    for trial in range(FIRST + CLOSER):
        if trial < FIRST:
            point = first[trial]
        else:
            best = max(trials[:FIRST], key=lambda one: one[1])[0]
            point = (best + WIDTH * (closer[trial - FIRST] - 0.5)).clip(0, 1)
        tried, begun = values(study.mode, point), time.perf_counter()
        auc = study.train(tried, number, "valid")
        trials.append((point, auc))
        seconds = round(time.perf_counter() - begun, 1)
        yield {"trial": trial, **tried, "valid_auc": auc, "seconds": seconds}
    tried = values(study.mode, max(trials, key=lambda one: one[1])[0])
    for seed in SEEDS:
        yield {"seed": seed, **tried, "auc": study.train(tried, seed, "test")}


def table(found: Sequence[Found]) -> str:
    """Test AUC in %, then differences from "coupled" of the same draws and seed ± their error."""
    ends, lines = [one for one in found if "seed" in one], []
    for name in dict.fromkeys(one["data"] for one in ends):
        aucs: dict[str, dict[tuple[int, int], float]] = {mode: {} for mode in MODES}
        for one in ends:
            if one["data"] == name:
                aucs[one["mode"]][one["search"], one["seed"]] = 100 * one["auc"]
        cells = [_mean_and_error(list(aucs[mode].values()), "{:.2f} ± {:.2f}") for mode in MODES]
        for mode in MODES[1:]:
            pairs = [auc - aucs["coupled"][key] for key, auc in aucs[mode].items()]
            cells.append(_mean_and_error(pairs, "{:+.2f} ± {:.2f}"))
        lines.append((name, *cells))
    return format_table(("data", *MODES, *(f"{mode} - coupled" for mode in MODES[1:])), lines)


def _mean_and_error(numbers: Sequence[float], text: str) -> str:
    error = statistics.stdev(numbers) / math.sqrt(len(numbers))
    return text.format(statistics.fmean(numbers), error)


def main() -> None:
    """One of the commands."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("record", type=Path)
    one.add_argument("name")
    one.add_argument("data", type=Path)
    one.add_argument("--batch-size", type=int, default=4096)
    one.add_argument("--epochs", type=int, default=3)
    one.add_argument("--search", type=int, default=1, help="number of the draws")
    commands.add_parser("table").add_argument("record", type=Path)
    options = parser.parse_args()
    if options.command == "table":
        lines = options.record.read_text(encoding="utf-8").splitlines()
        print(table([json.loads(line) for line in lines]))
        return
    data = PreparedData.open(options.data)
    for mode in MODES:
        own = {"data": options.name, "mode": mode, "search": options.search}
        study = Study(data, mode, options.batch_size, options.epochs)
        for found in search(study, options.search):
            print(own | found, flush=True)
            with options.record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(own | found) + "\n")


if __name__ == "__main__":
    main()
