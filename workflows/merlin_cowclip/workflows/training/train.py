# SPDX-License-Identifier: Apache-2.0
"""Training on a prepared folder: model, optimizer, the run folder, from its beginning or on."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.data.prepared_data import COLUMNS, PreparedData
from merlin_cowclip.workflows.errors import FULL_DISK, NotFiniteError, UserError, clipped
from merlin_cowclip.workflows.folders import (
    LOCK,
    all_or_nothing,
    locked,
    read_json,
    refuse_existing,
    refuse_pattern,
    remove,
    write_json,
)
from merlin_cowclip.workflows.manifest import manifest_of
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.configuration import (
    CONSTANT_SCHEDULE,
    CheckpointConfig,
    TrainConfig,
)
from merlin_cowclip.workflows.training.listeners import EVENTS, Listener, listening, notify
from merlin_cowclip.workflows.training.ranks import (
    check_alike,
    check_offered,
    gather_objects,
    is_rank_zero,
    raise_on_any_rank,
    rank_info,
)
from merlin_cowclip.workflows.training.runs import (
    CHECKPOINTS,
    CONFIG,
    FAILED,
    FORMAT_VERSION,
    RESULT,
    SCHEMA,
    Run,
    config_in,
    described,
    how_to_resume,
    open_data,
    read_config,
)
from merlin_cowclip.workflows.training.stopping import Stopping

with quiet_imports():
    from merlin_cowclip.models.ctr_block import embeddings_of
    from merlin_cowclip.plugins import CowClipOptimizer, save_model, whole_tables
    from merlin_cowclip.plugins._tensorflow import mm, tf
    from merlin_cowclip.plugins.optimizers.state import state_of, weights_of
    from merlin_cowclip.workflows.training.checkpoint import Checkpoints
    from merlin_cowclip.workflows.training.loader import Loader
    from merlin_cowclip.workflows.training.trainer import Trainer, clip_sentence


def check_trainable(data: PreparedData, config: TrainConfig, drop_last: bool = False) -> Loader:
    """Refuse data that a configuration cannot be trained on; returns the training part's loader."""
    if config.patience is not None:
        data.require("valid")
    ranks = rank_info()
    return Loader(
        data,
        "train",
        batch_size=config.batch_size,
        seed=config.seed,
        rank=ranks.rank,
        ranks=ranks.size,
        drop_last=drop_last,
    )


def train(
    data: PreparedData,
    config: TrainConfig,
    out: str | Path,
    *,
    checkpointing: CheckpointConfig | None = None,
    max_minutes: float | None = None,
    warm_start: str | Path | None = None,
    keep_optimizer: bool = False,
    listeners: Sequence[Listener] = (),
    progress: bool = True,
) -> Run:
    """Train a model on `data`, in the run folder `out`, which is made now.

    After each epoch the exact AUC, log loss and calibration on the validation part are measured
    (None without one) and a checkpoint is written. The test part is measured once, after training:
    with patience by the best epoch of the validation part, else by the last one. An interrupt
    before the first checkpoint, or an error before training, removes the folder. Later it stays, an
    error is in `failed.json`, and `resume` continues, bit-identical to an uninterrupted run. The
    process's random seeds are set.

    Args:
      data: the prepared folder.
      config: what to train.
      out: the run folder.
      checkpointing: when to take checkpoints and to log, and what stays.
      max_minutes: after how long to stop, saved.
      warm_start: a finished run on the same columns and vocabulary, whose weights to begin with.
      keep_optimizer: whether to begin with its optimizer's state, too: moments and step counts.
      listeners: called after steps and epochs, such as `log_to("mlflow")`.
      progress: whether to show bars and a line per epoch.

    Raises:
      UserError: `out` exists, the time is not positive, the batch is larger than the training
        part, or a loss, gradient or weight is not finite.
      Stopped: Ctrl-C, SIGTERM, SIGHUP or the end of the time; all is saved. A second signal
        has its previous handler.
    """
    out = Path(out)
    with raise_on_any_rank():
        stopping = Stopping(max_minutes)
        check_offered(config)
        refuse_pattern(out, "run")
        refuse_existing(out)
        loader = check_trainable(data, config)
        more: dict[str, Any] = {"drop_last": rank_info().size > 1, "warm_start": None}
        if warm_start is not None:
            check_warm_start(data, config, warm_start, keep_optimizer)
            more["warm_start"] = [str(Path(warm_start).resolve()), keep_optimizer]
        record = described(data, config, checkpointing or CheckpointConfig(), **more)
    check_alike(record)
    with contextlib.ExitStack() as stack:
        with raise_on_any_rank():
            if is_rank_zero():
                with all_or_nothing(out) as folder:
                    shutil.copytree(data.path / "workflow", folder / "workflow")
                    shutil.copyfile(data.path / SCHEMA, folder / SCHEMA)
                    write_json(folder / CONFIG, record)
                stack.enter_context(locked(out / LOCK, wait=False))
        with _left_behind(out, new=True), as_user_errors(data, out):
            return _train(config, loader, out, record, stopping, listeners, progress)


