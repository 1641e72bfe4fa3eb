"""Rows held out of a training part, by which trials are measured: a prepared folder of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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

_COPIED = ("workflow", "counts", "schema.pbtxt", ".merlin")


def hold_out(
    data: PreparedData, share: float, seed: int, out: str | Path, *, progress: bool = True
) -> PreparedData:
    """Prepared data whose test part is held out of the source's training part.

    The share is drawn at random from each row group, and both parts keep the source's order. The
    source's own test part is not read. Vocabulary, workflow, schema and counts are the source's.
    A row group at a time is in memory, or 65,536 rows of a larger one.

    Args:
        data: a prepared folder, or an adopted pipeline.
        share: between 0 and 1.
        seed: of the draw.
        out: the folder to make; must not exist.
        progress: show a progress bar on stderr.

    Returns:
        The new folder, opened. Its record holds ``derived_from``: ``path``, ``train_sha256`` (of
        the source's training rows), ``held_out`` and ``seed``.

    Raises:
        UserError: one of the two parts would have no row, or the held-out rows only one label;
            nothing is left behind.
    """
    out = Path(out)
    rows = data.rows["train"]
    if not 0 < held_out_rows(rows, share) < rows:
        raise UserError(
            "held_out must leave rows to train on and to measure by. Received: "
            f"held_out={share}, which of {rows:,} rows of {data.path} leaves none. Choose another "
            "share, or prepare more rows"
        )
    refuse_existing(out)
    counted = {key: dict.fromkeys(PARTS, 0) for key in ("rows", "positives")}
    columns = [data.spec.label, *data.spec.fields]
    with all_or_nothing(out) as folder:
        for name in _COPIED:
            source = data.path / name
            if source.is_dir():
                shutil.copytree(source, folder / name)
            elif source.exists():
                shutil.copyfile(source, folder / name)
        for part in PARTS:
            (folder / part).mkdir()
        seen = 0
        with progress_bar("hold out", rows, show=progress) as bar:
            for number, (path, footer) in enumerate(data.footers("train").items()):
                name = f"part-{number:05d}.parquet"
                with pq.ParquetFile(path) as file, ExitStack() as writers:
                    to: dict[str, pq.ParquetWriter] = {}
                    for batch in _batches(file, footer, columns):
                        mask = _drawn(seen, len(batch), share, seed)
                        seen += len(batch)
                        for part, wanted in (("train", ~mask), ("test", mask)):
                            kept = batch.filter(pa.array(wanted))
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
            if clicks in (0, of):
                raise UserError(
                    f"the {what} rows must have labels of 0 and of 1. Received: only "
                    f"{int(clicks > 0)}, in {of:,} of {rows:,} rows of {data.path} with "
                    f"held_out={share}. Choose another share or seed, or prepare more rows"
                )
        dropped = ("files", "manifest", "versions", "format")
        record = {key: value for key, value in data.record.items() if key not in dropped}
        record |= {
            "rows": counted["rows"],
            "report": {**data.report, **counted},
            "derived_from": {
                "path": str(data.path.absolute()),
                "train_sha256": identity_of(data, "train"),
                "held_out": float(share),
                "seed": int(seed),
            },
        }
        write_record(folder, record)
    return PreparedData.open(out)


def held_out_rows(rows: int, share: float) -> int:
    """How many of `rows` are held out."""
    return int(rows * share)


def _batches(
    file: pq.ParquetFile, footer: pq.FileMetaData, columns: list[str]
) -> Iterator[pa.Table]:
    for group in range(footer.num_row_groups):
        read = file.iter_batches(ROW_GROUP_ROWS, row_groups=[group], columns=columns)
        for batch in read:
            yield pa.Table.from_batches([batch]).select(columns)


def _drawn(start: int, rows: int, share: float, seed: int) -> np.ndarray:
    """(rows,) bool: which of the rows from number `start` on are held out."""
    wanted = held_out_rows(start + rows, share) - held_out_rows(start, share)
    mask = np.zeros(rows, bool)
    mask[np.random.default_rng([seed, start]).choice(rows, wanted, replace=False)] = True
    return mask
