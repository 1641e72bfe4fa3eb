# SPDX-License-Identifier: Apache-2.0
"""Synthetic click logs in Criteo's and Avazu's formats, with known click probabilities.

Ids follow a power law, fields have a few ids to many, and values are missing. A click is drawn from
a planted probability: effects of single ids, of pairs of ids (dot products of hidden vectors, which
a linear model cannot learn), and weakly of numbers. They say nothing about accuracy on real logs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
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
BEST_AUC = 0.80  # of the planted probabilities, up to random variation
LATENT_DIM = 2  # of the hidden vectors
SHARES = (0.50, 0.46, 0.04)  # of the logit's variance: single ids, pairs, numbers


@dataclasses.dataclass(frozen=True)
class SyntheticTruth:
    """The arguments of `write_synthetic`, and what it planted; also in ``<path>.truth.json``."""

    dataset: str
    rows: int
    seed: int
    cardinality: int
    click_rate: float  # share of rows with label 1
    best_auc: float  # of the true probabilities on all rows; a sample of the rows differs by chance
    best_log_loss: float  # likewise


class _Log(NamedTuple):
    spec: DatasetSpec
    click_rate: float
    # Field: its texts, p for cardinality ** p ids of 8 hex digits, or (p, n) for integers from n on
    fields: Mapping[str, Any]
    paired: Sequence[str]  # fields with hidden vectors: of medium size, so that they can be learned
    missing: Mapping[str, float] = {}  # share of missing ids
    numbers: Sequence[tuple[float, float, float]] = ()  # log-normal: median, spread; share missing


# Sizes: logarithms of Criteo Kaggle's distinct ids per field, over the largest one's.
_CRITEO_SIZES = (
    *(0.45, 0.39, 1.0, 0.91, 0.36, 0.20, 0.59, 0.40, 0.07, 0.71, 0.54, 0.99, 0.50),
    *(0.21, 0.60, 0.96, 0.14, 0.54, 0.48, 0.09, 0.98, 0.18, 0.17, 0.78, 0.29, 0.74),
)
_CRITEO = _Log(
    *(CRITEO, 0.25, dict(zip(CRITEO.categorical, _CRITEO_SIZES, strict=True))),
    paired=("C2", "C5", "C8", "C14", "C25"),
    missing={"C3": 0.03, "C4": 0.03, "C6": 0.12, "C19": 0.44, "C20": 0.44, "C22": 0.76},
    numbers=(
        *((2, 1.2, 0.45), (12, 1.8, 0.0), (7, 1.3, 0.22), (5, 1.0, 0.22), (3000, 2.0, 0.03)),
        *((35, 1.4, 0.22), (4, 1.4, 0.04), (8, 0.9, 0.0), (40, 1.3, 0.04), (1, 0.6, 0.45)),
        *((2, 0.9, 0.04), (1, 1.0, 0.77), (5, 1.0, 0.22)),
    ),
)
_AVAZU_FIELDS = {  # hour is not drawn: it runs through ten days, as in the real file
    **{"C1": "1005 1002 1010 1012 1007 1001 1008", "banner_pos": "0 1 7 2 4 5 3"},
    **{"site_id": 0.55, "site_domain": 0.58, "site_category": 0.21, "app_id": 0.60},
    **{"app_domain": 0.42, "app_category": 0.23, "device_id": 0.95, "device_ip": 1.0},
    **{"device_model": 0.59, "device_type": "1 0 4 5 2", "device_conn_type": "0 2 3 5"},
    **{"C14": (0.51, 375), "C15": "320 300 216 728 120 1024 480 768"},
    **{"C16": "50 250 36 480 90 20 768 320 1024", "C17": (0.42, 112), "C18": "0 3 2 1"},
    **{"C19": (0.29, 33), "C20": (0.36, 100_000), "C21": (0.28, 1)},
}
_AVAZU_PAIRED = ("site_category", "app_category", "app_domain", "C17", "C21")
_AVAZU_HOURS = [f"1410{day}{hour:02d}" for day in range(21, 31) for hour in range(24)]
_LOGS = {"criteo": _CRITEO, "avazu": _Log(AVAZU, 0.17, _AVAZU_FIELDS, _AVAZU_PAIRED)}


def write_synthetic(
    dataset: str, path: str | Path, *, rows: int, seed: int = 0, cardinality: int = 100_000
) -> SyntheticTruth:
    """Write a synthetic raw log, and its truth to ``<path>.truth.json``.

    The same arguments give the same bytes. Raises UserError for a bad argument.

    Args:
        dataset: "criteo" (tabs, no header) or "avazu" (commas, header).
        path: the file to write, gzipped if it ends in .gz; must not exist.
        rows: number of rows, at least 100.
        seed: random seed.
        cardinality: number of ids that the largest field draws from; the others scale with it.
    """
    from sklearn.metrics import log_loss, roc_auc_score

    path = Path(path)
    if dataset not in _LOGS:
        raise UserError(f"dataset must be one of 'criteo', 'avazu'. Received: {dataset!r}")
    check_whole("rows", rows, 100)
    check_whole("seed", seed, 0)
    check_whole("cardinality", cardinality, 10)
    spec, labels, probabilities = _LOGS[dataset].spec, [], []
    names = spec.columns or ("id", spec.label, *spec.categorical)
    with (
        all_or_nothing(path, "file") as log_file,
        all_or_nothing(path.with_name(f"{path.name}.truth.json"), "file") as truth_file,
    ):
        world = _World(_LOGS[dataset], seed, cardinality)
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
                # Nothing is quoted, which Arrow's own CSV writer can from version 11 on.
                cells = [columns[name].cast(pa.string()).fill_null("") for name in names]
                lines = pc.binary_join_element_wise(*cells, spec.separator).to_pylist()
                sink.write("\n".join([*lines, ""]).encode())
        clicks, probability = np.concatenate(labels), np.concatenate(probabilities)
        auc = float(roc_auc_score(clicks, probability))
        loss = float(log_loss(clicks, probability.astype(np.float64), labels=[0, 1]))
        rate = float(clicks.mean())
        truth = SyntheticTruth(dataset, rows, seed, cardinality, rate, auc, loss)
        write_json(truth_file, dataclasses.asdict(truth))
    return truth


class _World:
    """The planted truth: how often the ids of a field occur, and what they do to a click.

    ``planted`` has for each field its texts, (n,), their cumulated shares, the weights of texts and
    a missing id, (n + 1,), and for a paired field their hidden vectors.
    """

    def __init__(self, log: _Log, seed: int, cardinality: int) -> None:
        self.log, random = log, np.random.default_rng([seed, 1])
        self.planted: list[tuple[Any, ...]] = []
        for number, (name, given) in enumerate(log.fields.items()):
            if isinstance(given, str):
                values: Any = given.split()
            else:
                power, first = given if isinstance(given, tuple) else (given, None)
                size = max(3, round(cardinality**power))
                values = _hex(number, size) if first is None else np.arange(first, first + size)
            # Zipf, flattened at the head so that no single id is the whole field.
            share = (np.arange(len(values)) + 3.0) ** -random.uniform(1.05, 1.3)
            share /= share.sum()
            # An id too rare to be learned has a small effect, else no model could near BEST_AUC.
            learnable = share / (share + 3e-4)
            weights = random.normal(size=len(values) + 1) * np.append(learnable, 1.0)
            vectors = None
            if name in log.paired:
                vectors = random.normal(size=(len(values) + 1, LATENT_DIM))
                vectors *= np.append(learnable, 0.0)[:, None]
                # Centred: a pair's effect is none of either id alone, so linear models miss it.
                vectors[:-1] -= share @ vectors[:-1]
            texts = pa.array(values).cast(pa.string())
            self.planted.append((texts, np.cumsum(share), weights, vectors))
        self.slopes = random.normal(size=len(log.numbers))
        # Unit variance for each kind of effect, then the whole to the wanted AUC and click rate.
        effects = self.draw(CALIBRATION_ROWS, np.random.default_rng([seed, 3]))[1]
        self.means, deviations = effects.mean(axis=1), effects.std(axis=1)
        self.scales = np.sqrt(SHARES) / np.where(deviations > 0, deviations, np.inf)
        self.factor, self.intercept = _calibrate(self.effect(effects), log.click_rate)

    def effect(self, effects: np.ndarray) -> np.ndarray:
        """The sum of the effects of each kind, (3, n), scaled to their shares."""
        return self.scales @ (effects - self.means[:, None])

    def draw(self, n: int, random: np.random.Generator) -> tuple[dict[str, pa.Array], np.ndarray]:
        """The columns of ``n`` rows, and their effects by kind, (3, n)."""
        columns, effects = {}, np.zeros((3, n))
        total, own = np.zeros((n, LATENT_DIM)), np.zeros(n)
        for name, planted in zip(self.log.fields, self.planted, strict=True):
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
        names = self.log.spec.continuous
        for slope, name, number in zip(self.slopes, names, self.log.numbers, strict=True):
            (median, spread, missing), normal = number, random.normal(size=n)
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
        x = (x ^ x >> np.uint32(shift)) * np.uint32(factor)
    x ^= x >> np.uint32(16)
    return np.frombuffer(x.astype(">u4").tobytes().hex().encode(), "S8").astype("U8")


def _calibrate(effect: np.ndarray, click_rate: float) -> tuple[float, float]:
    """(factor, intercept) so that sigmoid(factor · effect + intercept) has both wanted values."""
    effect = np.sort(effect)

    def intercept_for(factor: float) -> float:
        logits = factor * effect
        return _bisect(lambda b: _sigmoid(logits + b).mean() < click_rate, -30.0, 30.0, 40)

    def has_low_auc(factor: float) -> bool:
        p = _sigmoid(factor * effect + intercept_for(factor))
        below = np.cumsum(1 - p) - (1 - p)  # expected negatives that score lower
        return float((p * below).sum() / (p.sum() * (1 - p).sum())) < BEST_AUC

    factor = _bisect(has_low_auc, 0.0, 10.0, 20)
    return factor, intercept_for(factor)


def _sigmoid(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logits))


def _bisect(is_less: Callable[[float], Any], low: float, high: float, steps: int) -> float:
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_less(middle) else (low, middle)
    return (low + high) / 2