def check_warm_start(
    data: PreparedData, config: TrainConfig, run: str | Path, keep_optimizer: bool
) -> None:
    """Refuse a run whose weights do not fit."""
    other = Run.open(run)
    other.check_vocabulary(data, grown=True)
    if keep_optimizer and data.cardinalities != other.config["cardinalities"]:
        raise UserError("--keep-optimizer needs the ids of the run, and no more. Leave it out")
    was = other.train_config()
    if (config.model, config.network_options) != (was.model, was.network_options):
        raise UserError(f"{run} has another network. Leave its options and --config out")
    if config.tables == "sharded":
        raise UserError("a warm start needs replicated tables. Leave --tables out")
    schedules = [
        schedule
        for one in (config, was)
        for schedule in (one.dense_schedule, one.embedding_schedule)
        if schedule not in (None, CONSTANT_SCHEDULE)
    ]
    same = config.update == was.update and bool(config.warmup_epochs) == bool(was.warmup_epochs)
    # The state has the loss scale, and the averages.
    same = same and (config.precision, config.scaled_ema) == (was.precision, was.scaled_ema)
    if keep_optimizer and (not same or schedules):
        raise UserError(
            f"--keep-optimizer needs the update mode of {run}, {was.update}, its warm-up, ema and "
            f"precision, {was.precision}, and no schedules in either run, because steps go on "
            "counting. Leave it out, or change these"
        )


def _warm_start(
    run: Run, model: mm.Model, optimizer: CowClipOptimizer, *, keep_optimizer: bool
) -> None:
    """Give a network that is built the weights of a finished run's default checkpoint.

    With `keep_optimizer` also the optimizer's state with its number of steps.
    """
    if keep_optimizer:
        optimizer.create_slots(model.trainable_variables)
        run.checkpoint().read(state_of(model, optimizer))
        return
    trained = run.model()  # deferred: with the updates that its rows had missed
    weights, tables = weights_of(trained), embeddings_of(trained)
    layers = {layer.table.ref(): layer for layer in embeddings_of(model).values()}
    for name, variable in weights_of(model).items():
        if variable.shape == weights[name].shape:
            variable.assign(weights[name])
            continue
        mine = layers[variable.ref()]  # new ids follow those of their field
        other, values = tables[mine.name], variable.numpy()
        for field, size in other.cardinalities.items():
            first, start = mine.first_row[field], other.first_row[field]
            values[first : first + size] = other.table[start : start + size].numpy()
        variable.assign(values)


def resume(
    run: str | Path,
    *,
    epochs: int | None = None,
    data: str | Path | Sequence[str | Path] | None = None,
    max_minutes: float | None = None,
    listeners: Sequence[Listener] = (),
    progress: bool = True,
) -> Run:
    """Resume a run that was stopped or killed, from its last whole checkpoint.

    Args:
      run: its folder.
      epochs: more than the run was to have; a finished run then continues.
      data: where its folders are now, if they were moved.
      max_minutes: after how long to stop again.
      listeners: as of `train`; those of the stopped run are not kept.
      progress: whether to show bars and a line per epoch.

    With other versions or on another machine the last digits may differ.

    Raises:
      UserError: no run, or one that is finished, that another process trains, whose data has
        changed, or whose last checkpoint is damaged.
      Stopped: as `train`.
    """
    path, stored = Path(run), None
    with contextlib.ExitStack() as stack:
        with raise_on_any_rank():
            stopping = Stopping(max_minutes)
            if is_rank_zero():
                stored = read_config(path)
                stack.enter_context(locked(path / LOCK, wait=False))
        before = gather_objects(stored)[0]
        with raise_on_any_rank():
            config, loader, record = _reopened(before, path, data, epochs)
        check_alike(record)
        with _left_behind(path), as_user_errors(loader.data, path):
            return _train(config, loader, path, record, stopping, listeners, progress)


