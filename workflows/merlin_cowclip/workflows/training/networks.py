# SPDX-License-Identifier: Apache-2.0
"""The networks and their options, as configuration and command line know them without TensorFlow.

A test holds `NETWORKS` against the signatures of the builders in `models.MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from merlin_cowclip.plugins._checks import layer_units

COMBINERS = ("mean", "sum", "sqrtn")

_DEEP: Mapping[str, Any] = {"embedding_dim": 10, "mlp": (400, 400, 400), "combiner": "mean"}
NETWORKS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "lr": {"combiner": "mean"},
        "fm": {"embedding_dim": 10, "combiner": "mean"},
        "wide_and_deep": _DEEP,
        "deepfm": _DEEP,
        "dcn": {**_DEEP, "cross_layers": 3},
        "dcn_v2": {**_DEEP, "cross_layers": 3, "low_rank_dim": None},
        "dlrm": {**_DEEP, "bottom_mlp": (512, 256, 64)},
    }
)
"""Name → the options that it makes something of, with the builder's defaults."""

OPTIONS = tuple(dict.fromkeys(name for options in NETWORKS.values() for name in options))


def units_or_none(name: str, value: Any) -> tuple[int, ...]:
    """The units of layers, of which there may be none."""
    return () if value in ((), []) else layer_units(name, value)


def check_combiner(name: str, value: Any) -> str | dict[str, str]:
    """How a list column's embeddings become one, for all or by field."""
    named = list(value.values()) if isinstance(value, Mapping) else [value]
    for one in named:
        if not isinstance(one, str) or one not in COMBINERS:
            raise ValueError(
                f"{name} must be one of {', '.join(COMBINERS)}, for all lists or by field. "
                f"Received: {name}={value!r}"
            )
    return dict(value) if isinstance(value, Mapping) else value


def options_of(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a network: those given, and the defaults of the others.

    Args:
      model: a name in `NETWORKS`.
      given: by name; `None` for the default.
    """
    options = NETWORKS[model]
    for name, value in given.items():
        if value is not None and name not in options:
            takers = ", ".join(other for other, names in NETWORKS.items() if name in names)
            raise ValueError(
                f"{name} belongs to {takers}. Received: {name}={value!r} with model={model!r}. "
                "Leave it out, or choose another network"
            )
    return {n: d if given.get(n) is None else given[n] for n, d in options.items()}
