"""Attributes of our optimizers that cannot be set: it is refused, never ignored or half done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class RefusesOptions:
    """Base of an optimizer: which attributes cannot be set, and which but once.

    Keras's options in `not_offered` can only be set to what is "off".
    """

    not_offered: ClassVar[Mapping[str, str]] = {}
    """Option → what to do instead, a sentence."""
    settled: ClassVar[Mapping[str, str]] = {}
    """What the constructor settles → what to do instead, a sentence."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.not_offered and value is not None and value is not False and value != []:
            raise ValueError(
                f"A {type(self).__name__} has no {name}. Received: {name}={value!r}. "
                f"{self.not_offered[name]}"
            )
        if name in self.settled and name in self.__dict__:
            raise ValueError(
                f"{name} of a {type(self).__name__} must stay what it was made with. Received: "
                f"{name}={value!r}. {self.settled[name]}"
            )
        super().__setattr__(name, value)
