"""What the tests of `FusedEmbeddings` share: a schema, a batch of it, and a layer on it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.workflows.quiet import quiet_imports

with quiet_imports():
    from merlin.schema import ColumnSchema, Schema, Tags

DIM = 3
SIZES = {"user": 7, "genres": 6, "item": 5, "tags": 4}  # user and item one-hot
OFFSETS = {"user": 0, "item": 7, "genres": 12, "tags": 18}
ROWS = 22
USER = [[3], [6], [0], [3]]
ITEM = [[4], [4], [1], [2]]
GENRES = [[5, 3, 5], [], [4], [0, 3]]
TAGS = [[3], [3, 3], [], [1]]
ONE_HOT, LISTS = {"user": USER, "item": ITEM}, {"genres": GENRES, "tags": TAGS}
IDS = {**ONE_HOT, **LISTS}


def column(name, size=10, is_list=False, tags=(), domain=None, **properties):
    """Of ids; without an int domain (size None), or in one without a name (domain "")."""
    if size is not None:
        named = {"name": name if domain is None else domain}
        properties["domain"] = {"min": 0, "max": size - 1, **named}
    return ColumnSchema(
        name,
        tags=[Tags.CATEGORICAL, *tags],
        dtype="int64",
        is_list=is_list,
        is_ragged=is_list,
        properties=properties,
    )


SCHEMA = Schema([column(name, size, name in LISTS) for name, size in SIZES.items()])


def ragged(lists, **options):
    return tf.ragged.constant(lists, dtype=tf.int64, **options)


def inputs(**changes):
    given = {name: tf.constant(ids) for name, ids in ONE_HOT.items()}
    return {**given, **{name: ragged(ids) for name, ids in LISTS.items()}, **changes}


def layer_of(combiner: Any = "mean", stddev=0.5, schema=SCHEMA, **options) -> FusedEmbeddings:
    layer = FusedEmbeddings(schema, DIM, stddev=stddev, combiner=combiner, **options)
    layer.build({})
    return layer
