"""Reading: rows per second of the loader beside Merlin's own, on the same parquet.

26 id fields and 13 numbers, synthetic Criteo logs prepared and drawn from until they are a million
rows. Each loader reads all of them, in turn, so that a machine that changes its speed changes them
alike; the median of the rounds. Batches alone, as a loop over the loader has them; and in `fit`, of
a model that does nothing.

    python benchmarks/bench_loader.py [--batch 8192] [--rows 1048576] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from record import save_record

from merlin_cowclip.plugins._tensorflow import mm, tf
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepare.shuffle import ROW_GROUP_ROWS
from merlin_cowclip.workflows.data.prepared_data import RECORD, PreparedData, write_record
from merlin_cowclip.workflows.data.spec import CRITEO
from merlin_cowclip.workflows.data.synthetic import write_synthetic
from merlin_cowclip.workflows.quiet import quiet_imports
from merlin_cowclip.workflows.training.loader import Loader

with quiet_imports():
    import merlin.io

LOG_ROWS = 100_000
FILES = 4


def data_of(rows: int, home: Path) -> PreparedData:
    """A prepared folder with so many training rows."""
    write_synthetic("criteo", home / "log.txt", rows=LOG_ROWS, seed=1)
    data = prepare(CRITEO, [home / "log.txt"], home / "data", progress=False)
    few = pa.concat_tables([pq.read_table(file) for file in data.train_files])
    for file in data.train_files:
        file.unlink()
    random = np.random.default_rng(0)
    for i in range(FILES):
        drawn = few.take(random.integers(0, len(few), rows // FILES))
        path = data.path / "train" / f"part-{i:05d}.parquet"
        pq.write_table(drawn, path, row_group_size=ROW_GROUP_ROWS)
    record = {**data.record, "rows": {**data.rows, "train": FILES * (rows // FILES)}}
    (data.path / RECORD).unlink()
    write_record(data.path, record)  # with a manifest of these files
    return PreparedData.open(data.path)


def merlins(data: PreparedData, batch: int) -> mm.Loader:
    """Merlin's own loader of the training part, shuffling."""
    files = [str(file) for file in data.train_files]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no GPU
        dataset = merlin.io.Dataset(files, engine="parquet", schema=data.schema)
    return mm.Loader(dataset, batch_size=batch, shuffle=True)


class Nothing(tf.keras.Model):
    """Takes batches, and does nothing with them."""

    def train_step(self, data):
        return {"rows": tf.shape(data[1])[0]}


def fit(loader) -> None:
    model = Nothing()
    model.compile()
    model.fit(loader, verbose=0)


def consume(batches) -> None:
    for _ in batches:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="write benchmarks/records/")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        data = data_of(arguments.rows, Path(home))
        ours = Loader(data, batch_size=arguments.batch)
        theirs = merlins(data, arguments.batch)
        ways: dict[str, Callable[[], None]] = {
            "ours, NumPy batches": lambda: consume(ours.batches()),
            "ours, tf.data": lambda: consume(ours),
            "mm.Loader": lambda: consume(theirs),
            "ours, in fit": lambda: fit(ours),
            "mm.Loader, in fit": lambda: fit(theirs),
        }
        for way in ways.values():
            way()  # files in the page cache, functions traced
        load = os.getloadavg()[0]
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                rates[name].append(ours.rows / (time.perf_counter() - start))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPUs, load average "
        f"{load:.1f} before and {os.getloadavg()[0]:.1f} after, Python {platform.python_version()}"
    )
    print(
        f"batch {arguments.batch:,}, {len(CRITEO.categorical)} ids and {len(CRITEO.continuous)} "
        f"numbers, {ours.rows:,} rows, {arguments.rounds} rounds"
    )
    print(f"  {'':24}  {'rows/s':>10}  {'slowest':>10}")
    for name, every in rates.items():
        print(f"  {name:24}  {statistics.median(every):>10,.0f}  {min(every):>10,.0f}")
    record: list[dict[str, object]] = [
        {"way": name, "rows_per_second": round(statistics.median(every))}
        for name, every in rates.items()
    ]
    for one, other in (("ours, tf.data", "mm.Loader"), ("ours, in fit", "mm.Loader, in fit")):
        ratio = statistics.median(a / b for a, b in zip(rates[one], rates[other], strict=True))
        print(f"  {one} / {other}: {ratio:.1f} times as many rows per second")
        record.append({"way": one, "over": other, "ratio": round(ratio, 2)})
    if arguments.record:
        save_record(record)


if __name__ == "__main__":
    main()
