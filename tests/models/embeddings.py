"""What the tests of `FusedEmbeddings` share: a schema, a batch of it, and a layer on it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from merlin_cowclip.models import FusedEmbeddings
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags

DIM = 3
SIZES = {"user": 7, "genres": 6, "item": 5, "friend": 7, "tags": 4}  # friends are users
OFFSETS = {"user": 0, "item": 7, "friend": 0, "genres": 12, "tags": 18}
ROWS = 22
USER = [[3], [6], [0], [3]]
ITEM = [[4], [4], [1], [2]]
FRIEND = [[3], [4], [6], [5]]
GENRES = [[5, 3, 5], [], [4], [0, 3]]
TAGS = [[3], [3, 3], [], [1]]
ONE_HOT, LISTS = {"user": USER, "item": ITEM, "friend": FRIEND}, {"genres": GENRES, "tags": TAGS}
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


SCHEMA = Schema(
    [
        column(name, size, name in LISTS, domain="user" if name == "friend" else None)
        for name, size in SIZES.items()
    ]
)
SCHEMA["item"] = SCHEMA["item"].with_tags([Tags.CATEGORICAL, Tags.ITEM])


def ragged(lists, **options):
    return tf.ragged.constant(lists, dtype=tf.int64, **options)


def inputs(**changes):
    given = {name: tf.constant(ids) for name, ids in ONE_HOT.items()}
    return {**given, **{name: ragged(ids) for name, ids in LISTS.items()}, **changes}


def layer_of(combiner: Any = "mean", stddev=0.5, schema=SCHEMA, **options) -> FusedEmbeddings:
    layer = FusedEmbeddings(schema, DIM, stddev=stddev, combiner=combiner, **options)
    layer.build({})
    return layer
