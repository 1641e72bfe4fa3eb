# SPDX-License-Identifier: Apache-2.0
"""Make the next item in a thread while one is used."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def prefetch(items: Iterator[T]) -> Iterator[T]:
    """The same items, of which none is None; one more is held."""
    with ThreadPoolExecutor(1, "merlin-cowclip-prefetch") as reader:
        coming = reader.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = reader.submit(next, items, None)
            yield item
