"""What a field of a configuration says of itself: its option on the command line, and its check."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from merlin_cowclip.plugins._checks import layer_units, make_plain, whole_number
from merlin_cowclip.plugins.scaling import check_number
from merlin_cowclip.workflows.errors import UserError

Check = Callable[[str, Any], Any]
"""(name, value) → the value as the configuration has it; a ValueError for one out of range."""


def option(
    default: Any,
    help: str,
    *,
    group: str,
    kind: str = "text",
    symbol: str = "",
    choices: Sequence[str] = (),
    check: Check | None = None,
    shown: str = "",
    metavar: str = "",
    flag: str = "",
) -> Any:
    """A field of a configuration.

    Args:
      default: `None` where it depends on other fields.
      help: what it is, and in which unit.
      group: the heading that it has in a command's help.
      kind: how its text is read (`commands.options.TYPES`) and, by default, checked (`CHECKS`).
      symbol: the paper's.
      choices: all values, where they are names.
      check: of what is not `None`.
      shown: the default in words, where `default` does not say it.
      metavar: what stands for the value in a command's help.
      flag: the option's name, where it is not the field's.
    """
    if check is None:
        check = one_of(choices) if choices else CHECKS.get(kind)
    metadata = {
        **{"help": help, "group": group, "kind": kind, "symbol": symbol, "choices": choices},
        **{"check": check, "shown": shown, "metavar": metavar, "flag": flag},
    }
    return dataclasses.field(default=default, metadata=metadata)


def one_of(choices: Sequence[str]) -> Check:
    """A check that a value is one of these."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            known = ", ".join(choices)
            raise ValueError(f"{name} must be one of {known}. Received: {name}={value!r}")
        return value

    return check


def yes_or_no(name: str, value: Any) -> bool:
    """A check of a flag."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false. Received: {value!r}")
    return value


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        **{"size": whole_number, "count": whole_number, "number": check_number},
        "positive": functools.partial(check_number, positive=True),
        **{"units": layer_units, "flag": yes_or_no},
    }
)
"""By kind."""


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass, each by its own check, and let them be plain."""
    make_plain(instance)
    for field in dataclasses.fields(instance):
        check, value = field.metadata["check"], getattr(instance, field.name)
        if value is None and field.default is not None:
            raise ValueError(f"{field.name} must have a value. Received: None. Leave it out")
        if value is not None and check is not None:
            object.__setattr__(instance, field.name, check(field.name, value))


def refuse_unknown(what: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a key that is none, and what has no keys."""
    if not isinstance(values, Mapping):
        raise UserError(f"{what} must be values by name. Received: {values!r}")
    if unknown := [key for key in values if key not in known]:
        raise UserError(
            f"{what} has the keys {', '.join(known)}. Received: {str(unknown[0])!r}. Correct it, "
            "or take it out"
        )
