# SPDX-License-Identifier: Apache-2.0
"""The folder of a tuning study: its record, its result, and the tables that are printed."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import columns_of, identity_of

FORMAT_VERSION = 6
RECORD = "tune.json"  # of what is tuned; without it there is no tune
ROWS = "rows"
TUNED = "tuned.json"
RESULT = "result.json"  # written last: without it the tune did not end
_NUMBERS = ("dense_lr", "embedding_lr", "l2", "init_stddev", "warmup_epochs")
_VALUES = ("dense η", "embed. η", "λ", "σ", "warm-up", "clip r", "clip ζ", "update", "rates")
_WIDTHS = (5, 7, 8, 8, 6, 5, 9, 9, 9, 9, 8, 9, 9, 7, 9)


def record_of(data: PreparedData, config: TuneConfig, precision: str) -> dict[str, Any]:
    """`tune.json`: what is tuned, on what, and in which of Keras's precisions."""
    return {
        "format": FORMAT_VERSION,
        "data": str(data.path.resolve()),
        "data_sha256": identity_of(data),
        "columns": columns_of(data),
        "cardinalities": data.cardinalities,
        "config": dataclasses.asdict(config),
        "precision": precision,
    }


def check_resumable(out: Path, record: Mapping[str, Any]) -> None:
    """Refuse to resume a tune of other data or options than those of `record`."""
    before, now = _flat(read_record(out)), _flat(json.loads(json.dumps(record)))
    if changed := next((n for n in {**now, **before} if before.get(n) != now.get(n)), None):
        was, given = (clipped(repr(one.get(changed))) for one in (before, now))
        raise UserError(
            f"a tune must be resumed with its own data and options, {changed}={was}. Received: "
            f"{changed}={given} for {out}. Leave it out, or name another folder"
        )


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """All that must not change, by name; first single values of what has several."""
    rest = {**record, **record["config"], "config": None, "data": None}  # the data may be moved
    groups = {name: rest[name] or {} for name in ("network", "base", "columns", "cardinalities")}
    return {f"{group} {n}": value for group in groups for n, value in groups[group].items()} | rest


def read_record(path: Path) -> dict[str, Any]:
    """A tune's `tune.json`; refuses what is no tune, or one of another version."""
    record = _read(path, RECORD)
    if record.get("format") != FORMAT_VERSION:
        raise UserError(
            f"a tune must be of format {FORMAT_VERSION}. Received: {record.get('format')!r} in "
            f"{path}. Tune again into another folder"
        )
    return record


def _read(path: Path, name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((path / name).read_text(encoding="utf-8")))
    except OSError:
        raise UserError(
            f"{path} is no tuning study: no {RECORD}. Name a study, or to begin one a new folder"
            if name == RECORD
            else f"the study {path} did not end. Resume it: merlin-cowclip tune DATA --out {path}"
        ) from None


