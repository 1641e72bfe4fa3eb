"""What a feature is called as an input of the served network."""

from __future__ import annotations

import re


def tensor_name(feature: str) -> str:
    """The name that TensorFlow gives an argument of a signature: `user.id` is `user_id`.

    No two features that a model takes get the same one (`plugins.input_names`).
    """
    name = re.sub(r"[.-]", "_", feature)
    return f"arg_{name}" if name[0].isdigit() else name
