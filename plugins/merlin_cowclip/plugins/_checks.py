# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments, options and names, for all packages. Pure Python."""

from __future__ import annotations

import dataclasses
import keyword
import numbers
import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, TypeGuard


def check_path(name: str, path: str | os.PathLike[str]) -> None:
    """Refuse a path with [ or a backslash: TensorFlow finds no file there that it has written."""
    whole = os.path.realpath(path)
    if sign := next((sign for sign in "[\\" if sign in whole), None):
        raise ValueError(
            f"{name} must be without [ and \\, for which TensorFlow reads it as a pattern, and "
            f"finds no file. Received: {whole}, with {sign}. Choose another"
        )


def is_integer(
    value: Any, least: int | None = None, most: int | None = None
) -> TypeGuard[numbers.Integral]:
    """Whether `value` is a whole number from `least` to `most`, NumPy's say, and no bool."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and (least is None or value >= least) and (most is None or value <= most)


def plain(value: Any) -> Any:
    """A number or bool, NumPy's say, as Python's, which JSON takes; so in lists and dicts."""
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    return value.item() if getattr(value, "ndim", None) == 0 else value


def make_plain(instance: Any) -> None:
    """Let the fields of a frozen dataclass be `plain`."""
    for field in dataclasses.fields(instance):
        object.__setattr__(instance, field.name, plain(getattr(instance, field.name)))


def integer_range(least: int, most: int | None = None) -> str:
    """Those numbers in words."""
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    return f"a whole number {limits}"


def integer(name: str, value: Any, most: int | None = None, *, least: int = 1) -> int:
    """`value`, if it is a whole number in this range; else a ValueError."""
    if not is_integer(value, least, most):
        positive = least == 1 and most is None
        wanted = "a positive whole number" if positive else integer_range(least, most)
        raise ValueError(f"{name} must be {wanted}. Received: {name}={value!r}")
    return int(value)


def layer_units(name: str, units: Any) -> tuple[int, ...]:
    """The units of an MLP's layers, at least one; a ValueError for anything else."""
    layers = isinstance(units, list | tuple) and units
    if not layers or not all(is_integer(u, 1) for u in layers):
        raise ValueError(
            f"{name} must be at least one positive whole number of units. Received: "
            f"{name}={units!r}"
        )
    return tuple(map(int, layers))


_SAVED = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def unsavable_names(names: Iterable[str]) -> list[str]:
    """Feature names that a SavedModel's signature cannot take: Keras finds out after the training.

    Names are letters, digits, `_`, `.` and `-` after a letter or digit, and no word of Python's. No
    two may differ in `.`, `-` and `_` alone, in `arg_` before a digit, or in case.
    """
    refused, taken = [], set[tuple[str, str]]()
    for name in names:
        argument = re.sub(r"^(?=\d)", "arg_", re.sub(r"[.-]", "_", name))  # TensorFlow's name of it
        as_taken = {("argument", argument), ("tensor", name.lower())}
        reserved = keyword.iskeyword(name) or name == "self"
        if reserved or taken & as_taken or not _SAVED.fullmatch(name):
            refused.append(name)
        taken |= as_taken
    return refused


KERAS_OPTIONS = {
    "amsgrad": "It is Adam as the paper has it.",
    "decay": "Use a Keras schedule: learning_rate, dense_schedule or embedding_schedule.",
    "weight_decay": "Tables have hyperparameters.l2; dense weights take a kernel_regularizer.",
    "use_ema": "Give CowClipOptimizer.for_model ema=….",
}


class RefusesOptions:
    """Base of an optimizer that refuses options of Keras, and to change what it was made with."""

    not_offered: ClassVar[Mapping[str, str]] = KERAS_OPTIONS  # → what to do; of all bases
    settled: ClassVar[Collection[str]] = ()  # attributes that only the constructor sets

    def __setattr__(self, name: str, value: Any) -> None:
        refused = (vars(kind).get("not_offered", {}).get(name) for kind in type(self).__mro__)
        advice = next(filter(None, refused), None)
        if advice and value is not None and value is not False and value != []:
            raise ValueError(
                f"A {type(self).__name__} has no {name}. Received: {name}={value!r}. {advice}"
            )
        if name in self.settled and name in self.__dict__:
            raise ValueError(f"{name} cannot change after construction. Make another optimizer.")
        super().__setattr__(name, value)
