"""Small models for serving: what rows of rare ids hold, and what AUC costs without them.

Most rows of a table are of ids that hardly occur. Those of the last p % of occurrences are left
out: their ids are answered as unknown ones, or by their hash bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from merlin_cowclip.workflows.data.counts import read_counts
from merlin_cowclip.workflows.data.prepare.statistics import PADDING, UNKNOWN, hash_bucket
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import Notice, UserError, quoted
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.runs import Run, identity_of, inputs_of

if TYPE_CHECKING:
    from merlin_cowclip.plugins._tensorflow import mm


@dataclass(frozen=True, eq=False)
class RareIds:
    """The ids of the last p % of all occurrences in the training part, of all fields together.

    Attributes:
      percent: p.
      most: how often the most frequent of them occurs. Some that occur as often may stay, by lot
        (with a seed of 0): they do not fit in p %.
      occurrences: of these ids, as a share of all.
      kept: by field the ids that stay, rising.
      answered_as: by field, for each id the one in whose place it is looked up: itself, or the
        unknown one.
    """

    percent: float
    most: int
    occurrences: float
    kept: Mapping[str, np.ndarray]
    answered_as: Mapping[str, np.ndarray]

    @property
    def renumbered(self) -> dict[str, np.ndarray]:
        """By field, for each id its number among those that stay, or of the one that answers it."""
        return {
            field: np.searchsorted(kept, self.answered_as[field]).astype(np.int32)
            for field, kept in self.kept.items()
        }


@dataclass(frozen=True)
class Cost:
    """What the rows of rare ids are worth.

    Attributes:
      percent: of occurrences.
      most: how often a rare id occurs at most.
      rows: of all tables, of rare ids.
      all_rows: of all tables.
      bytes: of the rare rows.
      all_bytes: of all rows.
      auc: on the test part, without the rare rows.
      auc_with: with them.
    """

    percent: float
    most: int
    rows: int
    all_rows: int
    bytes: int
    all_bytes: int
    auc: float
    auc_with: float

    def __str__(self) -> str:
        return (
            f"last {self.percent:g} % of occurrences (ids whose count is {self.most:,} at "
            f"most): {self.rows:,} of {self.all_rows:,} rows, {self.bytes:,} of "
            f"{self.all_bytes:,} bytes; test AUC without them {self.auc:.6f}, with them "
            f"{self.auc_with:.6f} ({self.auc - self.auc_with:+.6f})"
        )


def check_percent(percent: Any) -> float:
    """A share of occurrences, in %.

    Raises:
      UserError: it is not between 0 and 100.
    """
    right = isinstance(percent, (int, float)) and 0 < percent < 100
    if not right:
        raise UserError(f"a share of occurrences must be between 0 and 100 %. Received: {percent}")
    return float(percent)


def rare_ids(data: PreparedData, percent: float) -> RareIds:
    """Which ids are rare; ids without a raw one (missing, unknown, hashed) never are.

    Args:
      data: what the run was trained on.
      percent: p.

    Raises:
      UserError: a bad argument, or counts that cannot be read.
    """
    percent = check_percent(percent)
    from merlin_cowclip.models.row_ranges import RowRanges

    fields = data.spec.ids
    domains = RowRanges.of([data.schema[field] for field in fields]).range_of
    special = inputs_of(data)["special_ids"]
    whole = _fields_that_stay_whole(data)
    counts: dict[int, np.ndarray] = {}
    has_raw: dict[int, np.ndarray] = {}
    places: dict[str, np.ndarray] = {}
    for field in fields:
        table, domain = read_counts(data, field), domains[field]
        count = np.array(table["count"])
        if field in data.spec.lists:
            count[PADDING] = 0  # which is no id
        counts[domain] = counts.get(domain, 0) + count
        raw = table["raw"].is_valid().to_numpy()
        buckets = special[field]["buckets"]
        if field in whole:
            raw = np.zeros_like(raw)
        has_raw[domain] = has_raw.get(domain, np.array(True)) & raw
        places[field] = np.full(len(table), UNKNOWN)
        if buckets > 1 and raw.any():
            places[field][raw] += hash_bucket(table["raw"].filter(raw).combine_chunks(), buckets)
    total = sum(int(one.sum()) for one in counts.values())
    found = np.concatenate([counts[domain][has_raw[domain]] for domain in counts])
    # Of ids that occur as often none comes first, of no field.
    rising = np.lexsort((np.random.default_rng(0).permutation(len(found)), found))
    fits = np.cumsum(found[rising]) <= total * percent / 100
    chosen = np.zeros(len(found), bool)
    chosen[rising[fits]] = True
    rare, start = {}, 0
    for domain, raw in has_raw.items():
        rare[domain] = raw.copy()
        rare[domain][raw] = chosen[start : start + int(raw.sum())]
        start += int(raw.sum())
    held = sum(int(counts[domain][rare[domain]].sum()) for domain in counts)
    return RareIds(
        percent,
        int(found[chosen].max(initial=0)),
        held / total,
        {field: np.flatnonzero(~rare[domains[field]]) for field in fields},
        {
            field: np.where(rare[domains[field]], places[field], np.arange(len(places[field])))
            for field in fields
        },
    )


def tell_of_what_is_counted(run: Run, data: PreparedData) -> None:
    """Notice other training rows than the run's, and fields none of whose ids can be rare.

    Of the latter the raw ids are known, but not what would answer them.
    """
    if run.config["train_sha256"] != identity_of(data, "train"):
        warnings.warn(
            f"ids are counted in {data.path}, whose training rows are others than those of "
            f"{run.path}: ids that are rare there may be frequent here",
            Notice,
            stacklevel=3,
        )
    fields = _fields_that_stay_whole(data)
    if fields:
        warnings.warn(
            f"all rows of {quoted(fields)} stay, those of rare ids too: of "
            "Categorify(num_buckets=…) NVTabular alone knows the bucket that would answer them",
            Notice,
            stacklevel=3,
        )


def _fields_that_stay_whole(data: PreparedData) -> list[str]:
    """Those of adopted data that have hash buckets beside a vocabulary."""
    if data.record.get("ranges") is not None:
        return []
    special = inputs_of(data)["special_ids"]
    hashed = [field for field in data.spec.ids if special[field]["buckets"] > 1]
    raw = {field: read_counts(data, field)["raw"] for field in hashed}
    return [field for field in hashed if raw[field].null_count < len(raw[field])]


def drop(model: mm.Model, rare: RareIds) -> None:
    """Leave the rows of rare ids out of a model, whose ids are then those of `renumbered`."""
    for layer in tables_of(model):
        layer.keep_ids({field: rare.kept[field] for field in layer.fields})


def tables_of(model: mm.Model) -> list[Any]:
    """Every fused table of a model."""
    from merlin_cowclip.models.embeddings import FusedEmbeddings

    layers = {id(layer): layer for layer in model._flatten_layers()}
    return [layer for layer in layers.values() if isinstance(layer, FusedEmbeddings)]


def costs(
    run: Run,
    model: mm.Model,
    data: PreparedData,
    percents: Sequence[float],
    *,
    progress: bool = True,
) -> list[Cost]:
    """Rows, bytes and AUC on the test part, for each share; nothing is dropped.

    Args:
      run: the run.
      model: one of its models.
      data: what it was trained on, with a test part.
      percents: shares of occurrences, in %.
      progress: show a progress bar on stderr.

    Raises:
      UserError: a bad argument, data of another vocabulary or without a test part, or a test part
        with one label alone.
    """
    from merlin_cowclip.plugins._tensorflow import tf
    from merlin_cowclip.workflows.training.evaluation import (
        EVALUATION_BATCH,
        Predictor,
        QualityOf,
    )
    from merlin_cowclip.workflows.training.loader import Loader

    run.check_vocabulary(data)
    tell_of_what_is_counted(run, data)
    if not data.test_files:
        raise UserError(
            "what rare rows are worth is measured on a test part. Received: "
            f"{data.path}, adopted without one. Name data that has one: --data DATA"
        )
    chosen = [rare_ids(data, percent) for percent in percents]
    loader, predictor = Loader(data, "test", batch_size=EVALUATION_BATCH), Predictor(model)
    spec, _ = loader.element_spec
    keys = {
        f"{field}__values" if field in data.spec.lists else field: field for field in data.spec.ids
    }
    answers: list[Mapping[str, np.ndarray]] = [{}, *(rare.answered_as for rare in chosen)]
    found = [QualityOf() for _ in answers]
    with progress_bar("rare ids", loader.rows, show=progress) as bar:
        for features, labels in loader.dataset():
            known = labels.numpy().ravel()
            for quality, answered_as in zip(found, answers, strict=True):
                given = {
                    key: tf.gather(answered_as[keys[key]], value)
                    if keys.get(key) in answered_as
                    else value
                    for key, value in features.items()
                }
                quality.add(known, predictor.probabilities(given, spec))
            bar.update(len(known))
    with_all, *without = (quality.quality().auc for quality in found)
    sizes = [(layer, layer.table.dtype.size * layer.dim) for layer in tables_of(model)]
    return [
        Cost(
            rare.percent,
            rare.most,
            sum(_dropped(layer, rare) for layer, _ in sizes),
            sum(layer.row_offsets[-1] for layer, _ in sizes),
            sum(_dropped(layer, rare) * size for layer, size in sizes),
            sum(layer.row_offsets[-1] * size for layer, size in sizes),
            auc,
            with_all,
        )
        for rare, auc in zip(chosen, without, strict=True)
    ]


def _dropped(layer: Any, rare: RareIds) -> int:
    """Rows of a table that are of rare ids; fields of one domain share theirs."""
    from merlin_cowclip.models.row_ranges import RowRanges

    ranges = RowRanges.of(list(layer.schema)).range_of
    of_domain = {ranges[field]: field for field in layer.fields}
    return sum(layer.cardinalities[f] - len(rare.kept[f]) for f in of_domain.values())
