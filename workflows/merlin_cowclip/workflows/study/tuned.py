# SPDX-License-Identifier: Apache-2.0
"""The folder of a tuning study: its record, trials, result, and the tables that are printed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.plugins._text import format_table
from merlin_cowclip.workflows import folders
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.study.configuration import CHOICES, RANGES
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.runs import columns_of

FORMAT_VERSION = 9
RECORD = "tune.json"  # what is tuned; a folder without it is no tuning study
TUNED = "tuned.json"
RESULT = "result.json"  # written last
_NAMES = (*RANGES, *CHOICES)


def trial_of(trial: Any, repeats: Mapping[str, float | None]) -> dict[str, Any]:
    """A trial of Optuna that has ended, with the AUC of its repeats by seed, fit for JSON.

    `auc` is None if it diverged, `mean` if a repeat did; `estimate` is the mean, or else the AUC.
    """
    auc, of = trial.value, trial.user_attrs
    curve, aucs = of["curve"], [one for one in repeats.values() if one is not None]
    best = None if auc is None else curve.index(auc) + 1
    is_stable = 0 < len(aucs) == len(repeats)
    mean = statistics.fmean(aucs) if is_stable else None
    return {
        **{"number": trial.number + 1, "origin": of.get("origin", "TPE"), "params": trial.params},
        **{name: of[name] for name in ("curve", "why", "seconds")},
        **{"auc": auc, "best_epoch": best},
        "repeat_seconds": of["seconds"] * (best or 0) / max(len(curve), 1),
        **{"repeats": repeats, "mean": mean, "estimate": mean if repeats else auc},
        "deviation": statistics.stdev(aucs) if is_stable and len(aucs) > 1 else None,
    }


def trial_line(ended: Sequence[Mapping[str, Any]], number: int, trials: int) -> str:
    """The line of a trial that has ended, of all that have and how many are to."""
    (trial,) = (one for one in ended if one["number"] == number)
    params, quality = trial["params"], "diverged"
    if trial["auc"] is not None:
        best = max(one["auc"] for one in ended if one["auc"] is not None)
        quality = f"AUC {trial['auc']:.5f}, epoch {trial['best_epoch']} of {params['epochs']}"
        quality += f", best so far {best:.5f}"
    values = ", ".join(f"{name} {_shown(params, name)}" for name in _NAMES if name in params)
    head = f"[{len(ended)}/{trials}] trial {number}, {trial['origin']}"
    return f"{head}: {quality}, {trial['seconds']:.0f} s | {values}"


def _shown(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name, "-")
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def check_resumable(out: Path, record: Mapping[str, Any]) -> None:
    """Refuse to resume a study of other data or options than those of `record`."""
    both = read_record(out), json.loads(json.dumps(record))
    before, now = ({**one, **one["config"], "config": None, "data": None} for one in both)
    for name in now:  # the data may be moved
        if before.get(name) != now[name]:
            was, given = (clipped(repr(one.get(name))) for one in (before, now))
            what = "Leave the option out" if name in record["config"] else "Give the same data"
            raise UserError(
                f"{out} was begun with {name}={was}, and this call has {name}={given}. {what}, or "
                "name another folder"
            )


def read_record(path: Path) -> dict[str, Any]:
    """A study's `tune.json`; raises UserError for another folder or format."""
    return folders.read_record(path, RECORD, FORMAT_VERSION, "a folder that tune wrote")


@dataclass(frozen=True)
class Tuned:
    """A finished tuning study, with `tune.json` and `result.json`; open one with `Tuned.open`."""

    path: Path
    record: Mapping[str, Any]
    result: Mapping[str, Any]

    @classmethod
    def open(cls, path: str | Path) -> Tuned:
        """The folder that `tune` wrote; a UserError if it is none or not finished."""
        path = Path(path)
        record = read_record(path)
        if not (path / RESULT).exists():
            raise UserError(f"{path} did not end. Resume it: merlin-cowclip tune DATA --out {path}")
        return cls(path, record, folders.read_json(path / RESULT))

    def train_config(self, data: PreparedData | None = None) -> TrainConfig:
        """The result: hyperparameters at its batch size (rule "none"), schedule and epochs.

        A UserError if `data` has another label or other fields; rows and ids may differ.
        """
        for name, found in columns_of(data).items() if data else ():
            if data and found != (tuned := self.record["columns"][name]):
                raise UserError(
                    f"{data.path} has {name} {found!r}, and {self.path} was tuned with "
                    f"{tuned!r}. Tune on this data, or name the data that was tuned on"
                )
        return TrainConfig.from_dict(folders.read_json(self.path / TUNED))

    def tables(self) -> str:
        """The repeated trials, best first, with their hyperparameters."""
        result, rows, values = self.result, [], []
        for one in result["table"]:
            number, params, aucs = str(one["number"]), one["params"], list(one["repeats"].values())
            auc = f"diverged, {aucs.count(None)} of {len(aucs)}"
            if one["mean"] is not None:
                deviation = "" if one["deviation"] is None else f" ± {one['deviation']:.5f}"
                auc = f"{one['mean']:.5f}{deviation}"
            epochs = f"{one['best_epoch']} of {params['epochs']}"
            rows.append((number, auc, str(len(aucs)), f"{one['auc']:.5f}", epochs, one["origin"]))
            values.append((number, *(_shown(params, name) for name in _NAMES)))
        header = ("trial", "validation AUC", "seeds", "in the search", "epochs", "origin")
        best = f"Best: trial {result['winner']} of {len(result['trials'])}."
        tables = format_table(header, rows), format_table(("trial", *_NAMES), values)
        return "\n\n".join((*tables, best))