@dataclass(frozen=True)
class Tuned:
    """A tune that has ended; open one with `Tuned.open`.

    `tune.json` (what is tuned), `rows/` (of data without a validation part: a prepared folder that
    has one), `study.db` (Optuna's study "tune" in SQLite), `tuned.json` (the configuration
    that it found, as `TrainConfig`'s) and `result.json`, which has all numbers.
    """

    path: Path
    record: Mapping[str, Any]
    result: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Tuned:
        """The folder that `tune` wrote; a UserError if it is none, or the tune has not ended."""
        path = Path(path)
        return cls(path, read_record(path), _read(path, RESULT))

    def train_config(self) -> TrainConfig:
        """What it found: the values at its batch size (rule "none"), and how many epochs."""
        return TrainConfig.from_dict(_read(self.path, TUNED))

    def check_columns(self, data: PreparedData) -> None:
        """Refuse data with another label or other fields; rows and ids may differ."""
        its = columns_of(data)
        for name, mine in self.record["columns"].items():
            if its[name] != mine:
                raise UserError(
                    f"the data must have the columns that were tuned on. Received: {data.path}, "
                    f"with {name} {its[name]!r} instead of {mine!r} in {self.path}. Tune on "
                    "this data, or name the other"
                )

    def tables(self) -> str:
        """What was found, for a person to read: AUC and hyperparameters."""
        result, table = self.result, self.result["table"]

        def auc(row: Mapping[str, Any]) -> str:
            if diverged := row["aucs"].count(None):
                return f"diverged, {diverged} of {len(row['aucs'])}"
            if not row["best_epoch"]:
                return "diverged"
            return plus_minus(row["mean"], row["deviation"]) or "not repeated"

        def to_the_best(row: Mapping[str, Any]) -> str:
            is_best = row["number"] == table[0]["number"]
            return "" if is_best else plus_minus(*difference(row, table[0]), form="+.5f")

        header = ("", "validation AUC", "to the best", "seeds", "in the search", "epochs")
        rows = [
            (
                row["what"],
                auc(row),
                to_the_best(row),
                str(len(row["seeds"])),
                plus_minus(row["auc"]),
                str(row["best_epoch"] or ""),
            )
            for row in table
        ]
        values = [(row["what"], *_cells(row)) for row in table]
        lines = [format_table(header, rows), "", format_table(("", *_VALUES), values), ""]
        if None in table[0]["aucs"]:
            lines.append("All that were trained again diverged: search lower learning rates.")
        if edge := ", ".join(f"{n} {v:.3g}" for n, v in result["at_the_edge"].items()):
            lines.append(f"At the edge of what is searched: {edge}. Beyond it may be better ones.")
        seconds, epoch = result["seconds"], result["epoch_seconds"]
        lines.append(
            f"Trials and repeats took {seconds:.0f} s with compiling, as long as "
            f"{seconds / epoch:.0f} epochs of {epoch:.1f} s."
        )
        if names := ", ".join(result["not_tried"]):
            lines.append(f"Not tried, as the trials or the time were over: {names}.")
        return "\n".join(lines)


Spread = tuple[float | None, float | None]
"""Mean and standard deviation."""


def spread(values: Sequence[Any]) -> Spread:
    """Neither of no values, or where one is `None`; no deviation of one value."""
    if not values or None in values:
        return None, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def difference(row: Mapping[str, Any], other: Mapping[str, Any]) -> Spread:
    """`spread` of a row's AUC minus another row's, of the seeds that both have."""
    own, others = (dict(zip(one["seeds"], one["aucs"], strict=True)) for one in (row, other))
    if None in (*own.values(), *others.values()):
        return None, None
    return spread([own[seed] - others[seed] for seed in own if seed in others])


def plus_minus(mean: float | None, deviation: float | None = None, form: str = ".5f") -> str:
    """As in "0.80123 ± 0.00045"; empty without a mean."""
    if mean is None:
        return ""
    return f"{mean:{form}}" + ("" if deviation is None else f" ± {deviation:.5f}")


def _cells(point: Mapping[str, Any]) -> list[str]:
    """The cells of `_VALUES`, of a point as its `to_dict` gives it."""
    hp = point["hyperparameters"]
    numbers = [f"{hp[name]:.3g}" for name in _NUMBERS]
    clip = [f"{hp[name]:.3g}" if hp["clip"] else "-" for name in ("clip_ratio", "clip_floor")]
    return [*numbers, *clip, point["update"], point["rates"]]


def _line(cells: Sequence[str], note: str) -> str:
    texts = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return f"{' '.join(texts)}  {note}".rstrip()


HEADER = _line(("trial", "ended", "AUC", "best", "epoch", "s", *_VALUES), "origin, or why it ended")
"""Of the lines that `trial_line` makes."""


def trial_line(trial: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], most: int) -> str:
    """A trial that has ended, of all that have, and of how many are to."""
    notes = list(trial["rules"])
    if trial["portfolio"]:
        notes.append(f"portfolio {trial['portfolio']}")
    if trial["step"]:
        notes.append(trial["step"])
    if why := trial["why"]:
        notes.append("diverged" if len(why) > 40 else why)  # the reason is in the result
    best = max((one["auc"] for one in tried if one["auc"] is not None), default=None)
    cells = (
        str(trial["number"]),
        f"{len(tried)}/{most}",
        plus_minus(trial["auc"]) or "-",
        plus_minus(best) or "-",
        f"{trial['best_epoch']}/{len(trial['epochs'])}",
        f"{trial['seconds']:.0f}",
        *_cells(trial),
    )
    return _line(cells, ", ".join(notes))
