"""The pictures and the table of docs/why.md, from a log with a heavy tail.

How often ids occur; in how many updates of an epoch a frequent and a rare one are, as the batch
grows; what CowClip's clip does to their gradients, and to all rows by how often their id occurs.

    python benchmarks/heavy_tailed_log.py log.parquet
    merlin-cowclip prepare benchmarks/heavy_tailed.toml log.parquet --out data
    python benchmarks/why_it_works.py data docs
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from merlin_cowclip.models import deepfm, embeddings_of
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters, scale
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.scaling import recipe
from merlin_cowclip.workflows import Loader, PreparedData
from merlin_cowclip.workflows.study.pages import Line, line_plot

BASE, BATCH, EPOCHS, SEED = 32, 4096, 3, 1234
SIZES = [2**k for k in range(5, 18)]
FREQUENT, RARE = "s0", "r0"  # fields: of each an id is followed
SEEN = 5  # times that the rare one occurs in the training part
BINS = ((1000, np.inf), (100, 1000), (30, 100), (10, 30), (1, 10))  # occurrences, from and below
EVERY = 30  # updates, of the frequent one in the picture


class Followed(NamedTuple):
    """An id: its field, its number there, and how often it occurs in the training part."""

    field: str
    id: int
    count: int


class Rows(NamedTuple):
    """The different rows of a batch: numbers, samples with each, ‖g‖ with L2, and its bound."""

    rows: np.ndarray
    counts: np.ndarray
    norms: np.ndarray
    bounds: np.ndarray


def main(data: PreparedData, out: Path) -> None:
    """Write the pictures and print the numbers."""
    occurrences = {field: counts_of(data, field) for field in data.spec.categorical}
    followed = [
        nearest(FREQUENT, occurrences[FREQUENT], np.inf),
        nearest(RARE, occurrences[RARE], SEEN),
    ]
    (out / "why-frequencies.svg").write_text(frequencies(occurrences, data), encoding="utf-8")
    loader = Loader(data, batch_size=BATCH, seed=SEED)
    (out / "why-updates.svg").write_text(updates(loader, followed), encoding="utf-8")
    (out / "why-clip.svg").write_text(clip(loader, followed, occurrences), encoding="utf-8")


def counts_of(data: PreparedData, field: str) -> np.ndarray:
    """How often each id of a field occurs in the training part, by the id."""
    return data.counts(field).set_index("id")["count"].sort_index().to_numpy()


def nearest(field: str, counts: np.ndarray, wanted: float) -> Followed:
    """The id that occurs most nearly so often."""
    far = -counts if np.isinf(wanted) else np.abs(counts - wanted)
    number = int(np.argmin(far))
    return Followed(field, number, int(counts[number]))


def frequencies(occurrences: dict[str, np.ndarray], data: PreparedData) -> str:
    """P(id) by rank, for a field of few ids and one of many."""
    rows = data.rows["train"]
    lines: dict[str, Line] = {}
    for field in (FREQUENT, RARE):
        seen = np.sort(occurrences[field])[::-1]
        seen = seen[seen > 0]
        at = np.unique(np.geomspace(1, len(seen), 60).astype(int))
        lines[f"{field}, {len(seen):,} ids"] = [(r, seen[r - 1] / rows, 0.0) for r in at]
    longest = max(len(counts) for counts in occurrences.values())
    for size in (BASE, BATCH):
        lines[f"once in a batch of {size:,}"] = [(1, 1 / size, 0.0), (longest, 1 / size, 0.0)]
        seen = np.concatenate([counts[counts > 0] for counts in occurrences.values()])
        rare = (seen / rows < 1 / size).mean()
        print(f"rarer than one in {size:,}: {rare:.1%} of {len(seen):,} ids")
    return line_plot(lines, "rank of the id", "P(id)", logarithmic=True, logarithmic_x=True)


def updates(loader: Loader, followed: list[Followed]) -> str:
    """In how many updates of the first epoch each id is, counted in its order of rows."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    places: dict[Followed, list[np.ndarray]] = {one: [] for one in followed}
    first = 0
    for features, labels in loader.batches(0):
        for one in followed:
            places[one].append(first + np.flatnonzero(features[one.field].ravel() == one.id))
        first += len(labels)
    for one, name in zip(followed, ("frequent", "rare"), strict=True):
        place = np.concatenate(places[one])
        held = [len(np.unique(place // size)) for size in SIZES]
        told = ", ".join(f"{size:,}: {h:,}" for size, h in zip(SIZES, held, strict=True))
        print(f"{name} id, {one.count:,} of {first:,} rows; updates that hold it: {told}")
        lines[f"{name} id, {one.count:,} rows"] = [
            (s, h, 0.0) for s, h in zip(SIZES, held, strict=True)
        ]
    return line_plot(lines, "batch size", "updates an epoch", logarithmic=True, logarithmic_x=True)


def clip(loader: Loader, followed: list[Followed], occurrences: dict[str, np.ndarray]) -> str:
    """‖g‖ of both ids before and after the clip, update by update; prints the table of all rows."""
    tuned = recipe("cowclip").replace(batch_size=BASE, dense_lr=3e-4, embedding_lr=1e-3, l2=1e-5)
    found: dict[Followed, list[tuple[int, float, float]]] = {one: [] for one in followed}
    in_bin = np.zeros((len(BINS), 2), np.int64)  # rows of all batches, those that were clipped
    for update, (rows, first) in enumerate(trained(loader, scale(tuned, to=BATCH, rule="cowclip"))):
        seen = np.concatenate([occurrences[field] for field in first])[rows.rows]
        shortened = rows.norms > rows.bounds
        for i, (least, below) in enumerate(BINS):
            inside = (seen >= least) & (seen < below)
            in_bin[i] += inside.sum(), (inside & shortened).sum()
        for one in followed:
            for at in np.flatnonzero(rows.rows == first[one.field] + one.id):
                found[one].append((update, rows.norms[at], rows.bounds[at]))
    print("| occurrences of the id | rows of all batches | clipped |\n|---:|---:|---:|")
    for (least, below), (all_rows, clipped) in zip(BINS, in_bin, strict=True):
        span = f"{least:,} and more" if np.isinf(below) else f"{least} to {below - 1:.0f}"
        print(f"| {span} | {all_rows:,} | {clipped / max(all_rows, 1):.2%} |")
    lines: dict[str, Line] = {}
    for one, name in zip(followed, ("frequent", "rare"), strict=True):
        points = found[one][::EVERY] if name == "frequent" else found[one]
        short = [(u, g, b) for u, g, b in found[one] if g > b]
        print(f"{name} id: clipped in {len(short)} of the {len(found[one])} updates that hold it")
        lines[f"{name} id: bound"] = [(u, b, 0.0) for u, _, b in points]
        lines[f"{name} id: ‖g‖"] = [(u, g, 0.0) for u, g, _ in points]
        if short:
            lines[f"{name} id: ‖g‖ clipped"] = [(u, min(g, b), 0.0) for u, g, b in points]
    return line_plot(lines, "update", "norm", logarithmic=True)


def trained(loader: Loader, values: Hyperparameters) -> Iterator[tuple[Rows, dict[str, int]]]:
    """Train DeepFM; after each update what its rows were, and the first row of each field."""
    tf.keras.utils.set_random_seed(SEED)
    model = deepfm(loader.data.schema, embedding_dim=4, mlp=(64, 64), stddev=values.init_stddev)
    optimizer = CowClipOptimizer.for_model(model, values, steps_per_epoch=len(loader))
    model.compile(optimizer=optimizer)
    features, _ = next(iter(loader))
    model(features, training=True)
    layer = embeddings_of(model)["embeddings"]
    (spec,) = layer.table_specs()
    variables = model.trainable_variables
    place = next(i for i, variable in enumerate(variables) if variable is spec.get_variable())

    @tf.function(autograph=False)
    def step(features: Any, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            losses = tf.keras.losses.binary_crossentropy(labels, model(features, training=True))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, variables)
        rows, at, counts = tf.unique_with_counts(gradients[place].indices)
        sums = tf.math.unsorted_segment_sum(gradients[place].values, at, tf.size(rows))
        weights = tf.gather(variables[place], rows)
        norms = tf.norm(sums + 2.0 * values.l2 * weights, axis=1)
        least = tf.maximum(values.clip_ratio * tf.norm(weights, axis=1), values.clip_floor)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return rows, counts, norms, tf.cast(counts, tf.float32) * least

    first = dict(zip(layer.fields, spec.row_offsets, strict=False))
    for features, labels in loader.dataset(epochs=EPOCHS):
        yield Rows(*(tensor.numpy() for tensor in step(features, labels))), first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="the prepared log")
    parser.add_argument("out", type=Path, help="the folder of the pictures")
    arguments = parser.parse_args()
    sys.exit(main(PreparedData.open(arguments.data), arguments.out))
