"""The synthetic log: frequent ids matter, and rare ones hardly."""

from __future__ import annotations

import pandas as pd
import pytest

from merlin_cowclip.workflows.data.datasets import DatasetSpec

from .test_why_it_works import BENCHMARKS, module

pytestmark = pytest.mark.extended


def test_frequent_ids_matter_and_rare_ones_hardly():
    made = module("heavy_tailed_log")
    log, best = made.log(60_000, 0)
    spec = DatasetSpec.from_toml(BENCHMARKS / "heavy_tailed.toml")
    assert list(log) == [spec.label, *spec.categorical]
    assert log["y"].mean() < 0.4
    assert 0.78 < best < 0.82

    def spread(field: str) -> float:
        """Of the click rates of the ids, weighted by how often they occur; beyond chance."""
        by_id = log.groupby(field)["y"].agg(["mean", "size"])
        of_many = by_id[by_id["size"] >= 200]
        chance = (of_many["mean"] * (1 - of_many["mean"]) / of_many["size"]).mean()
        return float((of_many["mean"].var() - chance) ** 0.5)

    strong, weak = (pd.Series([spread(field) for field in of]) for of in (made.FREQUENT, made.RARE))
    assert strong.min() > 2 * weak.max()
    assert (log[made.RARE].nunique() > 10_000).all()
    assert (log[made.FREQUENT].nunique() == made.FEW).all()