def _reopened(
    before: Mapping[str, Any], run: Path, moved: Any, epochs: int | None
) -> tuple[TrainConfig, Loader, dict[str, Any]]:
    """What a run trains from now on, and its new `config.json`; `before` is its `config.json`."""
    was = config_in(before)
    config = with_epochs(was, epochs, run)
    if (run / RESULT).exists():
        ended = len(read_json(run / RESULT)["epochs"])
        if config == was or ended < was.epochs:
            remedy = f"To train longer: {how_to_resume(run)} --epochs N"
            if ended < was.epochs:
                remedy = "Early stopping ended it. Train another run with a larger --patience"
            raise UserError(f"{run} is finished after {ended} of {was.epochs} epochs. {remedy}")
        if not Checkpoints(run / CHECKPOINTS).steps():
            raise UserError(
                f"a finished run resumes from its last checkpoint. Received: {run}, without one. "
                "Put it back, or train another run"
            )
    data = open_data(moved or before["data"], how_to_resume(run, moved=True))
    drop_last = before["drop_last"] or not data.rows["train"] % config.batch_size
    if rank_info().size > 1 and not drop_last:
        raise UserError(
            f"{run} resumes in one process only: several ranks would leave out the last, smaller "
            "batch of each epoch"
        )
    more = {"drop_last": drop_last, "warm_start": before["warm_start"]}
    now = described(data, config, CheckpointConfig(**before["checkpointing"]), **more)
    for key in ("data_sha256", "cardinalities", *COLUMNS):
        if before[key] != now[key]:
            raise UserError(
                f"{run} was begun with {key} {clipped(repr(before[key]))}, and {data.path} has "
                f"{clipped(repr(now[key]))}. Use the same data, or train another run"
            )
    return config, check_trainable(data, config, drop_last), now


def with_epochs(config: TrainConfig, epochs: int | None, run: Path) -> TrainConfig:
    """The configuration with more epochs; `None`: as it is."""
    if epochs is None or epochs == config.epochs:
        return config
    both: list[Any] = [config.dense_schedule, config.embedding_schedule]
    decays = any(one and one["epochs"] is None and one["to"] != 1 for one in both)
    if epochs < config.epochs or decays:
        raise UserError(
            "epochs of a run can only be raised, and only where no learning rate falls over all of "
            f"them. Received: {epochs}, for {config.epochs} in {run / CONFIG}. Leave them out, or "
            "train another run"
        )
    return dataclasses.replace(config, epochs=epochs)


