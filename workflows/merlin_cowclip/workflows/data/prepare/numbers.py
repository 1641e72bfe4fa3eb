# SPDX-License-Identifier: Apache-2.0
"""Numbers to [0, 1]: the one place for training data, raw rows and requests."""

from __future__ import annotations

from typing import Any

import numpy as np


def scaled(numbers: Any, low: float, high: float) -> Any:
    """(numbers - low) / (high - low), in float64, of an array or a column of any library.

    A range of length 0 is made longer, so that its one value becomes 0.
    """
    high = high if high > low else low + max(1.0, abs(low))
    return (numbers - low) / (high - low)


def unit_range(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    """Numbers scaled to [0, 1] by a range and clipped, n, float32; NaN counts as 0 before.

    As FillMissing, UnitRange and Clip do it in the saved workflow, to the bit.
    """
    with np.errstate(over="ignore"):  # beyond the range: clipped
        units = scaled(np.where(np.isnan(numbers), 0.0, numbers), low, high)
        return np.clip(units.astype(np.float32), 0.0, 1.0)
