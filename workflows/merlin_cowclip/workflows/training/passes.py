"""Which epoch the passes over a loader are of, and a warning where two have the same order."""

from __future__ import annotations

import threading
import warnings


class Passes:
    """Passes over a loader: all are of the epoch that was set last before their first batch."""

    def __init__(self, *, epochs_differ: bool) -> None:
        self._epochs_differ = epochs_differ
        self._epoch = 0
        self._repeats = 0  # passes that may have the order of the last one without a warning
        self._passed: int | None = None  # the epoch of the last pass that came to its end
        self._lock = threading.Lock()

    @property
    def epoch(self) -> int:
        """That of passes that begin now."""
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        with self._lock:
            self._epoch = epoch

    def begin(self) -> int:
        """A pass begins; its epoch."""
        with self._lock:
            epoch, again = self._epoch, self._passed == self._epoch
            allowed = self._repeats > 0
            self._repeats -= again and allowed
        if again and self._epochs_differ and not allowed:
            warnings.warn(
                f"this pass over the loader has the order of the last one, that of epoch {epoch}. "
                "In a fit of several epochs, give it the callback FollowEpochs(loader), or train "
                "on loader.dataset(epochs=None)",
                stacklevel=2,
            )
        return epoch

    def end(self, epoch: int) -> None:
        """A pass of that epoch came to its end."""
        self._passed = epoch

    def allow_repeats(self, repeats: int) -> None:
        """That many more passes may have the order of the one before without a warning."""
        self._repeats = repeats

    def forget(self) -> None:
        """No repeat is allowed any longer; but the next pass may be as the last one."""
        self._repeats, self._passed = 0, None
