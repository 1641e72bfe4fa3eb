"""The data of Table 1: each field of ids has its k most frequent ones, and one for all others.

python benchmarks/top_ids.py DATA TOP -k 3
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.counts import read_counts
from merlin_cowclip.workflows.data.prepare.nvt_workflow import save_fitted_workflow
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData, write_record
from merlin_cowclip.workflows.data.vocabulary import (
    MISSING,
    PADDING,
    UNKNOWN,
    Vocabulary,
    write_vocabulary,
)
from merlin_cowclip.workflows.folders import all_or_nothing


def keep_top_ids(data: PreparedData, k: int, out: Path) -> PreparedData:
    """Write prepared data of the same rows; a missing id counts as one."""
    spec = dataclasses.replace(data.spec, freq_threshold=0, hash_buckets=1, hash_only={})
    with all_or_nothing(out) as folder:
        encode = {}
        for field in spec.ids:
            table = read_counts(data, field)
            counts, raw = table["count"].to_numpy(), table["raw"].combine_chunks()
            an_id = raw.is_valid().to_numpy(zero_copy_only=False) & (counts > 0)
            an_id[MISSING] = counts[MISSING] > 0
            places = np.flatnonzero(an_id)
            top = places[np.argsort(-counts[places], kind="stable")][:k]  # ties: the lower id
            real = top[top != MISSING]
            encode[field] = np.full(len(counts), UNKNOWN)
            encode[field][PADDING] = PADDING
            if MISSING in top:
                encode[field][MISSING] = MISSING
            encode[field][real] = np.arange(UNKNOWN + 1, UNKNOWN + 1 + len(real))
            sums = np.bincount(encode[field], counts, UNKNOWN + 1 + len(real)).astype(np.int64)
            held = Vocabulary.empty(1)
            write_vocabulary(folder, field, [raw.take(pa.array(real))], {field: sums}, held)
        save_fitted_workflow(spec, folder, data.record["ranges"])
        for part in PARTS:
            (folder / part).mkdir()
            for path in data.footers(part):
                with pq.ParquetFile(path) as file:
                    rows, group = file.read(), file.metadata.row_group(0).num_rows
                for i, column in enumerate(rows.schema):
                    if column.name in encode:
                        ids = _renumbered(rows.column(i).combine_chunks(), encode[column.name])
                        rows = rows.set_column(i, column, ids.cast(column.type))
                pq.write_table(rows, folder / part / path.name, row_group_size=group)
        sizes = {field: int(numbers.max()) + 1 for field, numbers in encode.items()}
        source = {"path": str(data.path.absolute()), "top_k": k}
        record = {**data.record, "spec": spec.to_dict(), "cardinalities": sizes}
        write_record(folder, {**record, "derived_from": source})
    return PreparedData.open(out)


def _renumbered(ids: pa.Array, numbers: np.ndarray) -> pa.Array:
    if pa.types.is_list(ids.type):
        return pa.ListArray.from_arrays(ids.offsets, _renumbered(ids.values, numbers))
    return pa.array(numbers[ids.to_numpy()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=PreparedData.open)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", type=int, default=3)
    arguments = parser.parse_args()
    data = keep_top_ids(arguments.data, arguments.k, arguments.out)
    print(f"{data.table_rows:,} embedding rows: {data.path}")


if __name__ == "__main__":
    main()