def _train(
    config: TrainConfig,
    loader: Loader,
    run: Path,
    record: dict[str, Any],
    stopping: Stopping,
    listeners: Sequence[Listener],
    progress: bool,
) -> Run:
    """From the last checkpoint, or the beginning, to the result; see `Trainer.restore_last`."""
    with raise_on_any_rank():
        if config.tables == "sharded" and not run.is_dir():
            raise UserError(
                f"sharded tables need a run folder that all ranks see, where each writes its rows: "
                f"{run} is not there. Name a place on a shared disk, or leave --tables out"
            )
    checkpointing = CheckpointConfig(**record["checkpointing"])
    with raise_on_any_rank():
        trainer = Trainer(
            config, loader, stopping, run=run, checkpointing=checkpointing, show=progress
        )
    trainer.restore_last()
    with raise_on_any_rank():
        if is_rank_zero():
            remove(run / RESULT, run / FAILED, *run.glob(".*.partial"))  # of processes before
            write_json(run / CONFIG, record)
    if record["warm_start"] and not trainer.step:
        other, keeps = record["warm_start"]
        with raise_on_any_rank():
            _warm_start(Run.open(other), trainer.model, trainer.optimizer, keep_optimizer=keeps)
        trainer.optimizer.broadcast()
    sizes = count_parameters(trainer.model, trainer.optimizer)
    if progress:
        resumed = f", resumed after update {trainer.step:,}" if trainer.step else ""
        print(
            f"{loader.rows:,} rows, {len(loader):,} steps per epoch, "
            f"{sizes['embedding']:,} parameters in embedding tables and "
            f"{sizes['network']:,} in the network: {run}{resumed}",
            flush=True,
        )
    with listening(listeners, run, record) as trainer.listeners:
        try:
            with stopping:
                for _ in trainer.epochs():
                    pass
        except Exception as error:
            step, epoch = trainer.step, -(-trainer.step // len(loader)) or 1
            if is_rank_zero():
                record = {"error": str(error) or repr(error), "step": step, "epoch": epoch}
                with contextlib.suppress(OSError):  # the disk may be full
                    write_json(run / FAILED, {**record, "time": time.strftime("%FT%T%z")})
            raise
        # By sums over all ranks, of sharded tables.
        clip = clip_sentence(trainer.statistics.total(), config.clip)
        result: dict[str, Any] | None = None
        which, quality = trainer.finish()
        with whole_tables(trainer.model), raise_on_any_rank():
            if is_rank_zero():
                if checkpointing.saved_model:
                    remove(run / "model")  # half a one, if a process was killed here before
                    save_model(trainer.model, run / "model")
                epochs = trainer.progress.epochs
                seconds = sum(epoch["seconds"] for epoch in epochs)
                result = {
                    "format": FORMAT_VERSION,
                    "best_epoch": trainer.progress.best,
                    "best_step": trainer.best_step,
                    "last_step": trainer.step,
                    "epochs": epochs,
                    "samples_per_second": loader.rows_per_epoch * len(epochs) / seconds,
                    "train_seconds": seconds,
                    **quality,
                    **{"checkpoint": which, "parameters": sizes, "clip": clip, "config": record},
                    "manifest": manifest_of(run, without=(EVENTS, CHECKPOINTS, LOCK)),
                }
                write_json(run / RESULT, result)
                result = read_json(run / RESULT)
        result = gather_objects(result)[0]  # other ranks may have other disks
    notify(trainer.listeners, "on_end", result)
    return Run(run, result)


@contextlib.contextmanager
def _left_behind(run: Path, *, new: bool = False) -> Iterator[None]:
    """An error says how to resume the run; a new run in which nothing was trained is removed."""
    try:
        yield
    except BaseException as error:
        if not is_rank_zero():  # the run is the first rank's
            raise
        is_saved = bool(Checkpoints(run / CHECKPOINTS).steps())
        if new and not is_saved and not (run / FAILED).exists():
            remove(run)
        diverged = NotFiniteError in (type(error), type(error.__cause__))
        if isinstance(error, UserError) and is_saved and not diverged:
            how = f"{str(error).rstrip('.')}. Resume with: {how_to_resume(run)}"
            raise type(error)(how) from error.__cause__
        raise


@contextlib.contextmanager
def as_user_errors(data: PreparedData, out: Path) -> Iterator[None]:
    """Make one sentence of a full disk, lack of memory or another rank's end."""
    try:
        yield
    except (OSError, tf.errors.OpError) as error:
        if any(os.strerror(number) in str(error) for number in FULL_DISK):
            what = f"no disk space left for {out}. Free some, or name a folder on another disk"
        elif "Horovod has been shut down" in str(error):
            what = (
                "another rank has ended; what it said is on the terminal, or in its machine's log"
            )
        elif isinstance(error, tf.errors.ResourceExhaustedError):
            what = f"out of memory: {clipped(str(error))}. Choose a smaller batch size or network"
        else:
            PreparedData.open(data.path)  # what a loader met in a thread is TensorFlow's error
            raise
        raise UserError(what) from None


def count_parameters(model: mm.Model, optimizer: CowClipOptimizer) -> dict[str, int]:
    """Trainable weights: `embedding` (all rows of all tables, 1-wide ones too) and `network`."""
    tables = {spec.variable.ref(): spec.num_rows * spec.width for spec in optimizer.table_specs}
    others = [v for v in model.trainable_variables if v.ref() not in tables]
    network = sum(math.prod(variable.shape) for variable in others)
    return {"embedding": sum(tables.values()), "network": network}
