"""Scaling rules by row, after how often its id occurs: tried in docs/studies.md, where none wins.

Trains DeepFM by one of them at a large batch, from some seeds, and prints the test AUC of each,
mean and deviation. Dense weights have √s η, one epoch of warm-up, tables N(0, 1e-2), no gradient is
clipped.

    python benchmarks/rules_by_row.py samples data --epochs 6 --dense-lr 3e-4 --embedding-lr 1e-3 \
      --l2 1e-8
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.plugins.clipping import with_lengths
from merlin_cowclip.plugins.rates import TablePart
from merlin_cowclip.plugins.scaling import recipe
from merlin_cowclip.plugins.tables import TableSpec
from merlin_cowclip.workflows import PreparedData
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.evaluation import EVALUATION_BATCH, Predictor
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.rebuilding import compile_by, network
from merlin_cowclip.workflows.training.reproducibility import seeded

WINDOW = 1000.0  # 1 / (1 - β₂), steps


class Factors(NamedTuple):
    """What the base's η and λ are multiplied by for each of V rows; whether steps are clipped."""

    rate: np.ndarray
    l2: np.ndarray
    clips_steps: bool = False


def by_samples(c: np.ndarray, s: float) -> Factors:
    """A sample moves a row no further than at the base: √s, or fewer samples than that, or 1.

    So rare ids have CowClip's values (η, sλ), frequent ones those of √-scaling (√s η, √s λ).

    Args:
      c: samples of a batch that are expected to hold the id, V.
      s: the batch, in batches of the base.
    """
    rate = np.clip(c, 1.0, s**0.5)
    return Factors(rate, s / rate)


def preserved(c: np.ndarray, s: float) -> Factors:
    """What keeps the drift of a row by Adam in an epoch, and its decay, where noise prevails.

    An id of c samples is in a share P = 1 - exp(-c) of the batches; a step's drift is η times
    D(c) = √(c·P·(1 - β₂^(1/P)) / (1 - β₂)), times a sample's signal over its noise: √c for what is
    seen within 1 / (1 - β₂) steps, less where v decays between two appearances.
    """

    def drift(c: np.ndarray) -> np.ndarray:
        share = -np.expm1(-c)
        return np.sqrt(c * share * -np.expm1(-1 / (share * WINDOW)) * WINDOW)

    c = np.maximum(c, 1e-9)  # what never occurs
    rate = s * drift(c / s) / drift(c)
    return Factors(rate, s**0.5 / rate)


def clipped_steps(c: np.ndarray, s: float) -> Factors:
    """√-scaling, with steps of at most √(s·d)·η·max(‖w‖, σ√d), after Adam."""
    root = np.full_like(c, s**0.5)
    return Factors(root, root, clips_steps=True)


RULES: dict[str, Callable[[np.ndarray, float], Factors]] = {
    "samples": by_samples,
    "preserved": preserved,
    "clipped-steps": clipped_steps,
}


class RowWisePart(TablePart):
    """The exact mode without a gradient clip, of rows that have an η and a λ each."""

    factors: Callable[[TableSpec], Factors]
    base: Hyperparameters

    def _resource_apply_sparse(self, grad: Any, var: tf.Variable, indices: tf.Tensor) -> Any:
        spec = self._specs[var.ref()]
        by_row = self.factors(spec)
        rows = tf.convert_to_tensor(var)
        g = self._whole_gradient(grad, var, indices) + 2 * self.base.l2 * _column(by_row.l2) * rows
        m, v = self.get_slot(var, "m"), self.get_slot(var, "v")
        beta_1, beta_2 = (self._get_hyper(name, tf.float32) for name in ("beta_1", "beta_2"))
        t, eta = tf.cast(self.iterations + 1, tf.float32), self._decayed_lr(tf.float32)
        new_m = m.assign_add((g - m) * (1.0 - beta_1))
        new_v = v.assign_add((tf.square(g) - v) * (1.0 - beta_2))
        rate = eta * tf.sqrt(1.0 - beta_2**t) / (1.0 - beta_1**t) * _column(by_row.rate)
        step = rate * new_m / (tf.sqrt(new_v) + self.epsilon)
        if by_row.clips_steps:
            root, norms = spec.width**0.5, tf.norm(step, axis=1)
            least = self.base.init_stddev * root
            longest = float(by_row.rate[0]) * root * eta * tf.maximum(tf.norm(rows, axis=1), least)
            step = with_lengths(step, norms, tf.minimum(norms, longest))
        return var.assign_sub(step, read_value=False)


def _column(values: np.ndarray) -> tf.Tensor:
    return tf.constant(values[:, np.newaxis], tf.float32)


def auc(data: PreparedData, config: TrainConfig, rule: str, s: float) -> float:
    """The test AUC, %, of one training."""
    samples = {
        name: data.counts(name)["count"].to_numpy() * config.batch_size / data.rows["train"]
        for name in data.spec.ids
    }

    def factors(spec: TableSpec) -> Factors:
        ranges = (sum(samples[field] for field in name.split("+")) for name in spec.range_names)
        return RULES[rule](np.concatenate(list(ranges)), s)

    loader = Loader(data, "train", batch_size=config.batch_size, seed=config.seed)
    tf.keras.backend.clear_session()
    with seeded(config.seed, deterministic=True):
        model = network(config, data.schema)
        updates = loader.rows // config.batch_size
        optimizer = compile_by(config, model, updates=updates, batches=len(loader))
        for part in optimizer.optimizers[:2]:
            part.__class__ = RowWisePart
            part.factors, part.base, part.l2 = factors, config.hyperparameters, 0.0
        model(loader.peek()[0])
        update = model.make_train_function()
        batches = iter(loader.dataset(epochs=config.epochs))
        for _ in range(config.epochs * len(loader)):
            update(batches)
        test = Loader(data, "test", batch_size=EVALUATION_BATCH)
        return 100 * Predictor(model).quality(test).auc


def main() -> None:
    """Print each seed's AUC, mean and deviation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rule", choices=RULES)
    parser.add_argument("data", type=Path, help="a prepared folder")
    parser.add_argument("--base-batch-size", type=int, default=32, help="(32)")
    parser.add_argument("--batch-size", type=int, default=4096, help="(4096)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1234, 1235, 1236])
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--mlp", type=int, nargs="+", default=[128, 128, 128])
    parser.add_argument("--embedding-dim", type=int, default=10, help="(10)")
    for name in ("dense-lr", "embedding-lr", "l2"):
        parser.add_argument(f"--{name}", type=float, required=True, help="at the base")
    parser.add_argument("--schedule", help="of all rates, as 'linear'")
    given = parser.parse_args()
    s = given.batch_size / given.base_batch_size
    base = recipe("cowclip").replace(
        batch_size=given.batch_size,
        dense_lr=given.dense_lr * s**0.5,
        embedding_lr=given.embedding_lr,
        l2=given.l2,
        clip=None,
    )
    data, aucs = PreparedData.open(given.data), []
    for seed in given.seeds:
        config = TrainConfig(
            rule="none",
            base=base,
            batch_size=given.batch_size,
            epochs=given.epochs,
            seed=seed,
            mlp=given.mlp,
            embedding_dim=given.embedding_dim,
            dense_schedule=given.schedule,
            embedding_schedule=given.schedule,
        )
        aucs.append(auc(data, config, given.rule, s))
        print(f"{given.rule}, seed {seed}: test AUC {aucs[-1]:.3f} %", flush=True)
    if len(aucs) > 1:
        print(f"{given.rule}: {statistics.fmean(aucs):.3f} ± {statistics.stdev(aucs):.3f}")


if __name__ == "__main__":
    main()
