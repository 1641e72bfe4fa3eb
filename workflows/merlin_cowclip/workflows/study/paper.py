"""The paper's numbers, as printed, to stand beside ours: by data set, row, and s = batch / 1K.

AUC in percent, log loss in nats, times in minutes of ten epochs on one V100. Table 1's rows without
scaling disagree with Table 2's (77.55 and 80.31 at 8K) as printed; its "Sqrt Scale" has the numbers
of Table 2's "Sqrt Scaling*". The log loss 0.4095 of Table 6 is as printed, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple


class Printed(NamedTuple):
    """One cell of a table of the paper; `None`: not printed, or "diverge"."""

    auc: float | None
    log_loss: float | None = None
    minutes: float | None = None


Table = Mapping[tuple[str, int], Printed]
"""(row of our study, s) → what is printed."""

BASELINE = 0
"""In place of s: the column "baseline" of Tables 3 and 4."""


def _table(
    factors: Sequence[int], rows: Mapping[str, tuple[Sequence[float], Sequence[float]]]
) -> Table:
    return MappingProxyType(
        {
            (row, s): Printed(auc, loss)
            for row, (aucs, losses) in rows.items()
            for s, auc, loss in zip(factors, aucs, losses, strict=True)
        }
    )


def _minutes(rows: Mapping[str, Sequence[float]]) -> Table:
    return MappingProxyType(
        {
            (row, 2**i): Printed(None, None, minutes)
            for row, times in rows.items()
            for i, minutes in enumerate(times)
        }
    )


def _aucs(rows: Mapping[str, Sequence[float]]) -> Table:
    return MappingProxyType(
        {(row, 2**i): Printed(auc) for row, aucs in rows.items() for i, auc in enumerate(aucs)}
    )


_TO_8K = (1, 2, 4, 8)
_TO_128K = (BASELINE, 1, 2, 4, 8, 16, 32, 64, 128)

PRINTED: Mapping[tuple[str, str], Table] = MappingProxyType(
    {
        # Table 1
        ("control", "criteo"): _aucs(
            {
                "full, none": (80.76, 80.61, 79.41, 77.55),
                "full, sqrt_star": (80.76, 80.75, 80.69, 80.55),
                "full, linear": (80.76, 80.77, 80.65, 80.46),
                "top-3, none": (74.97, 74.87, 74.77, 74.69),
                "top-3, sqrt_star": (74.97, 74.96, 74.95, 74.96),
                "top-3, linear": (74.97, 75.01, 74.95, 74.96),
            }
        ),
        # Table 2
        ("scaling-rules", "criteo"): _table(
            _TO_8K,
            {
                "none": ((80.76, 80.66, 80.48, 80.31), (0.4438, 0.4456, 0.4518, 0.4530)),
                "sqrt": ((80.76, 80.71, 80.59, 80.28), (0.4438, 0.4430, 0.4450, 0.4582)),
                "sqrt_star": ((80.76, 80.75, 80.69, 80.55), (0.4438, 0.4444, 0.4449, 0.4547)),
                "linear": ((80.76, 80.77, 80.65, 80.46), (0.4438, 0.4434, 0.4434, 0.4542)),
                "n2_lambda": ((80.76, 80.86, 80.90, 80.73), (0.4438, 0.4432, 0.4426, 0.4441)),
                "cowclip": ((80.86, 80.93, 80.97, 80.97), (0.4430, 0.4427, 0.4422, 0.4425)),
            },
        ),
        # Table 10
        ("scaling-rules", "avazu"): _table(
            _TO_8K,
            {
                "none": ((78.84, 78.79, 77.69, 75.85), (0.3748, 0.3775, 0.3952, 0.4411)),
                "sqrt": ((78.84, 78.88, 77.78, 76.23), (0.3748, 0.3761, 0.3926, 0.4299)),
                "sqrt_star": ((78.84, 78.88, 77.98, 76.23), (0.3748, 0.3759, 0.3976, 0.4140)),
                "linear": ((78.84, 78.78, 77.72, 76.69), (0.3748, 0.3763, 0.3883, 0.4043)),
                "n2_lambda": ((78.84, 78.84, 78.26, 77.24), (0.3748, 0.3754, 0.3815, 0.3912)),
                "cowclip": ((78.83, 78.82, 78.90, 79.06), (0.3748, 0.3752, 0.3752, 0.3740)),
            },
        ),
        # Table 3
        ("networks", "criteo"): _table(
            _TO_128K,
            {
                "deepfm": (
                    (80.76, 80.86, 80.93, 80.97, 80.97, 80.94, 80.95, 80.96, 80.90),
                    (0.4438, 0.4430, 0.4427, 0.4422, 0.4425, 0.4424, 0.4423, 0.4429, 0.4430),
                ),
                "wide_and_deep": (
                    (80.75, 80.86, 80.94, 80.96, 80.96, 80.95, 80.94, 80.96, 80.89),
                    (0.4439, 0.4430, 0.4424, 0.4422, 0.4425, 0.4422, 0.4428, 0.4429, 0.4434),
                ),
                "dcn": (
                    (80.76, 80.86, 80.93, 80.96, 80.97, 80.98, 80.95, 80.99, 80.91),
                    (0.4438, 0.4429, 0.4424, 0.4422, 0.4428, 0.4419, 0.4426, 0.4426, 0.4428),
                ),
                "dcn_v2": (
                    (80.78, 80.87, 80.94, 80.97, 80.98, 80.97, 80.95, 80.97, 80.89),
                    (0.4437, 0.4429, 0.4425, 0.4422, 0.4423, 0.4420, 0.4424, 0.4427, 0.4427),
                ),
            },
        ),
        # Table 4
        ("networks", "avazu"): _table(
            _TO_128K,
            {
                "deepfm": (
                    (78.84, 78.83, 78.82, 78.90, 79.06, 79.01, 78.82, 78.82, 78.80),
                    (0.3748, 0.3751, 0.3752, 0.3752, 0.3740, 0.3759, 0.3780, 0.3781, 0.3758),
                ),
                "wide_and_deep": (
                    (78.80, 78.80, 78.81, 78.90, 79.06, 79.03, 78.82, 78.81, 78.79),
                    (0.3752, 0.3754, 0.3752, 0.3752, 0.3744, 0.3754, 0.3782, 0.3784, 0.3758),
                ),
                "dcn": (
                    (78.82, 78.80, 78.81, 78.91, 79.05, 78.97, 78.74, 78.78, 78.79),
                    (0.3749, 0.3754, 0.3752, 0.3751, 0.3744, 0.3760, 0.3787, 0.3780, 0.3758),
                ),
                "dcn_v2": (
                    (78.84, 78.83, 78.82, 78.89, 79.07, 78.97, 78.80, 78.81, 78.75),
                    (0.3748, 0.3750, 0.3754, 0.3751, 0.3742, 0.3760, 0.3778, 0.3779, 0.3760),
                ),
            },
        ),
        # Table 5
        ("time", "criteo"): _minutes(
            {
                "deepfm": (768, 390, 204, 102, 48, 27, 15, 9),
                "wide_and_deep": (768, 390, 204, 102, 48, 27, 15, 10),
                "dcn": (768, 390, 204, 102, 48, 28, 17, 11),
                "dcn_v2": (822, 408, 210, 108, 60, 40, 34, 30),
            }
        ),
        # Table 11
        ("time", "avazu"): _minutes(
            {
                "deepfm": (210, 108, 54, 30, 17, 10, 6.7, 4.8),
                "wide_and_deep": (210, 108, 54, 30, 17, 10, 6.7, 5.0),
                "dcn": (210, 108, 54, 30, 18, 11, 7.2, 5.7),
                "dcn_v2": (234, 126, 66, 37, 25, 19, 18.5, 19.5),
            }
        ),
        # Table 6
        ("clipping", "criteo"): _table(
            (8, 128),
            {
                "global": ((80.63, 77.24), (0.4452, 0.4953)),
                "field": ((80.63, 80.62), (0.4453, 0.4454)),
                "column": ((80.65, 80.75), (0.4095, 0.4432)),
                "adaptive_field": ((80.62, 77.90), (0.4453, 0.4824)),
                "adaptive_column": ((80.97, 80.90), (0.4425, 0.4430)),
            },
        ),
        # Table 12
        ("ablation", "criteo"): MappingProxyType(
            {
                **{("linear scale on dense", s): Printed(None) for s in (8, 128)},
                **_table(
                    (8, 128),
                    {
                        "empirical scale": ((80.85, 79.83), (0.4430, 0.4539)),
                        "without ζ": ((80.96, 80.88), (0.4426, 0.4438)),
                        "without warm-up": ((80.97, 80.52), (0.4422, 0.4463)),
                        "without large init": ((80.92, 80.90), (0.4432, 0.4431)),
                        "cowclip": ((80.97, 80.90), (0.4425, 0.4430)),
                    },
                ),
            }
        ),
    }
)
"""(study, data set) → its table."""


class Cited(NamedTuple):
    """A system that the paper cites: AUC in percent, log loss, minutes with 1, 2 and 4 GPUs."""

    auc: float
    log_loss: float
    minutes: tuple[float, float, float]


CITED: Mapping[str, Mapping[str, Cited]] = MappingProxyType(
    {
        "criteo": {
            "XDL": Cited(80.2, 0.452, (196, 179, 160)),
            "FAE": Cited(80.2, 0.452, (122, 116, 104)),
            "DLRM": Cited(79.8, 0.456, (196, 133, 76)),
            "Hotline": Cited(79.8, 0.456, (53, 45, 39)),
        },
        "avazu": {
            "XDL": Cited(75.8, 0.390, (108, 84, 74)),
            "FAE": Cited(77.8, 0.391, (72, 62, 61)),
            "DLRM": Cited(76.6, 0.387, (163, 141, 54)),
            "Hotline": Cited(76.8, 0.386, (70, 28, 24)),
        },
    }
)
"""Tables 5 and 11, batches of 1K, 2K and 4K on as many GPUs: cited there, measured by neither."""
