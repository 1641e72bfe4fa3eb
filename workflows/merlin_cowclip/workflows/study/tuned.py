"""A tune's folder: its record, what it ended with, how to train with that, and what is printed."""

from __future__ import annotations

import json
import os
import shlex
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

FORMAT_VERSION = 3
RECORD = "tune.json"  # of what is tuned; without it there is no tune
ROWS = "rows"
TUNED = "tuned.json"
RESULT = "result.json"  # written last: without it the tune did not end
FEWEST = 10
"""Trials below which nothing is said of importance."""
_NUMBERS = ("dense_lr", "embedding_lr", "l2", "init_stddev", "warmup_epochs")
_VALUES = ("dense η", "embed. η", "λ", "σ", "warm-up", "clip r", "clip ζ", "update", "rates")
_WIDTHS = (7, 8, 8, 6, 5, 9, 9, 9, 9, 8, 9, 9, 7, 9)


def record_of(data: PreparedData, config: TuneConfig, precision: str) -> dict[str, Any]:
    """`tune.json`: what is tuned, on what, and in which of Keras's precisions."""
    return {
        "format": FORMAT_VERSION,
        "data": str(data.path.resolve()),
        "data_sha256": identity_of(data),
        "columns": columns_of(data),
        "cardinalities": data.cardinalities,
        "config": config.to_dict(),
        "precision": precision,
    }


def check_fits(data: PreparedData, config: TuneConfig, out: Path, precision: str) -> None:
    """Refuse to resume a tune of something else.

    Raises:
      UserError: it is of other data or options, or none.
    """
    before, now = (
        {**one, **one["config"], "config": None, "data": None}  # may be moved
        for one in (read_record(out), record_of(data, config, precision))
    )
    for name, value in now.items():
        if before.get(name) != value:
            raise UserError(
                "a tune must be resumed with its own data and options, "
                f"{name}={clipped(repr(before.get(name)))}. Received: {name}="
                f"{clipped(repr(value))} for {out}. Leave it out, or name another folder"
            )


def read_record(path: Path) -> dict[str, Any]:
    """A tune's `tune.json`.

    Raises:
        UserError: no folder of a tune, or of another version.
    """
    record = _read(path, RECORD)
    if record.get("format") != FORMAT_VERSION:
        raise UserError(
            f"a tune must be of format {FORMAT_VERSION}. Received: {record.get('format')!r} in "
            f"{path}. Tune again into another folder"
        )
    return record


def _read(path: Path, name: str) -> dict[str, Any]:
    if not os.path.isfile(path / name):  # which is false, too, of a name that is too long
        how = "Make one with 'merlin-cowclip tune'"
        if name != RECORD:
            how = f"Resume it: {how_to_resume(path, read_record(path)['data'])}"
        raise UserError(
            f"a tune must be a folder with {name}. Received: {path}, no tune, or one that "
            f"did not end. {how}"
        )
    return dict(json.loads((path / name).read_text(encoding="utf-8")))


def how_to_resume(path: Path, data: str | Path) -> str:
    """The command that resumes a tune, for a shell."""
    return f"merlin-cowclip tune {shlex.quote(str(data))} --out {shlex.quote(str(path))}"


