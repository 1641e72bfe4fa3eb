# SPDX-License-Identifier: Apache-2.0
"""A schema as text, for layer configs: one text for one schema, whatever wrote it."""

from __future__ import annotations

import json

from merlin.models.utils.schema_utils import schema_to_tensorflow_metadata_json
from merlin.schema import Schema


def schema_text(schema: Schema) -> str:
    """JSON in Merlin's format with keys and tags in order.

    Merlin keeps tags in a set, and writes properties in whatever order the schema got them: by it
    alone, two processes, and two versions of Python, write different texts for one schema.
    """
    described = json.loads(schema_to_tensorflow_metadata_json(schema))
    for feature in described.get("feature", ()):
        feature["annotation"].get("tag", []).sort()
    return json.dumps(described, sort_keys=True)
