"""Rows held out of a training part, by which trials are measured: a prepared folder of its own."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from merlin_cowclip.workflows.data.prepare.write import ROW_GROUP_ROWS
from merlin_cowclip.workflows.data.prepared_data import PARTS, PreparedData, write_record
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.folders import all_or_nothing, refuse_existing
from merlin_cowclip.workflows.progress import progress_bar
from merlin_cowclip.workflows.training.runs import identity_of


def hold_out(
    data: PreparedData, share: float, seed: int, out: str | Path, *, progress: bool = True
) -> PreparedData:
    """Prepared data whose test part is held out of the source's training part.

    The share is drawn at random from every 65,536 rows, which are in memory at a time, and both
    parts keep the source's order. The source's own test part is not read. Vocabulary, workflow,
    schema and counts are the source's.

    Args:
        data: a prepared folder, or an adopted pipeline.
        share: between 0 and 1.
        seed: of the draw.
        out: the folder to make; must not exist.
        progress: show a progress bar on stderr.

    Returns:
        The new folder, opened. Its record holds ``derived_from``: ``path``, ``data_sha256`` (of
        the source), ``held_out`` and ``seed``.

    Raises:
        UserError: one of the two parts would have only one label, or no row; nothing is left
            behind.
    """
    out = Path(out)
    rows = data.rows["train"]
    refuse_existing(out)
    counted = {key: dict.fromkeys(PARTS, 0) for key in ("rows", "positives")}
    columns = [data.spec.label, *data.spec.fields]
    with all_or_nothing(out) as folder:
        for name in data.record["manifest"]:
            if name.split("/")[0] not in PARTS:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(data.path / name, folder / name)
        for part in PARTS:
            (folder / part).mkdir()
        seen = 0
        with progress_bar("hold out", rows, show=progress) as bar:
            for number, path in enumerate(data.train_files):
                name = f"part-{number:05d}.parquet"
                with pq.ParquetFile(path) as file, ExitStack() as writers:
                    to: dict[str, pq.ParquetWriter] = {}
                    for batch in file.iter_batches(ROW_GROUP_ROWS, columns=columns):
                        mask = _drawn(seen, len(batch), share, seed)
                        seen += len(batch)
                        for part, wanted in (("train", ~mask), ("test", mask)):
                            kept = pa.Table.from_batches([batch]).filter(pa.array(wanted))
                            if not len(kept):
                                continue
                            if part not in to:
                                writer = pq.ParquetWriter(folder / part / name, kept.schema)
                                to[part] = writers.enter_context(writer)
                            to[part].write_table(kept, row_group_size=len(kept))
                            labels = kept[data.spec.label].to_numpy()
                            counted["rows"][part] += len(kept)
                            counted["positives"][part] += int(np.count_nonzero(labels))
                        bar.update(len(batch))
        for part, what in (("test", "held-out"), ("train", "other")):
            clicks, of = counted["positives"][part], counted["rows"][part]
            if not 0 < clicks < of:
                raise UserError(
                    f"the {what} rows must have labels of 0 and of 1. Received: {clicks:,} clicks "
                    f"in {of:,} of {rows:,} rows of {data.path} with held_out={share}. Choose "
                    "another share or seed, or prepare more rows"
                )
        record = {key: value for key, value in data.record.items() if key != "files"} | {
            "rows": counted["rows"],
            "report": {**data.report, **counted},
            "derived_from": {
                "path": str(data.path.absolute()),
                "data_sha256": identity_of(data),
                "held_out": float(share),
                "seed": int(seed),
            },
        }
        write_record(folder, record)
    return PreparedData.open(out)


def _drawn(start: int, rows: int, share: float, seed: int) -> np.ndarray:
    """(rows,) bool: which of the rows from number `start` on are held out."""
    wanted = int((start + rows) * share) - int(start * share)
    mask = np.zeros(rows, bool)
    mask[np.random.default_rng([seed, start]).choice(rows, wanted, replace=False)] = True
    return mask