@dataclass(frozen=True)
class Tuned:
    """A tune that has ended; open one with `Tuned.open`.

    `tune.json` (what is tuned), `rows/` (a prepared folder whose test part is held out of the
    training part), `study.db` (Optuna's study "tune" in SQLite), `tuned.json` (the configuration
    that it found, as `TrainConfig`'s) and `result.json`, which has all numbers.
    """

    path: Path
    record: Mapping[str, Any]
    result: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Tuned:
        """The folder that `tune` wrote.

        Raises:
          UserError: not there, or the tune has not ended.
        """
        path = Path(path)
        return cls(path, read_record(path), _read(path, RESULT))

    def train_config(self) -> TrainConfig:
        """What it found: the values at its batch size (rule "none"), and how many epochs."""
        return TrainConfig.from_dict(_read(self.path, TUNED))

    def check_columns(self, data: PreparedData) -> None:
        """Refuse data with other columns than those that were tuned on; rows and ids may differ.

        Raises:
          UserError: another label, or other fields.
        """
        its = columns_of(data)
        for name, mine in self.record["columns"].items():
            if its[name] != mine:
                raise UserError(
                    f"the data must have the columns that were tuned on. Received: {data.path}, "
                    f"with {name} {its[name]!r} instead of {mine!r} in {self.path}. Tune on "
                    "this data, or name the other"
                )

    def tables(self) -> str:
        """What was found, for a person to read: AUC, values, importance."""
        table, shares = self.result["table"], self.result["importance"]
        header = ("", "held-out AUC", "±", "to the best", "seeds", "in the search", "epochs")
        rows = [
            (
                row["what"],
                "diverged" if row["diverged"] or not row["epochs"] else _number(row["mean"]),
                _number(row["deviation"]),
                _number(row["difference"], "{:+.5f}")
                + _number(row["difference_deviation"], " ± {:.5f}"),
                str(len(row["seeds"])),
                _number(row["search_auc"]),
                str(row["epochs"] or ""),
            )
            for row in table
        ]
        values = format_table(("", *_VALUES), [(row["what"], *_cells(row)) for row in table])
        lines = [format_table(header, rows), "", values, ""]
        trials = self.result["trials_measured"]
        if shares is None:
            lines.append(
                f"Importance of the values: too few trials to say ({trials}; {FEWEST} at least)."
            )
        else:
            listed = ", ".join(f"{name} {of:.0%}" for name, of in shares.items())
            lines.append(f"Importance of the values, over {trials} trials (fANOVA): {listed}.")
        lines += [
            f"{row['what']} diverged from {row['diverged']} of {len(row['seeds'])} seeds."
            for row in table
            if row["diverged"]
        ]
        if table[0]["diverged"]:
            lines.append("All that were trained again diverged: search lower learning rates.")
        if edge := self.result["at_the_edge"]:
            values = ", ".join(f"{name} {value:.3g}" for name, value in edge.items())
            lines.append(f"At the edge of what is searched: {values}.")
        epoch = self.result["epoch_seconds"]
        lines.append(
            f"It took the time of {self.result['seconds'] / epoch:.0f} epochs of {epoch:.1f} s."
        )
        if names := ", ".join(self.result["not_tried"]):
            lines.append(f"Not tried, as the trials or the time were over: {names}.")
        return "\n".join(lines)


def _number(value: float | None, form: str = "{:.5f}") -> str:
    return "" if value is None else form.format(value)


def _cells(point: Mapping[str, Any]) -> list[str]:
    """The cells of `_VALUES`, of a point as its `to_dict` gives it."""
    hp = point["hyperparameters"]
    numbers = [f"{hp[name]:.3g}" for name in _NUMBERS]
    clip = [f"{hp[name]:.3g}" if hp["clip"] else "-" for name in ("clip_ratio", "clip_floor")]
    return [*numbers, *clip, point["update"], point["rates"]]


def _line(cells: Sequence[str], note: str) -> str:
    texts = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
    return f"{' '.join(texts)}  {note}".rstrip()


HEADER = _line(("trial", "AUC", "best", "epoch", "s", *_VALUES), "rules, or why it ended")
"""Of the lines that `trial_line` makes."""


def trial_line(trial: Mapping[str, Any], tried: Sequence[Mapping[str, Any]], most: int) -> str:
    """A trial that has ended, of all that have, and of how many are to."""
    why = trial["why"] or ""
    notes = [*trial["rules"], "diverged" if len(why) > 40 else why]  # the reason is in the result
    best = max((one["auc"] for one in tried if one["auc"] is not None), default=None)
    cells = (
        f"{len(tried)}/{most}",
        _number(trial["auc"]) or "-",
        _number(best) or "-",
        f"{trial['best_epoch']}/{len(trial['epochs'])}",
        f"{trial['seconds']:.0f}",
        *_cells(trial),
    )
    return _line(cells, ", ".join(filter(None, notes)))
