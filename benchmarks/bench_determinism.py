"""What "the same to the last digit" costs: steps with deterministic ops against steps without.

Each run is a process of its own, because deterministic ops cannot be switched off again. Runs
alternate, and the ratio is between neighbours, so that a machine that changes its speed does not
matter.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

ROUNDS = 3
BATCHES = (1024, 8192)
ROWS_PER_FIELD = 10_000

STEPS = """
import sys, time
import numpy as np
from merlin_cowclip.plugins._stack import tf
from merlin_cowclip.models import deepfm
from merlin_cowclip.plugins import CowClipOptimizer, Hyperparameters
from merlin.schema import ColumnSchema, Schema, Tags

batch, rows, deterministic = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "deterministic"
tf.keras.utils.set_random_seed(0)
if deterministic:
    tf.config.experimental.enable_op_determinism()
ids = [f"C{i}" for i in range(26)]
numbers = [f"I{i}" for i in range(13)]
domain = {"domain": {"min": 0, "max": rows - 1, "name": "id"}}
columns = [ColumnSchema(n, dtype=np.int64, tags=[Tags.CATEGORICAL], properties=domain) for n in ids]
columns += [ColumnSchema(n, dtype=np.float32, tags=[Tags.CONTINUOUS]) for n in numbers]
target = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
model = deepfm(Schema([*columns, target]))
optimizer = CowClipOptimizer.for_model(model, Hyperparameters(batch, warmup_epochs=0))
model.compile(optimizer=optimizer, metrics=[])
rng = np.random.default_rng(0)
zipf = lambda: (rng.zipf(1.2, (batch, 1)) % (rows - 3) + 3).astype(np.int64)
x = {n: tf.constant(zipf()) for n in ids}
x |= {n: tf.constant(rng.random((batch, 1)), tf.float32) for n in numbers}
y = tf.constant(rng.integers(0, 2, (batch, 1)), tf.float32)
step = model.make_train_function()
data = iter(tf.data.Dataset.from_tensors((x, y)).repeat())
for _ in range(3):
    step(data)
n = max(5, 30_000 // batch)
start = time.perf_counter()
for _ in range(n):
    step(data)
print((time.perf_counter() - start) / n * 1e3)
"""


def milliseconds(batch: int, mode: str) -> float:
    command = [sys.executable, "-c", STEPS, str(batch), str(ROWS_PER_FIELD), mode]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(
        f"DeepFM 3 x 400, 26 + 13 fields, {26 * ROWS_PER_FIELD:,} ids, exact CowClip; ms per step"
    )
    print(f"{'batch':>6}  {'plain':>8}  {'determin.':>9}  {'ratio':>6}   (medians of {ROUNDS})")
    for batch in BATCHES:
        pairs = [
            (milliseconds(batch, "plain"), milliseconds(batch, "deterministic"))
            for _ in range(ROUNDS)
        ]
        plain, same = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"{batch:>6}  {plain:>8.1f}  {same:>9.1f}  {ratio:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
