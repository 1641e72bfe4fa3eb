# SPDX-License-Identifier: Apache-2.0
"""Merlin 23.x on TensorFlow 2.19 to 2.21, which has Keras 2 apart, on pandas 2 and on newer Dask.

Merlin imports modules that have moved; they get their old names before. `merlin_cowclip.pth` loads
this as Python starts, so a script may import Merlin first. On TensorFlow 2.12 nothing is changed.
"""

from __future__ import annotations

import importlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Of Keras 2, what Merlin and we import from `keras`; now in `tf_keras.src`.
_KERAS = (
    "engine",
    "engine.compile_utils",
    "layers.preprocessing",
    "layers.preprocessing.preprocessing_utils",
    "mixed_precision.policy",
    "optimizers.utils",
    "saving.saving_lib",
    "utils.control_flow_util",
    "utils.generic_utils",
    "utils.layer_utils",
    "utils.losses_utils",
    "utils.metrics_utils",
    "utils.tf_inspect",
)
_TRACKING = "tensorflow.python.training.tracking"


class _BeforeMerlin:
    """Finds no module: is asked before each import, and prepares for those of Merlin."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called for each module that is not yet imported."""
        if name == "merlin" or name == "nvtabular":
            set_environment()
        elif name == "merlin.models.tf":
            give_old_names()
        elif name == "nvtabular.ops.categorify":
            ignore_divisions()


def install() -> None:
    """Let `_BeforeMerlin` see this process's imports."""
    if not any(isinstance(one, _BeforeMerlin) for one in sys.meta_path):
        sys.meta_path.insert(0, _BeforeMerlin())


def set_environment() -> None:
    """Set what TensorFlow and Dask read as they load, here and in processes started from here."""
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    # Merlin builds Dask's graphs by hand, and reads strings as objects.
    for name in ("query-planning", "convert-string"):
        os.environ.setdefault(f"DASK_DATAFRAME__{name.upper().replace('-', '_')}", "False")
        if "dask" in sys.modules:  # it has read the environment
            sys.modules["dask"].config.set({f"dataframe.{name}": False})


def ignore_divisions() -> None:
    """Let Dask's `sort_values` take the argument `divisions`, which it ignored until 2023."""
    import functools

    from dask.dataframe.core import DataFrame

    sort_values = DataFrame.sort_values

    @functools.wraps(sort_values)
    def ignoring(*args: Any, divisions: Any = None, **named: Any) -> Any:
        return sort_values(*args, **named)

    DataFrame.sort_values = ignoring  # type: ignore[method-assign]


def give_old_names() -> None:
    """Give moved modules their old names.

    Raises:
      ImportError: `tf.keras` is Keras 3: tf-keras is missing, or a script used Keras 3 before.
    """
    set_environment()
    import tensorflow as tf

    try:
        home = tf.keras.layers.Layer.__module__
    except ImportError:  # TF_USE_LEGACY_KERAS without tf-keras
        home = ""
    if home.startswith("keras.engine."):
        return
    if not home.startswith("tf_keras."):
        version = tf.__version__.rpartition(".")[0]
        remedy = f": pip install 'tf-keras=={version}.*'"
        if home:
            remedy = ", and tf.keras was used before, as Keras 3. Import merlin.models.tf first"
        raise ImportError(f"Merlin Models needs Keras 2{remedy}", name="tf_keras")
    # Where `import tensorflow.keras` looks, should TensorFlow have been imported before.
    folder = importlib.import_module("tf_keras.api._v2").__path__[0]
    if folder not in tf.__path__:
        tf.__path__.insert(0, folder)
    internal = importlib.import_module("tensorflow.python")
    if not hasattr(internal, "to_dlpack"):
        internal.to_dlpack = tf.experimental.dlpack.to_dlpack  # type: ignore[attr-defined]
    for old, new in [
        (_TRACKING, "tensorflow.python.trackable"),
        (f"{_TRACKING}.data_structures", "tensorflow.python.trackable.data_structures"),
        *((f"keras.{name}", f"tf_keras.src.{name}") for name in _KERAS),
    ]:
        sys.modules[old] = importlib.import_module(new)
