"""The paper's numbers as printed, to stand beside ours: `paper_tables.json`.

AUC in percent, log loss in nats, minutes of ten epochs on one V100; null: the run diverged.
Table 1's rows without scaling disagree with Table 2's (77.55 and 80.31 at 8K) as printed; its "Sqrt
Scale" has the numbers of Table 2's "Sqrt Scaling*". The log loss 0.4095 of Table 6 is as printed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

EPOCHS = 10
"""Those of the times in Tables 5 and 11."""

_ROWS = {"criteo": 45_840_617, "avazu": 40_428_967}  # of the full data sets
_BASE = 1024


def is_of_the_paper(config: Mapping[str, Any]) -> bool:
    """Whether a run's `config.json` is of all of Criteo or Avazu: 99 % of the rows at least."""
    return sum(config["rows"].values()) >= 0.99 * _ROWS.get(config["dataset"], float("inf"))


def printed(study: str, dataset: str, key: str, base: int) -> dict[tuple[str, str], float | None]:
    """(row, column of our table) → the paper's number; `None`: its run diverged.

    Args:
      study: the name of ours.
      dataset: "criteo" or "avazu".
      key: "auc", "log_loss" or "minutes".
      base: our base batch size; the paper's column "baseline" is of 1,024.
    """
    tables = json.loads(Path(__file__).with_name("paper_tables.json").read_text("utf-8"))
    table = tables.get(study, {}).get(dataset, {"sizes": [], "rows": {}})
    return {
        (row, size if size == "baseline" else f"{size:,}"): value
        for row, values in table["rows"].items()
        for size, value in zip(table["sizes"], values.get(key, ()), strict=False)
        if size != "baseline" or base == _BASE
    }
