"""Drop the embedding rows of rare ids, and measure what that costs in AUC.

Most embedding rows belong to ids that hardly occur. Dropped ids are answered as unknown ids, or by
their hash bucket.
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
from merlin_cowclip.workflows.training.runs import Run, inputs_of

if TYPE_CHECKING:
    from merlin_cowclip.plugins._tensorflow import mm


@dataclass(frozen=True, eq=False)
class RareIds:
    """The rarest ids of all fields, which together have p % of all occurrences in training."""

    percent: float  # p
    most: int  # highest count of a rare id; ties are broken at random (seed 0)
    kept: Mapping[str, np.ndarray]  # by field: ids that stay, rising
    answered_as: Mapping[str, np.ndarray]  # by field and id: itself, or the unknown id or bucket

    @property
    def renumbered(self) -> dict[str, np.ndarray]:
        """By field, for each id the row of the smaller table that answers it."""
        return {
            field: np.searchsorted(kept, self.answered_as[field]).astype(np.int32)
            for field, kept in self.kept.items()
        }


@dataclass(frozen=True)
class Cost:
    """What dropping rare ids saves and costs."""

    percent: float  # of occurrences
    most: int  # highest count of a rare id
    rows: int  # embedding rows of rare ids, in all tables
    all_rows: int
    bytes: int  # of these rows
    all_bytes: int
    auc: float  # on the test split, without rare ids
    auc_with: float  # with all ids

    def __str__(self) -> str:
        return (
            f"last {self.percent:g} % of occurrences (ids with a count of at most {self.most:,}): "
            f"{self.rows:,} of {self.all_rows:,} rows, {self.bytes:,} of {self.all_bytes:,} bytes; "
            f"test AUC without them {self.auc:.6f}, with them {self.auc_with:.6f} "
            f"({self.auc - self.auc_with:+.6f})"
        )


def rare_ids(data: PreparedData, percent: float) -> RareIds:
    """Find rare ids. Ids without a raw value (missing, unknown, hashed) never are.

    Raises:
      UserError: a bad percentage, or counts that cannot be read.
    """
    from merlin_cowclip.models.row_ranges import RowRanges

    if not (isinstance(percent, (int, float)) and 0 < percent < 100):
        raise UserError(f"rare ids must have between 0 and 100 % of occurrences, not {percent}")
    domains = RowRanges.of([data.schema[field] for field in data.spec.ids]).range_of
    special = inputs_of(data)["special_ids"]
    is_adopted = data.record.get("ranges") is None
    whole = []
    counts: dict[int, np.ndarray] = {}
    is_rare: dict[int, np.ndarray] = {}
    unknown_as: dict[str, np.ndarray] = {}
    for field in data.spec.ids:
        table, domain = read_counts(data, field), domains[field]
        count, raw = np.array(table["count"]), table["raw"].is_valid().to_numpy()
        if field in data.spec.lists:
            count[PADDING] = 0
        unknown_as[field] = np.full(len(table), UNKNOWN)
        buckets = special[field]["buckets"]
        if buckets > 1 and raw.any():
            if is_adopted:  # only NVTabular knows the bucket of a raw id
                whole.append(field)
                raw = np.zeros_like(raw)
            else:
                texts = table["raw"].filter(raw).combine_chunks()
                unknown_as[field][raw] += hash_bucket(texts, buckets)
        counts[domain] = counts.get(domain, 0) + count
        is_rare[domain] = is_rare.get(domain, np.array(True)) & raw
    if whole:
        warnings.warn(
            f"no ids of {quoted(whole)} are dropped: only NVTabular knows the hash bucket "
            "(num_buckets) that would answer them",
            Notice,
            stacklevel=3,
        )
    found = np.concatenate([counts[domain][rare] for domain, rare in is_rare.items()])
    rising = np.lexsort((np.random.default_rng(0).permutation(len(found)), found))
    total = sum(int(one.sum()) for one in counts.values())
    chosen = np.zeros(len(found), bool)
    chosen[rising[np.cumsum(found[rising]) <= total * percent / 100]] = True
    ends = np.cumsum([int(rare.sum()) for rare in is_rare.values()])
    for rare, part in zip(is_rare.values(), np.split(chosen, ends[:-1]), strict=True):
        rare[rare] = part
    return RareIds(
        float(percent),
        int(found[chosen].max(initial=0)),
        {field: np.flatnonzero(~is_rare[domains[field]]) for field in data.spec.ids},
        {
            field: np.where(is_rare[domains[field]], one, np.arange(len(one)))
            for field, one in unknown_as.items()
        },
    )


def drop(model: mm.Model, rare: RareIds) -> None:
    """Remove the rows of rare ids from a model; its ids are then those of `renumbered`."""
    for layer in tables_of(model):
        layer.keep_ids({field: rare.kept[field] for field in layer.fields})


def tables_of(model: mm.Model) -> list[Any]:
    """Every fused table of a model."""
    from merlin_cowclip.models.embeddings import FusedEmbeddings

    layers = {id(layer): layer for layer in model._flatten_layers()}
    return [layer for layer in layers.values() if isinstance(layer, FusedEmbeddings)]


def rare_costs(
    run: Run,
    percents: Sequence[float],
    *,
    which: str = "last",
    data: PreparedData | None = None,
    progress: bool = True,
) -> list[Cost]:
    """Measure what `export` would drop: embedding rows, their bytes, and test AUC without them.

    Args:
      run: the finished run.
      percents: percentages of all occurrences in the training split.
      which: of the run's models, "last" or "best".
      data: the run's data, if it has moved.
      progress: show a progress bar on stderr.

    Returns:
      One `Cost` per percentage; `print` it.

    Raises:
      UserError: a bad percentage, the run has no such model, or the data has another vocabulary, no
        test split, or only one label in it.
    """
    from merlin_cowclip.plugins._tensorflow import tf
    from merlin_cowclip.workflows.training.evaluation import (
        EVALUATION_BATCH,
        Predictor,
        QualityOf,
    )
    from merlin_cowclip.workflows.training.loader import Loader

    data = run.data() if data is None else data
    run.check_vocabulary(data)
    if not data.test_files:
        raise UserError(
            f"--rare needs a test split, and {data.path} has none. Name data that has one: "
            "--data DATA"
        )
    chosen = [rare_ids(data, percent) for percent in percents]
    model = run.model(which)
    loader, predictor = Loader(data, "test", batch_size=EVALUATION_BATCH), Predictor(model)
    spec, _ = loader.element_spec
    keys = {f"{f}__values" if f in data.spec.lists else f: f for f in data.spec.ids}
    found = [QualityOf() for _ in range(1 + len(chosen))]
    with progress_bar("rare ids", loader.rows, show=progress) as bar:
        for features, labels in loader.dataset():
            known = labels.numpy().ravel()
            answers = [features]
            for rare in chosen:
                ids = {k: tf.gather(rare.answered_as[f], features[k]) for k, f in keys.items()}
                answers.append({**features, **ids})
            for quality, given in zip(found, answers, strict=True):
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
    """Rows of rare ids in a table; fields of one domain share them."""
    from merlin_cowclip.models.row_ranges import RowRanges

    ranges = RowRanges.of(list(layer.schema)).range_of
    of_domain = {ranges[field]: field for field in layer.fields}
    return sum(layer.cardinalities[f] - len(rare.kept[f]) for f in of_domain.values())
