# SPDX-License-Identifier: Apache-2.0
"""The command `merlin-cowclip`: arguments in, exit codes (`endings.py`) out.

TensorFlow takes seconds to import: a command imports what it needs after its arguments are read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from merlin_cowclip.workflows.commands import (
    data,
    demo,
    endings,
    prediction,
    serving,
    studying,
    training,
)
from merlin_cowclip.workflows.commands.options import SETTINGS

PROGRAM = "merlin-cowclip"
COMMANDS = (
    *(data.prepare, data.frequencies, data.adopt, training.train, studying.tune),
    *(prediction.evaluate, prediction.predict, serving.export),
    *(studying.batch_size, studying.sweep, studying.report, demo.demo_command),
)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order in which they are used."""
        return list(self.commands)


cli = _Group(
    PROGRAM,
    commands=COMMANDS,
    context_settings=SETTINGS,
    no_args_is_help=False,
    help="Train click-through-rate models with large batches and CowClip on NVIDIA Merlin.",
)
click.version_option(package_name=PROGRAM, message="%(prog)s %(version)s")(cli)


def help_of(name: str) -> str:
    """What a command says of itself."""
    above = click.Context(cli, info_name=PROGRAM, **SETTINGS)
    with click.Context(cli.commands[name], above, name, terminal_width=100) as ctx:
        return ctx.get_help()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        return cli.main(argv, PROGRAM, standalone_mode=False) or 0
    except click.UsageError as error:
        name = error.ctx.command_path if error.ctx else PROGRAM
        message = error.format_message()
        dot = "" if message.endswith((".", "?")) else "."
        endings.say(f"{name}: error: {message}{dot} See '{name} --help'")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
