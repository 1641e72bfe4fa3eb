# SPDX-License-Identifier: Apache-2.0
"""Listeners of a training run: CSV files, TensorBoard, MLflow, W&B, and those of users."""

from __future__ import annotations

import contextlib
import csv
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from merlin_cowclip.workflows.errors import UserError, clipped
from merlin_cowclip.workflows.folders import replacing
from merlin_cowclip.workflows.training.ranks import is_rank_zero, raise_on_any_rank

METRICS, FIELDS, NORMS, EVENTS = "metrics.csv", "fields.csv", "norms.csv", "logs"

Values = Mapping[str, Any]
Tables = Mapping[str, Sequence[Values]]


class Listener:
    """Receives the numbers of a run: override the methods that you need, pass it to `train`.

    Only rank 0 calls it. An exception ends training as any other error does, except for one from
    `on_end(None)`, which is ignored.
    """

    def on_begin(self, run: Path, config: Values) -> None:
        """Training begins or resumes in the folder `run`; `config` is its `config.json`."""

    def on_step(self, step: int, values: Values) -> None:
        """Every `log_every` steps: TensorBoard's scalars by tag, such as "all/loss"."""

    def on_epoch(self, step: int, row: Values, tables: Tables) -> None:
        """An epoch ended: its line of `metrics.csv`, and all lines so far of each CSV file."""

    def on_end(self, result: Values | None) -> None:
        """Training ended with this `result.json`; None if it failed or was stopped."""


def notify(listeners: Sequence[Listener], method: str, *arguments: Any) -> None:
    """Call a method of all listeners on rank 0; an exception then ends all ranks."""
    with raise_on_any_rank(), contextlib.ExitStack() as calls:
        for one in reversed(listeners if is_rank_zero() else ()):
            calls.callback(getattr(one, method), *arguments)


@contextlib.contextmanager
def listening(users: Sequence[Listener], run: Path, config: Values) -> Iterator[Sequence[Listener]]:
    """Begin training for all listeners, users' and own; an error within it ends it for them."""
    listeners = [_RunFiles(), *users]
    notify(listeners, "on_begin", run, config)
    try:
        yield listeners
    except BaseException:
        for one in listeners if is_rank_zero() else ():
            with contextlib.suppress(Exception):  # the first error counts
                one.on_end(None)
        raise


class _RunFiles(Listener):
    """Writes the CSV files of a run, each whole, and TensorBoard's events."""

    def on_begin(self, run: Path, config: Values) -> None:
        from tensorboard.summary import Writer  # type: ignore[import-untyped]

        self._run, self._events = run, Writer(str(run / EVENTS))  # tf.summary leaks memory

    def on_step(self, step: int, values: Values) -> None:
        for tag, value in values.items():
            self._events.add_scalar(tag, value, step)
        self._events.flush()

    def on_epoch(self, step: int, row: Values, tables: Tables) -> None:
        for name, rows in tables.items():
            with replacing(self._run / name) as new, new.open("w", -1, "utf-8", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        self.on_step(step, _numbers("all/", {n: row[n] for n in row if n.startswith("valid_")}))

    def on_end(self, result: Values | None) -> None:
        self._events.close()


def _numbers(prefix: str, values: Values) -> dict[str, float]:
    return {f"{prefix}{n}": of for n, of in values.items() if isinstance(of, int | float)}


class _Service(Listener):
    """A tracking service; `logs/` has the id of its run, which a resumed run continues."""

    def __init__(self, begin: Callable[..., Any], name: str) -> None:
        self._begin, self._name, self._package = begin, name, importlib.import_module(name)

    def on_begin(self, run: Path, config: Values) -> None:
        file = run / EVENTS / f"{self._name}.txt"
        known = file.read_text(encoding="utf-8") if file.exists() else None
        begun = self._call(self._begin, self._package, known, run.name, config)
        service_id, self._log, self._end = begun
        file.write_text(service_id, encoding="utf-8")

    def on_step(self, step: int, values: Values) -> None:
        self._call(self._log, step, values)

    def on_epoch(self, step: int, row: Values, tables: Tables) -> None:
        self.on_step(step, _numbers("epoch/", row))

    def on_end(self, result: Values | None) -> None:
        if result is not None:
            self.on_step(result["last_step"], _numbers("result/", result))
        self._call(self._end, int(result is None))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raise UserError(f"cannot log to {self._name}: {clipped(str(error))}") from error


def _mlflow(mlflow: Any, known: str | None, name: str, config: Values) -> tuple[Any, ...]:
    run_id = mlflow.start_run(known, run_name=name, nested=True).info.run_id
    if known is None:  # parameters of a run cannot change
        scaled = {f"scaled.{name}": value for name, value in config["scaled"].items()}
        mlflow.log_params({n: str(of)[:500] for n, of in {**config, **scaled}.items()})

    def log(step: int, values: Values) -> None:
        metrics = [(re.sub(r"[^\w./ -]", "_", name), value) for name, value in values.items()]
        for first in range(0, len(metrics), 1000):  # the most in one call
            mlflow.log_metrics(dict(metrics[first : first + 1000]), step=step)

    def end(exit_code: int) -> None:
        with contextlib.redirect_stdout(sys.stderr):  # it prints a link
            mlflow.end_run("FAILED" if exit_code else "FINISHED")

    return run_id, log, end


def _wandb(wandb: Any, known: str | None, name: str, config: Values) -> tuple[Any, ...]:
    how = {"name": name, "config": dict(config), "allow_val_change": True}
    run = wandb.init(id=known, resume="allow", **how)
    run.define_metric("*", step_metric="step")  # W&B's own steps cannot go back
    return run.id, lambda step, values: run.log({"step": step, **values}), run.finish


SERVICES = {"mlflow": _mlflow, "wandb": _wandb}  # by package; each returns id, log and end


def log_to(service: str) -> Listener:
    """Make a listener that logs to "mlflow" or "wandb", as its environment variables say.

    Raises:
      UserError: another name, or a missing package; from the listener, an error of the service.
    """
    if service not in SERVICES:
        raise UserError(f"service must be one of {', '.join(SERVICES)}. Received: {service!r}")
    try:
        return _Service(SERVICES[service], service)
    except ImportError as error:
        raise UserError(f"{service} needs its package: pip install {service} ({error})") from None
