"""A tune's folder: made, or found to be of what is to be gone on with."""

from __future__ import annotations

import os
from pathlib import Path

from merlin_cowclip.workflows.checks import check_whole
from merlin_cowclip.workflows.data.prepared_data import PreparedData
from merlin_cowclip.workflows.data.spec import check_input_names
from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing, write_json
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.held_out import held_out_rows, hold_out
from merlin_cowclip.workflows.study.tuned import (
    RECORD,
    ROWS,
    read_record,
    record_of,
)

with quiet_imports():
    from merlin_cowclip.plugins._tensorflow import tf
    from merlin_cowclip.workflows.study.search import Search
    from merlin_cowclip.workflows.training.rebuilding import network
    from merlin_cowclip.workflows.training.train import check_trainable


def check(config: TuneConfig, trials: int, seeds: int) -> None:
    """Refuse numbers of trials and seeds that are none, or too few.

    Raises:
      UserError: they are.
    """
    check_whole("trials", trials, 1)
    check_whole("seeds", seeds, 1)
    if trials < len(config.starts):
        raise UserError(
            f"trials must be at least {len(config.starts)}, what the scaling rules predict, which "
            f"is tried first. Received: trials={trials}. Give it more"
        )


def begin(data: PreparedData, config: TuneConfig, out: Path, *, progress: bool) -> None:
    """Make the folder: the rows, an empty search, the record.

    Raises:
      UserError: the network, or the rows that are left, do not go with the configuration; or the
        folder cannot be made.
    """
    check_input_names(data.spec)
    refuse_existing(out)
    first = config.train_config(next(iter(config.starts)))
    check_trainable(data, first)
    try:
        network(first, data.schema)
    except ValueError as error:  # of the data's columns, which only the network knows
        raise UserError(str(error)) from None
    rows = data.rows["train"]
    left = rows - held_out_rows(rows, config.held_out)
    if config.batch_size > left:
        raise UserError(
            "batch size must not exceed the rows that are left to train on. Received: batch size "
            f"{config.batch_size:,}, {left:,} of {rows:,} rows of {data.path} with "
            f"held_out={config.held_out}. Choose a smaller batch, or hold out less"
        )
    with all_or_nothing(out) as folder:
        hold_out(data, config.held_out, config.seed, folder / ROWS, progress=progress)
        Search.create(folder, config.space, config.queue)
        write_json(folder / RECORD, record_of(data, config, _precision()))


def _precision() -> str:
    """Keras's, in which layers are made."""
    return str(tf.keras.mixed_precision.global_policy().name)


def check_fits(data: PreparedData, config: TuneConfig, out: Path) -> None:
    """Refuse to go on with a tune of something else.

    Raises:
      UserError: it is of other data or options, or none.
    """
    if os.path.isdir(out) and not (out / RECORD).exists():
        refuse_existing(out)
    before, now = read_record(out), record_of(data, config, _precision())
    if before["data_sha256"] != now["data_sha256"]:
        raise UserError(
            f"a tune must go on with its own data, {before['data']}. Received: {data.path}, with "
            f"other rows, for {out}. Name that data, or another folder"
        )
    # The same rows may be adopted with another meaning.
    had = {"cardinalities": before["cardinalities"], **before["columns"]}
    for name, value in {"cardinalities": now["cardinalities"], **now["columns"]}.items():
        was = had[name]
        if was != value:
            raise UserError(
                f"a tune must go on with its own data, {before['data']}. Received: {data.path}, "
                f"with {name} {clipped(repr(value))} instead of {clipped(repr(was))}, for {out}. "
                "Name that data, or another folder"
            )
    its = before["precision"]
    if its != now["precision"]:
        raise UserError(
            f"a tune must go on in its own precision, {its}. Received: {now['precision']} for "
            f"{out}. Set it to that, or tune into another folder"
        )
    for name, value in now["config"].items():
        was = before["config"].get(name)
        if was != value:
            if isinstance(value, dict) and isinstance(was, dict):
                keys = [*value, *was.keys() - value.keys()]
                name = next(key for key in keys if value.get(key) != was.get(key))
                value, was = value.get(name), was.get(name)
            raise UserError(
                f"a tune must go on with its own options, {name}={was!r}. Received: {name}="
                f"{value!r} for {out}. Leave it out, or name another folder"
            )
