"""Memory and time of a step in micro-batches.

Synthetic batches of 131,072 samples, 13 numbers and 26 fields of 10,000 ids; DeepFM with an MLP of
400-400-400. Each row is a process of its own: its peak memory above that after the model was built,
and the seconds of a step, the fastest of three, also as multiples of the whole batch's.

    python benchmarks/bench_memory.py [MICRO_BATCHES…]
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

from merlin_cowclip.plugins._text import format_table

BATCH, IDS, STEPS = 131_072, 10_000, 4


def measure(micro_batches: int) -> None:
    import numpy as np
    import tensorflow as tf

    from merlin_cowclip.models import deepfm
    from merlin_cowclip.plugins import CowClipOptimizer, preset
    from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags

    ids = [
        ColumnSchema(f"C{i}", dtype=np.int64, tags=[Tags.CATEGORICAL], properties=properties)
        for i in range(26)
        for properties in [{"domain": {"min": 0, "max": IDS - 1, "name": f"C{i}"}}]
    ]
    numbers = [ColumnSchema(f"I{i}", dtype=np.float32, tags=[Tags.CONTINUOUS]) for i in range(13)]
    target = ColumnSchema("y", dtype=np.float32, tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION])
    random = np.random.default_rng(0)
    features = {one.name: random.integers(0, IDS, (BATCH, 1)) for one in ids}
    features |= {one.name: random.random((BATCH, 1), np.float32) for one in numbers}
    labels = random.integers(0, 2, (BATCH, 1)).astype(np.float32)
    model = deepfm(Schema([*ids, *numbers, target]), embedding_dim=10, mlp=(400, 400, 400))
    model({name: tf.constant(values[:2]) for name, values in features.items()})
    optimizer = CowClipOptimizer.for_model(
        model, preset("criteo", BATCH), accumulate=micro_batches, steps_per_epoch=100
    )
    model.compile(optimizer=optimizer, metrics=[])
    batch = tf.data.Dataset.from_tensors((features, labels)).repeat(STEPS)
    step, data, seconds = model.make_train_function(), iter(batch), []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(STEPS):
        start = time.perf_counter()
        float(step(data)["loss_batch"])
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([(peak - before) / 1024**2, min(seconds[1:])]))


def main(numbers: list[int]) -> None:
    found = {}
    for number in numbers:
        call = [sys.executable, __file__, "--measure", str(number)]
        done = subprocess.run(call, capture_output=True, text=True, check=True)
        found[number] = json.loads(done.stdout.splitlines()[-1])
    memory, seconds = next(iter(found.values()))
    rows = [
        (str(n), f"{m:.2f}", f"{m / memory:.2f}", f"{s:.2f}", f"{s / seconds:.2f}")
        for n, (m, s) in found.items()
    ]
    print(format_table(("micro-batches", "GiB", "ratio", "seconds", "ratio"), rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(int(sys.argv[2]))
    else:
        main([int(number) for number in sys.argv[1:]] or [1, 2, 4, 8, 16])
