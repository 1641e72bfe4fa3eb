# SPDX-License-Identifier: Apache-2.0
"""Synthetic click logs in Criteo's and Avazu's formats, with known click probabilities.

IDs follow a power law, fields have a few IDs to many, and values are missing. A click is drawn from
a planted probability: effects of single IDs, of pairs of IDs (dot products of hidden vectors, which
a linear model cannot learn), and weakly of numbers. So the best possible AUC and log loss are known
and written next to the log. They say nothing about accuracy on real logs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from merlin_cowclip.workflows.data.spec import AVAZU, CRITEO, DatasetSpec
from merlin_cowclip.workflows.errors import UserError, check_whole
from merlin_cowclip.workflows.folders import all_or_nothing, write_json

CHUNK_ROWS = 200_000  # drawn and written at a time: bounds the memory
CALIBRATION_ROWS = 100_000
BEST_AUC = 0.80  # of the planted probabilities, up to the luck of the draw
LATENT_DIM = 2  # of the hidden vectors whose dot products are the effects of pairs
# Shares of the logit's variance.
FIRST_ORDER, SECOND_ORDER, NUMBERS = 0.50, 0.46, 0.04


@dataclass(frozen=True)
class SyntheticTruth:
    """What `write_synthetic` planted; also in ``<file>.truth.json``.

    Args:
        dataset: "criteo" or "avazu".
        rows: number of rows.
        seed: random seed.
        cardinality: number of IDs that the largest field draws from.
        click_rate: share of rows with label 1.
        best_auc: AUC of the true probabilities on all rows. A part of the rows, such as a test
            split, differs by random variation.
        best_log_loss: mean log loss of the true probabilities, likewise.
    """

    dataset: str
    rows: int
    seed: int
    cardinality: int
    click_rate: float
    best_auc: float
    best_log_loss: float


class _Log(NamedTuple):
    """What a log looks like, by the names of its columns."""

    spec: DatasetSpec
    click_rate: float
    paired: Sequence[str]  # fields with hidden vectors: of medium size, so that they can be learned
    sizes: Mapping[str, float]  # a field draws from cardinality ** size IDs of 8 hex digits,
    texts: Mapping[str, str] = {}  # or these texts,
    first: Mapping[str, int] = {}  # or integers from here on
    missing: Mapping[str, float] = {}  # share of missing IDs
    numbers: Mapping[str, tuple[float, ...]] = {}  # median and spread, log-normal; share missing

    @property
    def ids(self) -> list[str]:
        """The fields that are drawn."""
        return [n for n in self.spec.categorical if n in self.sizes or n in self.texts]


# Sizes: logarithms of Criteo Kaggle's distinct IDs per field, over the largest one's.
_CRITEO_SIZES = (
    *(0.45, 0.39, 1.0, 0.91, 0.36, 0.20, 0.59, 0.40, 0.07, 0.71, 0.54, 0.99, 0.50),
    *(0.21, 0.60, 0.96, 0.14, 0.54, 0.48, 0.09, 0.98, 0.18, 0.17, 0.78, 0.29, 0.74),
)
_CRITEO_NUMBERS = (
    *((2, 1.2, 0.45), (12, 1.8, 0.0), (7, 1.3, 0.22), (5, 1.0, 0.22), (3000, 2.0, 0.03)),
    *((35, 1.4, 0.22), (4, 1.4, 0.04), (8, 0.9, 0.0), (40, 1.3, 0.04), (1, 0.6, 0.45)),
    *((2, 0.9, 0.04), (1, 1.0, 0.77), (5, 1.0, 0.22)),
)
_LOGS = {
    "criteo": _Log(
        CRITEO,
        click_rate=0.25,
        paired=("C2", "C5", "C8", "C14", "C25"),
        sizes=dict(zip(CRITEO.categorical, _CRITEO_SIZES, strict=True)),
        missing={"C3": 0.03, "C4": 0.03, "C6": 0.12, "C19": 0.44, "C20": 0.44, "C22": 0.76},
        numbers=dict(zip(CRITEO.continuous, _CRITEO_NUMBERS, strict=True)),
    ),
    "avazu": _Log(  # hour is not drawn: it runs through ten days, as in the real file
        AVAZU,
        click_rate=0.17,
        paired=("site_category", "app_category", "app_domain", "C17", "C21"),
        sizes={
            **{"site_id": 0.55, "site_domain": 0.58, "site_category": 0.21},
            **{"app_id": 0.60, "app_domain": 0.42, "app_category": 0.23},
            **{"device_id": 0.95, "device_ip": 1.0, "device_model": 0.59},
            **{"C14": 0.51, "C17": 0.42, "C19": 0.29, "C20": 0.36, "C21": 0.28},
        },
        texts={
            "C1": "1005 1002 1010 1012 1007 1001 1008",
            "banner_pos": "0 1 7 2 4 5 3",
            "device_type": "1 0 4 5 2",
            "device_conn_type": "0 2 3 5",
            "C15": "320 300 216 728 120 1024 480 768",
            "C16": "50 250 36 480 90 20 768 320 1024",
            "C18": "0 3 2 1",
        },
        first={"C14": 375, "C17": 112, "C19": 33, "C20": 100_000, "C21": 1},
    ),
}
_AVAZU_HOURS = [f"1410{day}{hour:02d}" for day in range(21, 31) for hour in range(24)]


def write_synthetic(
    dataset: str,
    path: str | Path,
    *,
    rows: int,
    seed: int = 0,
    cardinality: int = 100_000,
) -> SyntheticTruth:
    """Write a synthetic raw log, and its truth to ``<path>.truth.json``.

    Args:
        dataset: "criteo" (tabs, no header) or "avazu" (commas, header).
        path: the file to write, gzipped if it ends in .gz; must not exist.
        rows: number of rows.
        seed: the same seed and sizes give the same bytes.
        cardinality: number of IDs that the largest field draws from; the others scale with it.

    Returns:
        What was planted, with the best AUC and log loss that a model can reach.

    Raises:
        UserError: an unknown data set, too few rows or IDs, or a file exists.
    """
    from sklearn.metrics import log_loss, roc_auc_score

    path = Path(path)
    if dataset not in _LOGS:
        raise UserError(f"dataset must be one of 'criteo', 'avazu'. Received: {dataset!r}")
    check_whole("rows", rows, 100)
    check_whole("seed", seed, 0)
    check_whole("cardinality", cardinality, 10)
    log, labels, probabilities = _LOGS[dataset], [], []
    spec = log.spec
    with (
        all_or_nothing(path, "file") as log_file,
        all_or_nothing(path.with_name(f"{path.name}.truth.json"), "file") as truth_file,
    ):
        world = _World(log, seed, cardinality)
        names = spec.columns or ("id", spec.label, *spec.categorical)
        with pa.output_stream(str(log_file)) as sink:
            if spec.header:
                sink.write((spec.separator.join(names) + "\n").encode())
            for chunk, start in enumerate(range(0, rows, CHUNK_ROWS)):
                n = min(CHUNK_ROWS, rows - start)
                random = np.random.default_rng([seed, 2, chunk])
                columns, effects = world.draw(n, random)
                probability = _sigmoid(world.factor * world.effect(effects) + world.intercept)
                labels.append((random.random(n) < probability).astype(np.int8))
                probabilities.append(probability.astype(np.float32))
                columns[spec.label] = pa.array(labels[-1])
                if spec is AVAZU:
                    hours = (np.arange(start, start + n) * len(_AVAZU_HOURS)) // rows
                    columns["hour"] = pa.array(_AVAZU_HOURS).take(pa.array(hours))
                    columns["id"] = pa.array(random.integers(10**16, 2**64 - 1, n, dtype=np.uint64))
                sink.write(_lines([columns[name] for name in names], spec.separator))
        clicks, probability = np.concatenate(labels), np.concatenate(probabilities)
        auc = float(roc_auc_score(clicks, probability))
        loss = float(log_loss(clicks, probability.astype(np.float64), labels=[0, 1]))
        rate = float(clicks.mean())
        truth = SyntheticTruth(dataset, rows, seed, cardinality, rate, auc, loss)
        write_json(truth_file, dataclasses.asdict(truth))
    return truth


def _lines(columns: Sequence[pa.Array], separator: str) -> bytes:
    """One line per row, nothing quoted (which Arrow's own CSV writer can from version 11 on)."""
    cells = [column.cast(pa.string()) for column in columns]
    nulls = {"null_handling": "replace", "null_replacement": ""}
    lines = pc.binary_join_element_wise(*cells, separator, **nulls).to_pylist()
    return "\n".join([*lines, ""]).encode()


# A field's texts, (n,); their cumulated shares, (n,); the weights of them and of a missing id,
# (n + 1,); and the vectors of a paired field, (n + 1, LATENT_DIM).
_Planted = tuple[pa.Array, np.ndarray, np.ndarray, np.ndarray | None]


class _World:
    """The planted truth."""

    def __init__(self, log: _Log, seed: int, cardinality: int) -> None:
        self.log = log
        random = np.random.default_rng([seed, 1])
        self.planted = [self._plant(i, cardinality, random) for i in range(len(log.ids))]
        self.slopes = random.normal(size=len(log.numbers))
        # Unit variance for each kind of effect, then the whole to the wanted AUC and click rate.
        effects = self.draw(CALIBRATION_ROWS, np.random.default_rng([seed, 3]))[1]
        self.means, deviations = effects.mean(axis=1), effects.std(axis=1)
        shares = np.sqrt([FIRST_ORDER, SECOND_ORDER, NUMBERS if log.numbers else 0.0])
        self.scales = np.where(deviations > 0, shares / np.maximum(deviations, 1e-12), 0.0)
        self.factor, self.intercept = _calibrate(self.effect(effects), log.click_rate)

    def _plant(self, number: int, cardinality: int, random: np.random.Generator) -> _Planted:
        """How often the ids of a field occur, and what they do to a click."""
        log, name = self.log, self.log.ids[number]
        values: Any = log.texts.get(name, "").split()
        size = len(values) or max(3, round(cardinality ** log.sizes[name]))
        if name in log.first:
            values = np.arange(log.first[name], log.first[name] + size)
        elif not values:
            values = _hex(number, size)
        # Zipf, flattened at the head so that no single id is the whole field.
        share = (np.arange(size) + 3.0) ** -random.uniform(1.05, 1.3)
        share /= share.sum()
        # An id too rare to be learnt has a small effect, else no model could near the best AUC.
        learnable = share / (share + 3e-4)
        weights, vectors = random.normal(size=size + 1) * np.append(learnable, 1.0), None
        if name in log.paired:
            vectors = random.normal(size=(size + 1, LATENT_DIM))
            vectors *= np.append(learnable, 0.0)[:, None]
            # Centred: a pair's effect is none of either id alone, so linear models miss it.
            vectors[:-1] -= share @ vectors[:-1]
        return pa.array(values).cast(pa.string()), np.cumsum(share), weights, vectors

    def effect(self, effects: np.ndarray) -> np.ndarray:
        """The sum of the effects of each kind, (3, n), scaled to their shares."""
        return self.scales @ (effects - self.means[:, None])

    def draw(self, n: int, random: np.random.Generator) -> tuple[dict[str, pa.Array], np.ndarray]:
        """The columns of ``n`` rows, and their effects by kind, (3, n)."""
        columns, effects = {}, np.zeros((3, n))
        total, own = np.zeros((n, LATENT_DIM)), np.zeros(n)
        for name, planted in zip(self.log.ids, self.planted, strict=True):
            texts, cumulative, weights, vectors = planted
            places = np.searchsorted(cumulative, random.random(n))
            places = np.minimum(places, len(texts) - 1)  # the sum of shares may end below 1
            if name in self.log.missing:
                places[random.random(n) < self.log.missing[name]] = len(texts)
            columns[name] = texts.take(pa.array(places, mask=places == len(texts)))
            effects[0] += weights[places]
            if vectors is not None:
                total += vectors[places]
                own += (vectors[places] ** 2).sum(axis=1)
        # Over all pairs, the sum of dot products is (|sum|² - sum of |.|²) / 2 (Rendle 2010).
        effects[1] = ((total**2).sum(axis=1) - own) / 2
        numbers = self.log.numbers.items()
        for slope, (name, (median, spread, missing)) in zip(self.slopes, numbers, strict=True):
            normal = random.normal(size=n)
            values = np.floor(median * np.exp(spread * normal)) - 3 * (name == "I2")
            gone = random.random(n) < missing
            effects[2] += np.where(gone, 0.0, slope * normal)
            columns[name] = pa.array(values, mask=gone).cast(pa.int64())
        return columns, effects


def _hex(number: int, size: int) -> np.ndarray:
    """``size`` distinct texts of 8 hex digits that look like hashes; another set per field."""
    # Each step maps 32-bit integers one to one (an odd factor; a shifted xor), so none repeats.
    x = np.arange(size, dtype=np.uint32) + np.uint32((number * 0x9E3779B9) % 2**32)
    for factor, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    x ^= x >> np.uint32(16)
    return np.frombuffer(x.astype(">u4").tobytes().hex().encode(), "S8").astype("U8")


def _calibrate(effect: np.ndarray, click_rate: float) -> tuple[float, float]:
    """(factor, intercept) so that sigmoid(factor · effect + intercept) has both wanted values."""
    effect = np.sort(effect)

    def intercept_for(factor: float) -> float:
        logits = factor * effect
        return _bisect(lambda b: _sigmoid(logits + b).mean() < click_rate, -30.0, 30.0, 40)

    def expected_auc(factor: float) -> float:
        p = _sigmoid(factor * effect + intercept_for(factor))
        below = np.cumsum(1 - p) - (1 - p)  # expected negatives that score lower
        return float((p * below).sum() / (p.sum() * (1 - p).sum()))

    factor = _bisect(lambda factor: expected_auc(factor) < BEST_AUC, 0.0, 10.0, 20)
    return factor, intercept_for(factor)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _bisect(is_less: Callable[[float], Any], low: float, high: float, steps: int) -> float:
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_less(middle) else (low, middle)
    return (low + high) / 2
