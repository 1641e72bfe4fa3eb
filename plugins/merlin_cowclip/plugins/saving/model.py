# SPDX-License-Identifier: Apache-2.0
"""Save and load a model with its optimizer as one: weights, moments, step counts, settings.

Keras cannot restore the slots of its legacy optimizers from a SavedModel. So it is saved without
its optimizer, and a TensorFlow checkpoint of all state lies in its folder. A plain load gives a
model that is not compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from merlin_cowclip.plugins._checks import check_path
from merlin_cowclip.plugins._tensorflow import quiet_stack, shapes_as_saved, tf
from merlin_cowclip.plugins.distributed.horovod import all_gather_object, ranks
from merlin_cowclip.plugins.optimizers.cowclip import CowClipOptimizer
from merlin_cowclip.plugins.optimizers.state import optimizer_of, state_of
from merlin_cowclip.plugins.saving.folder import MARKER, OWN, find, replacing
from merlin_cowclip.plugins.saving.gather_tables import is_in_shards, whole_tables

CHECKPOINT = f"{OWN}/state"
FORMAT = 4


def save_model(model: tf.keras.Model, path: str | os.PathLike[str]) -> None:
    """Save a compiled Merlin or Keras model, with all state of its optimizer, to the folder `path`.

    A saved model that is there is replaced as a whole: if this call is interrupted, `load_model`
    finds the old model or the new one.

    On several ranks rank 0 saves, and all ranks call this. With sharded tables they return once it
    is saved; otherwise at once, and must meet (`hvd.barrier()`) before another rank loads.

    Raises:
      ValueError: the model is not built, or not compiled with a `CowClipOptimizer`; Keras cannot
        load a schedule; or `path` is a folder of other things, or contains [ or a backslash.
      OSError: `path` is a file, or cannot be renamed.
    """
    check_path("path", path)
    optimizer = optimizer_of(model)
    if not model.built:
        raise ValueError("The model must be built before it is saved. Fit it, or call it, first.")
    in_shards = is_in_shards(model)
    with whole_tables(model):
        if ranks().rank == 0:
            _save(model, optimizer, Path(path))
        if in_shards:
            all_gather_object(None)  # all wait until it is saved


def _save(model: tf.keras.Model, optimizer: CowClipOptimizer, path: Path) -> None:
    _check_schedules(optimizer)
    optimizer.create_slots(model.trainable_variables)
    trained, losses = {v.ref() for v in model.trainable_variables}, model.compiled_loss
    description = {
        "format": FORMAT,
        "modules": sorted({type(one).__module__ for one in model._flatten_layers()} - {"__main__"}),
        "optimizer": tf.keras.optimizers.serialize(model.optimizer),
        "parts": [_settings(part) for part in optimizer.optimizers],
        "losses": tf.nest.map_structure(_loss_as_text, losses._user_losses),
        "loss_weights": losses._user_loss_weights,
        "weights": [{**_described(v), "trained": v.ref() in trained} for v in model.weights],
    }
    text = json.dumps(description, indent=2, default=_as_json) + "\n"
    with replacing(path) as folder:
        with quiet_stack():
            model.save(str(folder))
        _checkpoint(state_of(model, optimizer)).write(str(folder / CHECKPOINT))
        (folder / MARKER).write_text(text, encoding="utf-8")


def load_model(path: str | os.PathLike[str], **compile_arguments: Any) -> tf.keras.Model:
    """A model that `save_model` wrote, Merlin's or Keras's, compiled, its optimizer as it was.

    Args:
      path: the folder.
      compile_arguments: as for `model.compile`, but for the optimizer; without `loss` the loss and
        `loss_weights` are those that the model was compiled with.

    Raises:
      ValueError: the folder holds no whole state, or that of another model; or Keras does not know
        the loss.
    """
    check_path("path", path)
    path = find(Path(path))
    try:
        description = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} must hold {MARKER}, which save_model writes last. Load a model that was saved "
            "otherwise by tf.keras.models.load_model."
        ) from None
    if description["format"] != FORMAT:
        raise ValueError(f"{path} must be of format {FORMAT}. Received: {description['format']}")
    for module in description["modules"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with quiet_stack(), shapes_as_saved():
        model = tf.keras.models.load_model(str(path), compile=False)
    weights = _in_saved_order(model, description["weights"], path)
    _freeze(model, weights, description["weights"])
    optimizer = tf.keras.optimizers.deserialize(description["optimizer"])
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner.bind(model)
    for part, settings in zip(inner.optimizers, description["parts"], strict=True):
        now = _settings(part)
        for name, value in settings.items():
            if value != now.get(name):
                setattr(part, name, value)
    if "loss" not in compile_arguments:
        compile_arguments.setdefault("loss_weights", description["loss_weights"])
        compile_arguments["loss"] = _losses(description["losses"])
    model.compile(**compile_arguments)
    model.optimizer = optimizer  # on several ranks, Merlin's compile takes no loss scaling
    inner.create_slots(model.trainable_variables)
    status = _checkpoint(state_of(model, inner, weights)).read(str(path / CHECKPOINT))
    status.assert_existing_objects_matched()
    return model


def _checkpoint(state: Mapping[str, tf.Variable]) -> tf.train.Checkpoint:
    """A flat one, keyed by name: Keras's object graph differs after a load."""
    return tf.train.Checkpoint(state={name.replace("/", "_"): v for name, v in state.items()})


def _described(variable: tf.Variable) -> dict[str, Any]:
    return {"name": variable.name, "shape": list(variable.shape), "dtype": variable.dtype.name}


def _in_saved_order(
    model: tf.keras.Model, saved: Sequence[dict[str, Any]], path: Path
) -> list[tf.Variable]:
    """The loaded weights as they were saved: Keras may load layers (towers) in another order."""
    reader = tf.train.load_checkpoint(str(path / CHECKPOINT))
    left, found = list(model.weights), []
    for position, described in enumerate(saved):
        value = reader.get_tensor(f"state/weight_{position:04}/.ATTRIBUTES/VARIABLE_VALUE")
        for place, variable in enumerate(left):
            is_alike = _described(variable).items() <= described.items()
            if is_alike and _same_bits(variable.numpy(), value):
                found.append(left.pop(place))
                break
    if left or len(found) != len(saved):
        raise ValueError(
            f"The state in {path / OWN} must belong to the model beside it: weights differ. The "
            "folder was changed after it was saved."
        )
    return found


def _same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    """Whether they hold the same: unlike `==`, NaN is NaN, in any dtype."""
    return np.array_equal(np.ravel(a).view(np.uint8), np.ravel(b).view(np.uint8))


def _freeze(
    model: tf.keras.Model, weights: Sequence[tf.Variable], saved: Sequence[dict[str, Any]]
) -> None:
    """Train the weights that were trained: Keras loads inner layers as trainable."""
    trained = {v.ref(): one["trained"] for v, one in zip(weights, saved, strict=True)}
    for layer in model._flatten_layers(include_self=False):
        own = [trained[v.ref()] for v in layer._trainable_weights if v.ref() in trained]
        if own:
            layer._trainable = any(own)  # the property's setter would freeze layers within it too


def _as_json(value: Any) -> Any:
    """What JSON does not take: numbers and arrays of NumPy and TensorFlow, Keras's mappings."""
    is_mapping = isinstance(value, Mapping)
    return dict(value) if is_mapping else tf.convert_to_tensor(value).numpy().tolist()


def _settings(part: Any) -> Any:
    """A part's configuration as JSON has it, without its learning rate."""
    config = {name: value for name, value in part.get_config().items() if name != "learning_rate"}
    return json.loads(json.dumps(config, default=_as_json))


def _check_schedules(optimizer: CowClipOptimizer) -> None:
    for name in ("dense_schedule", "embedding_schedule"):
        schedule = getattr(optimizer, name)
        if schedule is not None and _as_text(schedule, tf.keras.optimizers.schedules) is None:
            raise ValueError(
                f"Keras cannot load {name}, a {type(schedule).__name__}. Register it, "
                "@tf.keras.utils.register_keras_serializable(), with a get_config of numbers and "
                "texts."
            )


def _as_text(one: Any, kind: Any) -> str | None:
    """A loss or a schedule as Keras's module `kind` writes it, if it loads the same from that."""
    if isinstance(one, str):
        return json.dumps(one)
    try:
        text = json.dumps(kind.serialize(one), default=_as_json)
        found = kind.deserialize(json.loads(text))
    except (TypeError, ValueError):
        return None
    is_same = found is one or (type(found) is type(one) and hasattr(one, "get_config"))
    return text if is_same else None


def _loss_as_text(loss: Any) -> str | None:
    """As `_as_text`; of a loss that Keras would load as another, what `_losses` refuses."""
    # As the default of a `CategoricalOutput`, which Merlin names as Keras's of probabilities.
    return None if loss is None else _as_text(loss, tf.keras.losses) or json.dumps(repr(loss))


def _losses(saved: Any) -> Any:
    try:
        return tf.nest.map_structure(
            lambda text: text and tf.keras.losses.get(json.loads(text)), saved
        )
    except ValueError as error:
        raise ValueError(
            f"The loss must be known to Keras. {error} Give load_model loss=…, or register it."
        ) from None
