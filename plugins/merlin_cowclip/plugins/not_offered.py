"""Options of Keras's optimizers that ours do not have: setting one is refused, never ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class RefusesOptions:
    """Base of an optimizer: attributes named in `not_offered` can only be set to what is "off"."""

    not_offered: ClassVar[Mapping[str, str]] = {}
    """Option → what to do instead, a sentence."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.not_offered and value is not None and value is not False and value != []:
            raise ValueError(
                f"A {type(self).__name__} has no {name}. Received: {name}={value!r}. "
                f"{self.not_offered[name]}"
            )
        super().__setattr__(name, value)
