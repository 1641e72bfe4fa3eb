"""The networks' names and options, as configuration and command line know them without TensorFlow.

One table, `NETWORKS`, that a test holds against the signatures of the builders in `models.MODELS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from merlin_cowclip.plugins._checks import layer_units, whole_number

COMBINERS = ("mean", "sum", "sqrtn")


@dataclass(frozen=True)
class Option:
    """An argument of a network's builder.

    Attributes:
      default: the builder's own.
      plain: (name, value) → the value as JSON has it; raises ValueError if it is out of range.
      used: whether the network's result depends on it. Some builders take an argument only so that
        they can take each other's place.
    """

    default: Any
    plain: Callable[[str, Any], Any]
    used: bool = True

    def unused(self) -> Option:
        """The same, on which nothing depends."""
        return Option(self.default, self.plain, used=False)


def _rank(name: str, value: Any) -> int | None:
    return None if value is None else whole_number(name, value)


def _units(name: str, value: Any) -> list[int]:
    return list(layer_units(name, value))


def _units_or_none(name: str, value: Any) -> list[int]:
    return [] if value in ((), []) else _units(name, value)


def _combiner(name: str, value: Any) -> str | dict[str, str]:
    named = list(value.values()) if isinstance(value, Mapping) else [value]
    for one in named:
        if not isinstance(one, str) or one not in COMBINERS:
            raise ValueError(
                f"{name} must be one of {', '.join(COMBINERS)}, for all lists or by field. "
                f"Received: {name}={value!r}"
            )
    return dict(value) if isinstance(value, Mapping) else value


_WIDTH = Option(10, whole_number)
_MLP = Option((400, 400, 400), _units)
_COMBINER = Option("mean", _combiner)
_DEEP: Mapping[str, Option] = {"embedding_dim": _WIDTH, "mlp": _MLP, "combiner": _COMBINER}
_CROSS = Option(3, whole_number)

NETWORKS: Mapping[str, Mapping[str, Option]] = MappingProxyType(
    {
        "lr": {**_DEEP, "embedding_dim": _WIDTH.unused(), "mlp": _MLP.unused()},
        "fm": {**_DEEP, "mlp": _MLP.unused()},
        "wide_and_deep": _DEEP,
        "deepfm": _DEEP,
        "dcn": {**_DEEP, "cross_layers": _CROSS},
        "dcn_v2": {**_DEEP, "cross_layers": _CROSS, "low_rank_dim": Option(None, _rank)},
        "dlrm": {**_DEEP, "bottom_mlp": Option((512, 256, 64), _units_or_none)},
    }
)
"""Name → its options by name, in the order of the builders in `models.MODELS`."""


def options_of(model: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a network as JSON has them: those given, and the defaults of the others.

    Args:
      model: a name in `NETWORKS`.
      given: by name; `None` for the default.

    Raises:
      ValueError: no such network, an option that it does not take, or one out of range.
    """
    if not isinstance(model, str) or model not in NETWORKS:
        raise ValueError(f"model must be one of {', '.join(NETWORKS)}. Received: model={model!r}")
    options = NETWORKS[model]
    for name, value in given.items():
        if value is not None and name not in options:
            takers = ", ".join(other for other, names in NETWORKS.items() if name in names)
            raise ValueError(
                f"{name} belongs to {takers}. Received: {name}={value!r} with model={model!r}. "
                "Leave it out, or choose another network"
            )
    plain = {}
    for name, option in options.items():
        value = given.get(name)
        value = option.default if value is None else value
        plain[name] = option.plain(name, value)
    return plain
