"""Fields of a configuration: each with its option on the command line, and its check."""

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


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false. Received: {value!r}")
    return value


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        **{"size": whole_number, "count": whole_number, "number": check_number},
        "positive": functools.partial(check_number, positive=True),
        **{"units": layer_units, "flag": _flag},
    }
)
"""By kind."""


def option(
    help: str,
    default: Any = None,
    *,
    group: str,
    kind: str = "text",
    choices: Sequence[str] = (),
    check: Check | None = None,
    **texts: str,
) -> Any:
    """A field of a configuration.

    Args:
      help: what it is, and in which unit.
      default: `None` where it depends on other fields.
      group: its heading in a command's help.
      kind: how its text is read (`commands.options.TYPES`) and, by default, checked (`CHECKS`).
      choices: all values, where they are names.
      check: of what is not `None`.
      texts: for a command's help: `symbol`, the paper's; `shown`, the default in words; `metavar`;
        `flag`, the option's name where it is not the field's.
    """
    check = check or CHECKS.get(kind)
    found = {"help": help, "group": group, "kind": kind, "choices": choices, "check": check}
    none = dict.fromkeys(("symbol", "shown", "metavar", "flag"), "")
    return dataclasses.field(default=default, metadata={**found, **none, **texts})


def check_fields(instance: Any) -> None:
    """Check the fields of a frozen dataclass, each by its own check, and let them be plain."""
    make_plain(instance)
    for field in dataclasses.fields(instance):
        name, value = field.name, getattr(instance, field.name)
        choices, check = field.metadata["choices"], field.metadata["check"]
        try:
            if value is None and field.default is not None:
                raise ValueError(f"{name} must have a value. Received: None. Leave it out")
            if value is not None and choices and value not in choices:
                known = ", ".join(choices)
                raise ValueError(f"{name} must be one of {known}. Received: {name}={value!r}")
            if value is not None and check:
                object.__setattr__(instance, name, check(name, value))
        except ValueError as error:
            raise UserError(str(error)) from None


def refuse_unknown(what: str, values: Mapping[str, Any], known: Sequence[str]) -> None:
    """Refuse a key that is none, and what has no keys."""
    if not isinstance(values, Mapping):
        raise UserError(f"{what} must be values by name. Received: {values!r}")
    if unknown := [key for key in values if key not in known]:
        raise UserError(
            f"{what} has the keys {', '.join(known)}. Received: {str(unknown[0])!r}. Correct it, "
            "or take it out"
        )
