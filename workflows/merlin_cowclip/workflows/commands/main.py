"""The command `merlin-cowclip`: arguments in, exit codes out; the work is done elsewhere.

A module per group of commands adds them, with their arguments and what runs them. TensorFlow takes
seconds to import: what runs a command imports what it needs, after the arguments parse. What the
exit codes mean, and how every command ends in one sentence: `endings.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from merlin_cowclip.workflows.commands import (
    data,
    demo,
    endings,
    prediction,
    serving,
    studying,
    training,
    tuning,
)
from merlin_cowclip.workflows.commands.parser import Parser
from merlin_cowclip.workflows.launched import check_alone

PROGRAM = "merlin-cowclip"
GROUPS = (data, training, tuning, prediction, serving, studying, demo)  # as --help lists them


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments, left = command_line().parse_known_args(argv)
    of_command = f"{PROGRAM} {arguments.command}"
    at = left.index("--") if "--" in left else len(left)
    if "more_in" in arguments and not any(word.startswith("-") for word in left[:at]):
        # What follows an option: argparse fills a list that may be empty before the first.
        getattr(arguments, arguments.more_in).extend([*left[:at], *left[at + 1 :]])
    elif left:
        Parser(prog=of_command).error(f"unrecognized arguments: {' '.join(left)}")

    def work() -> None:
        if arguments.command != "train":
            check_alone(arguments.command)
        arguments.run(arguments)

    return endings.run(of_command, work)


def command_line() -> Parser:
    """The parser of all commands; what it returns holds the `command` and what will `run` it."""
    parser = Parser(
        prog=PROGRAM,
        description="Train click-through-rate models with large batches and CowClip on NVIDIA "
        "Merlin.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in GROUPS:
        group.add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
