"""A tune's folder: its record, what it ended with, and how to train with that."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.errors import UserError, shown
from merlin_cowclip.workflows.study.configuration import BASE_OPTIONS, TuneConfig
from merlin_cowclip.workflows.training.configuration import TrainConfig
from merlin_cowclip.workflows.training.networks import NETWORKS
from merlin_cowclip.workflows.training.runs import columns_of, identity_of

FORMAT_VERSION = 2
RECORD = "tune.json"  # of what is tuned; without it there is no tune
ROWS = "rows"
TUNED = "tuned.json"
RESULT = "result.json"  # written last: without it the tune did not end
_AGAIN = "Tune again into another folder"


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


def read_record(path: Path) -> dict[str, Any]:
    """A tune's `tune.json`.

    Raises:
        UserError: no folder of a tune, or of another version.
    """
    record = _read(path, RECORD, "which is written first. Received: {path}, no tune of ours")
    if record.get("format") != FORMAT_VERSION or not isinstance(record.get("config"), dict):
        raise UserError(
            f"a tune must be of format {FORMAT_VERSION}. Received: {record.get('format')!r} in "
            f"{path}. {_AGAIN}"
        )
    return record


def _read(path: Path, name: str, missing: str) -> dict[str, Any]:
    if not os.path.isdir(path):  # which is false, too, of a name that is too long
        raise UserError(
            f"a tune must be a folder. Received: {shown(path)}. Make one with 'merlin-cowclip tune'"
        )
    try:
        found = json.loads((path / name).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no values by name")
    except FileNotFoundError:
        missing = missing.format(path=path, again=how_to_go_on(path))
        raise UserError(f"a tune must hold {name}, {missing}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path / name} must be readable JSON. Received: {error}. {_AGAIN}"
        ) from None
    return found


def how_to_go_on(path: Path, data: str | Path | None = None) -> str:
    """The command that goes on with a tune, for a shell."""
    if data is None:
        try:
            data = json.loads((path / RECORD).read_text(encoding="utf-8"))["data"]
        except (OSError, ValueError, LookupError, TypeError):
            data = "DATA"
    return f"merlin-cowclip tune {shlex.quote(str(data))} --out {shlex.quote(str(path))}"


def command_of(config: TuneConfig, path: Path, data: Path) -> str | None:
    """The command that searches the same anew, for a shell.

    Returns:
        `None` where no options say it: a base that another tune found, or a combiner of no list, or
        of one whose name has a comma.
    """
    base, combiner = config.base or {}, config.network["combiner"]
    assert isinstance(base, Mapping)
    if base.keys() - BASE_OPTIONS.keys() or (config.update, config.rates) != ("exact", "constant"):
        return None
    if isinstance(combiner, dict):
        if not combiner or any("," in name for name in combiner):
            return None
        combiner = [f"{name}={value}" for name, value in combiner.items()]
    options = NETWORKS[config.network["model"]]
    network = {k: v for k, v in config.network.items() if k not in options or options[k].used}
    given = {"batch_size": config.batch_size, **network, "combiner": combiner}
    given |= {BASE_OPTIONS[key]: value for key, value in base.items()}
    given |= {name: getattr(config, name) for name in ("epochs", "held_out", "seed")}
    words = [how_to_go_on(path, data)]
    for name, value in given.items():
        if value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            words.append(f"--{name.replace('_', '-')} {shlex.quote(text)}")
    return " ".join(words if config.deterministic else [*words, "--no-determinism"])


@dataclass(frozen=True)
class Tuned:
    """A tune that has ended; open one with `Tuned.open`.

    `tune.json` (what is tuned), `rows/` (a prepared folder whose test part is held out of the
    training part), `study.db` (all trials: Optuna's study "tune" in SQLite), `repeats/`,
    `tuned.json` (the configuration that it found, as `TrainConfig`'s) and `result.json`, which has
    all numbers.
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
        record = read_record(path)
        missing = "which is written last. Received: {path}, a tune that did not end. Go on: {again}"
        return cls(path, record, _read(path, RESULT, missing))

    def train_config(self) -> TrainConfig:
        """What it found: the values at its batch size (rule "none"), and how many epochs.

        Raises:
          UserError: `tuned.json` is gone, or holds something else.
        """
        missing = "which is written last. Received: {path}. Go on: {again}"
        return TrainConfig.from_dict(_read(self.path, TUNED, missing))

    def tables(self) -> str:
        """What was found, for a person to read: AUC, values, importance."""
        from merlin_cowclip.workflows.study.tune_tables import tables

        return tables(self.result)

    def check_columns(self, data: PreparedData) -> None:
        """Refuse data with other columns than those that were tuned on.

        Values that were found on one part of a log are good for another: other rows, and the other
        vocabulary that they have, are no error.

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
