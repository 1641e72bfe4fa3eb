"""The data of Table 1, against pandas."""

import numpy as np
import pandas as pd
from benchmarks.top_ids import keep_top_ids

from merlin_cowclip.workflows import prepare
from merlin_cowclip.workflows.data.spec import DatasetSpec, Split


def test_the_most_frequent_ids_keep_a_row_and_all_others_share_one(tmp_path):
    random = np.random.default_rng(0)
    log = pd.DataFrame(
        {
            "y": random.integers(0, 2, 2_000),
            "user": [f"u{i}" if i else None for i in random.zipf(1.5, 2_000) % 40],
            "tags": ["|".join(f"t{i}" for i in random.integers(0, 9, n % 3)) for n in range(2_000)],
        }
    )
    log.to_csv(tmp_path / "log.csv", index=False)
    spec = DatasetSpec("toy", "y", ("user",), lists=("tags",), split=Split("sequential", 0.25))
    data = prepare(spec, [tmp_path / "log.csv"], tmp_path / "data", progress=False)
    top = keep_top_ids(data, 3, tmp_path / "top")
    for field in spec.ids:
        before, after = data.counts(field), top.counts(field)
        most = before[before["raw"].notna() | (before["id"] == 1)].nlargest(3, "count", "first")
        assert set(after["raw"][3:]) == set(most["raw"].dropna())
        assert after["count"].sum() == before["count"].sum()
        assert (after["count"][1] > 0) == (1 in most["id"].to_numpy())
        old = pd.concat(map(pd.read_parquet, data.test_files))[field].explode().dropna()
        new = pd.concat(map(pd.read_parquet, top.test_files))[field].explode().dropna()
        texts = before["raw"].to_numpy()[old.astype(int)]
        expected = [text if text in set(most["raw"].dropna()) else None for text in texts]
        assert after["raw"].to_numpy()[new.astype(int)].tolist() == expected
    assert top.rows == data.rows
