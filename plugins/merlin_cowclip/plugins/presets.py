# SPDX-License-Identifier: Apache-2.0
"""Tables 8 and 9 of the paper as literal values, with their misprints corrected.

Where the authors tuned by hand, they differ from `scale`. The λ columns are a tenth of what is
printed (Section 4.1 and the published code say 1e-5 at 1K), and ζ is the published code's `--bound`
in our terms: `ζ = r²·√d·bound` with the paper's embedding width d = 10, to four digits.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from merlin_cowclip.plugins.scaling import Hyperparameters, K, find_rule, recipe

_R2 = 2**0.5

_BATCHES = (1 * K, 2 * K, 4 * K, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)

# Table 8 (Criteo, no clip): dense η, embedding η and λ at 1K, 2K, 4K, 8K.
_SQRT, _DOUBLED = (1e-4, _R2 * 1e-4, 2e-4, 2 * _R2 * 1e-4), (1e-4, 2e-4, 4e-4, 8e-4)
_TABLE_8 = {
    "sqrt": (_SQRT, _SQRT, (1e-5, _R2 * 1e-5, 2e-5, 2 * _R2 * 1e-5)),
    "linear": (_DOUBLED, _DOUBLED, (1e-5,) * 4),
    "n2_lambda": (_DOUBLED, (1e-4,) * 4, (1e-5, 4e-5, 16e-5, 128e-5)),
}
# Table 9 (CowClip; embedding η is 1e-4 throughout): dense η, λ, r and ζ at 1K … 128K.
_TABLE_9 = {
    "criteo": (
        tuple(f * 1e-4 for f in (8, 8 * _R2, 16, 16 * _R2, 32, 32 * _R2, 64, 64 * _R2)),
        (1e-5, 2e-5, 4e-5, 8e-5, 16e-5, 32e-5, 64e-5, 128e-5),
        (1.0,) * 8,
        (3.162e-5,) * 8,
    ),
    "avazu": (
        (1e-4, _R2 * 1e-4, 2e-4, 2 * _R2 * 1e-4, 4e-4, 4 * _R2 * 1e-4, 8e-4, 16e-4),
        (1e-5, 2e-5, 4e-5, 8e-5, 16e-5, 32e-5, 64e-5, 96e-5),
        (10.0, 10.0) + (1.0,) * 6,
        (1e-3, 1e-3) + (3.162e-4,) * 6,
    ),
}  # fmt: skip


def _presets() -> dict[tuple[str, str, int], Hyperparameters]:
    presets = {}
    for rule, columns in _TABLE_8.items():
        for batch, dense, embedding, l2 in zip(_BATCHES, *columns, strict=False):
            rates = {"dense_lr": dense, "embedding_lr": embedding}
            presets["criteo", rule, batch] = recipe(rule).replace(batch_size=batch, l2=l2, **rates)
    for dataset, of_dataset in _TABLE_9.items():
        for batch, dense, l2, ratio, floor in zip(_BATCHES, *of_dataset, strict=True):
            presets[dataset, "cowclip", batch] = recipe("cowclip").replace(
                batch_size=batch, dense_lr=dense, l2=l2, clip_ratio=ratio, clip_floor=floor
            )
    return presets


PRESETS: Mapping[tuple[str, str, int], Hyperparameters] = MappingProxyType(_presets())
"""(data set, rule, batch size) → the values that the paper trained with."""


def preset(dataset: str, batch_size: int, rule: str = "cowclip") -> Hyperparameters:
    """The paper's own values for a data set, batch size and rule (Tables 8 and 9, corrected).

    Raises:
      ValueError: the tables have no such entry.
    """
    key = (dataset, find_rule(rule).name, batch_size)
    if key not in PRESETS:
        have = sorted(b for d, r, b in PRESETS if (d, r) == key[:2])
        raise ValueError(
            f"no preset for data set {dataset!r} (criteo or avazu), rule {key[1]!r}, batch size "
            f"{batch_size}. Of these, there are the batch sizes "
            f"{', '.join(map(str, have)) or 'none'}. Use scale(recipe(rule), to=…, rule=rule)."
        )
    return PRESETS[key]
