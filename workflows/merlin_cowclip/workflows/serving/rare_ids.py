# SPDX-License-Identifier: Apache-2.0
"""Drop the embedding rows of rare ids, which are unknown or hashed then, and measure the cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from merlin_cowclip.models.ctr_block import embeddings_of
from merlin_cowclip.workflows.data.counts import read_counts
from merlin_cowclip.workflows.data.prepared_data import PreparedData, inputs_of
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.data.vocabulary import UNKNOWN, Vocabulary
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training import evaluation
from merlin_cowclip.workflows.training.loader import Loader
from merlin_cowclip.workflows.training.runs import Run

Inputs = Mapping[str, np.ndarray]


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
        answers = self.answered_as
        return {f: np.searchsorted(ids, answers[f]).astype("i4") for f, ids in self.kept.items()}

    def answered(self, features: Inputs, spec: DatasetSpec) -> dict[str, np.ndarray]:
        """A model's inputs with the ids that answer rare ones."""
        keys = {f"{f}__values" if f in spec.lists else f: f for f in spec.ids}
        return {**features, **{k: self.answered_as[f][features[k]] for k, f in keys.items()}}


@dataclass(frozen=True)
class Cost:
    """What dropping rare ids saves and costs."""

    percent: float  # of occurrences
    most: int  # highest count of a rare id
    rows: int  # embedding rows of rare ids, in all tables
    all_rows: int
    bytes: int  # of these rows
    all_bytes: int
    auc: float  # on the validation part, without rare ids
    auc_with: float  # with all ids

    def __str__(self) -> str:
        return (
            f"last {self.percent:g} % of occurrences (ids with a count of at most {self.most:,}): "
            f"{self.rows:,} of {self.all_rows:,} rows, {self.bytes:,} of {self.all_bytes:,} bytes; "
            f"validation AUC without them {self.auc:.6f}, with them {self.auc_with:.6f} "
            f"({self.auc - self.auc_with:+.6f})"
        )


def rare_ids(data: PreparedData, percent: float) -> RareIds:
    """Find rare ids. Ids without a raw value (missing, unknown, hashed) never are."""
    if not (isinstance(percent, (int, float)) and 0 < percent < 100):
        raise UserError(f"rare ids must have between 0 and 100 % of occurrences, not {percent}")
    all_buckets = inputs_of(data)["buckets"]
    is_adopted = data.record.get("ranges") is None
    answers: dict[str, np.ndarray] = {}
    counts, rare = [], []  # by domain
    for fields in data.domains:
        count, is_rare = np.zeros(1, int), np.ones(1, bool)
        for field in fields:
            table, buckets = read_counts(data, field), all_buckets[field]
            raw = table["raw"].is_valid().to_numpy()
            answers[field] = np.full(len(table), UNKNOWN)
            if buckets > 1 and is_adopted:  # only NVTabular knows the bucket of a raw id
                raw = np.zeros_like(raw)
            elif buckets > 1:
                texts = table["raw"].filter(pa.array(raw)).combine_chunks()
                answers[field][raw] = Vocabulary.empty(buckets).encode(texts)
            count, is_rare = count + table["count"].to_numpy(), is_rare & raw
        counts.append(count)
        rare.append(is_rare)
    occurs, is_rare = np.concatenate(counts), np.concatenate(rare)
    places = np.flatnonzero(is_rare)
    ties = np.random.default_rng(0).permutation(len(places))
    rising = places[np.lexsort((ties, occurs[places]))]
    chosen = rising[np.cumsum(occurs[rising]) <= occurs.sum() * percent / 100]
    is_rare = np.isin(np.arange(len(occurs)), chosen)
    parts = np.split(is_rare, np.cumsum([len(count) for count in counts])[:-1])
    found = {f: part for fields, part in zip(data.domains, parts, strict=True) for f in fields}
    return RareIds(
        float(percent),
        int(occurs[chosen].max(initial=0)),
        {field: np.flatnonzero(~part) for field, part in found.items()},
        {f: np.where(part, answers[f], np.arange(len(part))) for f, part in found.items()},
    )


def drop(model: Any, rare: RareIds) -> None:
    """Remove the rows of rare ids from a model; its ids are then those of `renumbered`."""
    for layer in embeddings_of(model).values():
        layer.keep_ids({field: rare.kept[field] for field in layer.fields})


def rare_costs(
    run: Run,
    percents: Sequence[float],
    *,
    which: str | None = None,
    data: PreparedData | None = None,
    progress: bool = True,
) -> list[Cost]:
    """Measure what `export` would drop, one `Cost` per percentage; `print` it.

    Args:
      run: the finished run.
      percents: percentages of all occurrences in the training split.
      which: of the run's models, "last" or "best"; by default as of `Run.model`.
      data: the run's data, if it has moved.
      progress: show a progress bar on stderr.

    Raises:
      UserError: a bad percentage, no such model, or other data, or without both labels to validate.
    """
    data = run.data() if data is None else data
    run.check_vocabulary(data)
    chosen = [rare_ids(data, percent) for percent in percents]
    model, loader = run.model(which), Loader(data, "valid", batch_size=evaluation.EVALUATION_BATCH)
    predictor = evaluation.Predictor(model)
    found = [evaluation.MetricAccumulator() for _ in (None, *chosen)]
    with progress_bar("rare ids", loader.rows, show=progress) as bar:
        for features, labels in loader.batches():
            for quality, rare in zip(found, (None, *chosen), strict=True):
                given = features if rare is None else rare.answered(features, data.spec)
                quality.add(labels.ravel(), predictor.probabilities(given))
            bar.update(len(labels))
    with_all, *without = (quality.quality().auc for quality in found)
    widths = [layer.table.dtype.size * layer.dim for layer in embeddings_of(model).values()]
    costs, tables, rows = [], len(widths), data.table_rows
    for rare, auc in zip(chosen, without, strict=True):
        gone = sum(data.cardinalities[field] - len(rare.kept[field]) for field, *_ in data.domains)
        sizes = gone * tables, rows * tables, gone * sum(widths), rows * sum(widths)
        costs.append(Cost(rare.percent, rare.most, *sizes, auc, with_all))
    return costs
