"""What training takes at the least, known before it begins."""

from __future__ import annotations

import itertools

from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.training.configuration import TrainConfig

_FLOAT = 4  # bytes


def least_bytes(
    config: TrainConfig, fields: int, rows: int, numbers: int, ranks: int = 1
) -> dict[str, int]:
    """Bytes that a training step holds at once, a lower bound.

    Every weight three times (itself and Adam's two moments), one number a row of each table where
    rows wait (`update="deferred"`), and a batch's input, embeddings and layer outputs once. What
    TensorFlow adds to that for gradients and temporaries is left out.

    Args:
      config: what is trained.
      fields: how many id fields there are.
      rows: that they have in a table, those of a domain that several share once.
      numbers: how many continuous features there are.
      ranks: how many share each batch; all have the tables, or each an N-th of them.

    Returns:
      `tables`, `layers` and `batch`.
    """
    options, name = config.network_options, config.model
    width, mlp = options["embedding_dim"], list(options["mlp"])
    has_embeddings, has_linear = name != "lr", name != "dlrm"
    tables = rows * (width * has_embeddings + has_linear)
    waiting = rows * (has_embeddings + has_linear) if config.update == "deferred" else 0
    x = fields * width + numbers
    stacks: list[list[int]] = []
    cross = 0
    if name == "dlrm":
        if numbers:
            stacks.append([numbers, *options["bottom_mlp"], width])
        z = fields + bool(numbers)
        stacks.append([z * (z - 1) // 2 + width * bool(numbers), *mlp, 1])
    elif name not in ("lr", "fm"):
        stacks.append([x, *mlp, 1])
    if name == "dcn_v2":
        rank = options["low_rank_dim"]
        cross = options["cross_layers"] * (x * x if rank is None else 2 * x * rank)
    elif name == "dcn":
        cross = options["cross_layers"] * 2 * x
    layers = cross + sum(a * b for s in stacks for a, b in itertools.pairwise(s))
    outputs = sum(unit for stack in stacks for unit in stack[1:])
    per_row = 2 * fields + numbers + (x if has_embeddings else 0) + outputs  # ids have 8 bytes
    return {
        "tables": (3 * tables + waiting) * _FLOAT // (ranks if config.tables == "sharded" else 1),
        "layers": 3 * layers * _FLOAT,
        "batch": config.batch_size // ranks * per_row * _FLOAT,
    }


def refuse_what_does_not_fit(
    config: TrainConfig,
    fields: int,
    rows: int,
    numbers: int,
    limit: int,
    ranks: int = 1,
) -> None:
    """Refuse a training that the machine cannot hold, with what it would take.

    Args:
      config: what is trained.
      fields: how many id fields there are.
      rows: that they have in a table.
      numbers: how many continuous features there are.
      limit: the machine's memory in bytes, or a rank's part of it.
      ranks: how many share each batch.

    Raises:
      UserError: the least that it takes is more.
    """
    parts = least_bytes(config, fields, rows, numbers, ranks)
    if sum(parts.values()) <= limit:
        return
    remedies = {
        "tables": "a smaller embedding_dim, or a higher freq_threshold in prepare",
        "layers": "smaller layers",
        "batch": "a smaller batch size",
    }
    largest = max(parts, key=lambda part: parts[part])
    listed = ", ".join(f"{_gib(size)} for the {part}" for part, size in parts.items())
    raise UserError(
        f"training must fit into the machine's memory, {_gib(limit)}. Received: what takes at "
        f"least {_gib(sum(parts.values()))} ({listed}). Choose {remedies[largest]}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size < 2**60 else "more than 1,000,000,000 GiB"
