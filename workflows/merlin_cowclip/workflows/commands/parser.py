"""How arguments are parsed, and refused: in one sentence, as the commands themselves refuse."""

from __future__ import annotations

import argparse
from typing import NoReturn, TypeAlias

from merlin_cowclip.workflows.commands import endings


class Parser(argparse.ArgumentParser):
    """One that refuses in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        sentence = endings.one_line(f"{self.prog}: error: {message}")
        self.exit(2, f"{sentence}. See '{self.prog} --help'\n")


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""What a group of commands adds its own to: ``commands.add_parser``."""
