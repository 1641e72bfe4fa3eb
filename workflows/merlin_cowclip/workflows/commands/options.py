# SPDX-License-Identifier: Apache-2.0
"""Commands and their options: how values are read, what help looks like, options of fields."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from merlin_cowclip.plugins.scaling import K
from merlin_cowclip.workflows.commands import endings
from merlin_cowclip.workflows.errors import AgreedError
from merlin_cowclip.workflows.training.ranks import launched

PATH = click.Path(path_type=Path)
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class Value(click.ParamType):
    """A value that `read` makes of a text, or a ValueError where it breaks the rule."""

    def __init__(self, name: str, read: Callable[[str], Any], rule: str) -> None:
        self.name, self._read, self._rule = name, read, rule  # the name is for help

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """What `read` makes of a text."""
        try:
            return self._read(value) if isinstance(value, str) else value
        except ValueError:
            received = endings.shortened(value, 60)
            self.fail(f"must be {self._rule}. Received: {received!r}", param, ctx)


def _size(text: str) -> int:
    """131072, or 128K."""
    return int(text[:-1]) * K if text[-1:] in ("K", "k") else int(text)


def _list_of(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(one) for one in text.split(",")]


def by_name(text: str, read: Callable[[str], Any] = str) -> dict[str, Any]:
    """The value of "genres=sum,tags=mean"."""
    pairs = [part.rpartition("=") for part in text.split(",")]
    values = {name: read(value) for name, _, value in pairs}
    if not all(name for name, _, _ in pairs) or len(values) < len(pairs):
        raise ValueError
    return values


def _one_or_by_name(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: by_name(text, read) if "=" in text else read(text)


def _schedule(text: str) -> str | dict[str, Any]:
    """The value of "cosine:to=0.1", or of "constant"."""
    name, colon, rest = text.partition(":")
    return {"name": name, **by_name(rest, float)} if colon else name


_COUNTS, _INTS = _one_or_by_name(int), _list_of(int)
SIZE = Value("N", _size, "a whole number, or one of 1,024s as in 128K")
SIZES = Value("N,…", _list_of(_size), "numbers as in 1K,8K")
COUNTS = Value("N|FIELD=N,…", _COUNTS, "a number, or numbers by field, each once: C3=10,C4=5")

TYPES: Mapping[str, Any] = {
    **{"text": click.STRING, "size": SIZE, "count": click.INT, "seed": click.INT},
    **{"positive": click.FLOAT, "number": click.FLOAT},
    "units": Value("UNITS,…", lambda t: _INTS(t) if t else [], "whole numbers as in 400,400"),
    "names": Value("NAME,…", _list_of(str), "names"),
    "combiner": Value("NAME", _one_or_by_name(str), "a name, or FIELD=NAME,… with each field once"),
    "schedule": Value("NAME", _schedule, "a name and numbers, each once: cosine:to=0.1"),
}
"""By the kind of a configuration's field."""

_METAVARS = {"count": "N", "seed": "N", "positive": "X", "number": "X"}


class Option(click.Option):
    """An option under a heading of its command's help, its `group`."""

    def __init__(self, *args: Any, group: str = "Options", **more: Any) -> None:
        super().__init__(*args, **more)
        self.group = group

    def get_help_extra(self, ctx: click.Context) -> Any:
        """Nothing: `option` writes it into the help."""
        return {}


class Command(click.Command):
    """A command that ends in one sentence and an exit code.

    `usage` is what follows its name in each way to call it: by default arguments and required
    options. With `on_ranks` several ranks may share its work.
    """

    def __init__(
        self,
        *args: Any,
        usage: Sequence[str] = (),
        example: str = "",
        on_ranks: bool = False,
        **more: Any,
    ) -> None:
        more |= {
            "context_settings": SETTINGS,
            "epilog": f"\b\nExample:\n  merlin-cowclip {example}",
        }
        super().__init__(*args, **more)
        self._usage, self._on_ranks = usage, on_ranks

    def invoke(self, ctx: click.Context) -> int:
        """Run it; returns the exit code."""
        if ctx.params.get("json"):
            ctx.params["quiet"] = True

        def work() -> None:
            ranks = launched().size
            if ranks > 1 and not self._on_ranks:
                raise AgreedError(
                    f"only train shares its work among several ranks. Received: {ctx.info_name} on "
                    f"{ranks}. Run it without horovodrun"
                )
            super(Command, self).invoke(ctx)

        return endings.run(ctx.command_path, work)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A line for each way to call it; what it needs is not in brackets."""
        needed = [p for p in self.params if isinstance(p, click.Option) and p.required]
        pieces = [str(p.metavar) for p in self.params if isinstance(p, click.Argument)]
        pieces += [f"{option.opts[0]} {option.metavar}" for option in needed]
        for line in self._usage or [" ".join(pieces)]:
            formatter.write_usage(ctx.command_path, f"{line} [OPTIONS]".strip())

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Those without a heading first."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)):
                groups.setdefault(getattr(param, "group", "Options"), []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def option(*names: str, default: Any = None, shown: str = "", **more: Any) -> Decorator:
    """An option whose help ends with its default: `default`, or `shown` in its place."""
    if shown or (default is not None and not more.get("is_flag") and not more.get("multiple")):
        more["help"] += f" (default: {shown or default})"
    if more.get("required"):
        more["help"] += " (required)"
    else:  # click 8.5 takes a default of None for a value
        more["default"] = default
    return click.option(*names, cls=Option, **more)


def path(name: str, metavar: str, help: str, **more: Any) -> Decorator:
    """An option that takes a path."""
    return option(name, type=PATH, metavar=metavar, help=help, **more)


def argument(name: str, **more: Any) -> Decorator:
    """An argument, which is called as help shows it."""
    return click.argument(name, **{"metavar": name.upper(), **more})


quiet = option("--quiet", is_flag=True, help="no progress bars, and only the last line")
as_json = option("--json", is_flag=True, help="print only the result, as JSON")


def fields(cls: type, *names: str, group: str = "", **shown: str) -> Decorator:
    """Options for fields of a dataclass, all or those named; what is not given is `None`.

    The fields are made by `training.configuration.option`; `group` is a heading instead of theirs,
    and `shown` has the defaults of some in words.
    """
    known = {field.name: field for field in dataclasses.fields(cls)}

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names or list(known)):
            function = _of_field(known[name], group, shown.get(name))(function)
        return function

    return add


def _of_field(field: dataclasses.Field[Any], group: str, shown: str | None) -> Decorator:
    of = field.metadata
    flag = (of["flag"] or field.name).replace("_", "-")
    text = f"{of['symbol']}, {of['help']}" if of["symbol"] else of["help"]
    if of["choices"]:
        text += f": {', '.join(of['choices'])}"
    more: dict[str, Any] = {"group": group or of["group"], "help": text}
    if of["kind"] == "flag":
        text = f"--{flag}" if field.default else f"--no-{flag}"
        return option(f"--{flag}/--no-{flag}", field.name, shown=text, **more)
    default = shown if shown is not None else of["shown"] or field.default
    metavar = of["metavar"] or ("NAME" if of["choices"] else _METAVARS.get(of["kind"]))
    more |= {"metavar": metavar, "type": TYPES.get(of["kind"])}
    return option(f"--{flag}", field.name, shown="" if default is None else str(default), **more)


def print_json(result: Any) -> None:
    """Print a result on stdout; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(json.loads(json.dumps(result), parse_constant=lambda _: None), indent=2))


def given(values: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """Those options that were given, of all or of those named."""
    names = values if names is None else names
    return {name: values[name] for name in names if values[name] is not None}
