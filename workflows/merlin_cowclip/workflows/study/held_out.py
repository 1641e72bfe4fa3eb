# SPDX-License-Identifier: Apache-2.0
"""A validation part for data that have none, held out of the training part: a prepared folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from merlin_cowclip.workflows.data.prepare.column_store import ROW_GROUP_ROWS

from merlin_cowclip.workflows.data.prepare.split import latest
from merlin_cowclip.workflows.data.prepared_data import ORDER, PARTS, PreparedData, write_record
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing
from merlin_cowclip.workflows.training.runs import identity_of


def hold_out(data: PreparedData, share: float, seed: int, out: str | Path) -> PreparedData:
    """Write prepared data whose validation part is held out of the source's training part.

    By the kind of the source's split: rows at random, the last rows, or those with the latest
    times. The order is the source's, and its test part is left out. A UserError if one of the two
    parts would have only one label, or no row.
    """
    counts = {key: dict.fromkeys(PARTS, 0) for key in ("rows", "positives")}
    split, total = data.spec.split, data.rows["train"]
    if split.kind == "random":
        held_out = np.random.default_rng(seed).permutation(total) < int(total * share)
    elif (data.path / ORDER).exists():
        order = pq.read_table(data.path / ORDER)["order"].to_numpy()
        held_out = latest(order, share, split.column)
    else:
        raise UserError(f"{data.path} has no validation part. Prepare with --valid 0.1")
    with all_or_nothing(Path(out)) as folder:
        for name in data.record["manifest"]:
            if name.split("/")[0] not in (*PARTS, ORDER):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(data.path / name, folder / name)
        for part in PARTS:
            (folder / part).mkdir()
        seen, columns = 0, [data.spec.label, *data.spec.fields]
        for path in data.train_files:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(ROW_GROUP_ROWS, columns=columns):
                    mask = held_out[seen : seen + len(batch)]
                    for part, kept in (("train", ~mask), ("valid", mask)):
                        rows = pa.Table.from_batches([batch]).filter(pa.array(kept))
                        counts["rows"][part] += len(rows)
                        labels = rows[data.spec.label].to_numpy()
                        counts["positives"][part] += int(np.count_nonzero(labels))
                        if len(rows):
                            pq.write_table(rows, folder / part / f"part-{seen:012}.parquet")
                    seen += len(batch)
        for part in ("valid", "train"):
            clicks, rows = counts["positives"][part], counts["rows"][part]
            if not 0 < clicks < rows:
                what = (
                    f"a {part} part held out of {data.path} has {clicks:,} clicks in {rows:,} rows"
                )
                raise UserError(f"{what}. Prepare with a validation part: --valid 0.1")
        record = {key: value for key, value in data.record.items() if key != "files"}
        record |= {"rows": counts["rows"], "report": {**data.report, **counts}}
        source = {"path": str(data.path.absolute()), "data_sha256": identity_of(data)}
        record["derived_from"] = {**source, "held_out": float(share), "seed": int(seed)}
        write_record(folder, record)
    return PreparedData.open(out)
