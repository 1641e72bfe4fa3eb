"""Values of options that several commands take: numbers, one for each field, and schedules."""

from __future__ import annotations

import argparse
from typing import Any

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.learning_rates import SCHEDULES

_PARTS = ("dense", "embedding")


def add_schedules(parser: argparse.ArgumentParser) -> None:
    """The options that say how the learning rates fall."""
    for part in _PARTS:
        parser.add_argument(
            f"--{part}-schedule",
            metavar="NAME[:KEY=VALUE,…]",
            help=f"how that η falls: {', '.join(SCHEDULES)}, as in cosine:to=0.1, "
            "exponential:rate=0.5,epochs=1 or steps:5=0.1,8=0.01; constant (it stays): not as a "
            "tune or --config says",
        )


def schedules_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, by `TrainConfig`'s names.

    Raises:
        UserError: a value that is no number.
    """
    given = {part: getattr(arguments, f"{part}_schedule") for part in _PARTS}
    return {
        f"{part}_schedule": _schedule(f"--{part}-schedule", text)
        for part, text in given.items()
        if text is not None
    }


def numbers(text: str) -> list[int]:
    """The value of --batch-sizes and --seeds."""
    return [int(number) for number in text.split(",")]


def by_field(option: str, text: str, of: str = "field") -> dict[str, str]:
    """The value of "genres=sum,tags=mean", or of other names than fields'.

    Raises:
        UserError: it is none.
    """
    found: dict[str, str] = {}
    for part in text.split(","):
        field, equals, value = part.rpartition("=")
        if not equals or not field or field in found:
            raise UserError(
                f"{option} must be {of.upper()}=VALUE,… with each {of} once. "
                f"Received: {text!r}, at {part!r}"
            )
        found[field] = value
    return found


def _schedule(option: str, text: str) -> dict[str, Any] | None:
    """The value of "cosine:to=0.1", of "steps:5=0.1,8=0.01", or of "constant", which is none."""
    if text == "constant":
        return None
    name, colon, rest = text.partition(":")
    pairs = by_field(option, rest, "epoch" if name == "steps" else "name") if colon else {}
    try:
        if name == "steps":
            at = {"at": [float(epoch) for epoch in pairs]} if pairs else {}
            return {"name": name, **at, "factors": [float(value) for value in pairs.values()]}
        return {"name": name, **{key: float(value) for key, value in pairs.items()}}
    except ValueError:
        raise UserError(f"{option} must have numbers as its values. Received: {text!r}") from None
