"""Save and load a model with its optimizer as one: weights, every slot, the step count.

Keras cannot restore the slots of its legacy optimizers from a SavedModel, and a plain load of
Merlin's resets a `MultiOptimizer`. So a TensorFlow checkpoint of all of it lies in the SavedModel's
folder; a plain load still works, and warns that the optimizer starts anew.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins._checks import check_path
from merlin_cowclip.plugins._tensorflow import RevivedLayer, Tags, quiet_stack, tf
from merlin_cowclip.plugins.distributed.horovod import done_for_all, ranks
from merlin_cowclip.plugins.monitoring.finite import not_finite
from merlin_cowclip.plugins.optimizers.adam import CowClipAdam
from merlin_cowclip.plugins.optimizers.cowclip import CowClipOptimizer, without_state_warning
from merlin_cowclip.plugins.optimizers.parts import as_text
from merlin_cowclip.plugins.optimizers.state import optimizer_of
from merlin_cowclip.plugins.saving.folder import find, replacing
from merlin_cowclip.plugins.saving.gather_tables import is_in_shards, whole_tables
from merlin_cowclip.plugins.schedules import LinearWarmup

FOLDER = "merlin_cowclip"  # within the SavedModel
CHECKPOINT = f"{FOLDER}/state"
MARKER = f"{FOLDER}/state.json"  # written last: without it the state is not whole
SAVED_MODEL = "saved_model.pb"
ENTRIES = (
    *(SAVED_MODEL, "keras_metadata.pb", "fingerprint.pb", "variables", "assets"),
    *(".merlin", FOLDER),
)
FORMAT = 3
_schedules = tf.keras.optimizers.schedules


def save_model(model: tf.keras.Model, path: str | os.PathLike[str]) -> None:
    """Save a compiled model and all state of its `CowClipOptimizer` to the folder `path`.

    The model is Merlin's, `mm.Model`, or Keras's own.

    A model whose tables are in shards is saved as one process has it, by rank 0: all ranks call
    this, at once (`whole_tables`), and go on once it is saved. Any other is saved by rank 0, too:
    Merlin saves nothing on other ranks, nor does this, whether they call it or not. There it
    returns at once: before another rank calls `load_model`, all must meet, as by `hvd.barrier()`.

    Layout: the SavedModel, and in `merlin_cowclip/` a checkpoint with weights, slots
    and step counts in the model's order.

    A model that is there already is replaced as a whole (`folder.py`): whatever interrupts this
    call, and be it the machine's end of the process, `load_model` finds the old model or the new.

    Raises:
      ValueError: the model is not built, or not compiled with a `CowClipOptimizer`; a schedule that
        Keras does not load as what it is, or a configuration of other things than numbers and
        texts; a layer in `clip_tables` whose name is another table's or field's, too; `path` is a
        file, or a folder that is no saved model and has an entry of that name, or has a sign that
        TensorFlow takes for a pattern's.
      OSError: `path` cannot be renamed.
      RuntimeError: on the other ranks, where rank 0 could not save tables in shards, with what it
        said.
    """
    check_path("path", path)
    optimizer = optimizer_of(model)
    if not model.built:
        raise ValueError("The model must be built before it is saved. Fit it, or call it, first.")
    if is_in_shards(model):
        with whole_tables(model), done_for_all("save the model"):
            if ranks().rank == 0:
                save_model(model, path)
        return
    if ranks().rank:
        return
    _check_clip_layers(optimizer)
    optimizer.create_slots(model.trainable_variables)
    weights, losses = _weights(model), _for_each(_loss_as_text, model.loss)
    loss_weights = model.compiled_loss._user_loss_weights
    trained = {v.ref() for v in model.trainable_variables}
    description = {
        "format": FORMAT,
        "modules": sorted({type(one).__module__ for one in model._flatten_layers()} - {"__main__"}),
        "optimizer": optimizer.get_config(),
        "learning_rate": float(tf.keras.backend.get_value(optimizer.learning_rate)),
        "warmup_steps": optimizer.warmup_steps,
        "loss_scale": _loss_scale(model.optimizer),
        "parts": [_settings(part) for part in optimizer.optimizers],
        "losses": losses,
        "loss_weights": loss_weights and tf.nest.map_structure(float, loss_weights),
        "weights": [_described(v) for v in weights],
        "trainable": [v.ref() in trained for v in weights],
    }
    text = json.dumps(description, indent=2, default=_as_json) + "\n"
    with replacing(Path(path), MARKER, ENTRIES, SAVED_MODEL) as folder:
        with quiet_stack():
            model.save(str(folder))
        _checkpoint(weights, optimizer).write(str(folder / CHECKPOINT))
        partial = folder / f"{MARKER}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / MARKER)


def load_model(path: str | os.PathLike[str], **compile_arguments: Any) -> tf.keras.Model:
    """A model that `save_model` wrote, Merlin's or Keras's, compiled, its optimizer as it was.

    The modules of its layers' classes are imported first, so that Keras knows them.

    Args:
      path: the folder.
      compile_arguments: as for `model.compile`, but for the optimizer; without `loss` that which
        the model was compiled with, and its `loss_weights`.

    A model whose weights are not all finite is loaded as it is, with a warning that says so.

    Raises:
      ValueError: the folder holds no whole state, the state does not belong to the model, Keras
        does not know the class of a layer with a table, or the loss; or `path` has a sign that
        TensorFlow takes for a pattern's.
    """
    check_path("path", path)
    path = find(Path(path), MARKER)
    try:
        description = json.loads((path / MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path} must hold {MARKER}, which save_model writes last. Received a "
            "folder without it: a model saved otherwise, or not to the end. "
            "tf.keras.models.load_model loads the model alone."
        ) from None
    if description["format"] != FORMAT:
        raise ValueError(f"{path} must be of format {FORMAT}. Received: {description['format']}")
    for module in description["modules"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with quiet_stack():
        model = tf.keras.models.load_model(str(path), compile=False)
    weights = _in_saved_order(model, description["weights"], path)
    _freeze(model, weights, description["trainable"])
    broken = not_finite(v for v in weights if v.dtype.is_floating)
    if broken:
        warnings.warn(
            f"{len(broken)} of the {len(weights)} weights in {path} hold NaN or infinity, "
            f"the first of them {broken[0].variable}: the model had diverged before it was saved.",
            stacklevel=2,
        )
    with without_state_warning():
        optimizer = CowClipOptimizer.from_config(description["optimizer"])
    optimizer.bind(model)
    _check_classes(model, optimizer)
    for part, settings in zip(optimizer.optimizers, description["parts"], strict=True):
        _restore_settings(part, settings)
    optimizer.resume(description["learning_rate"], description["warmup_steps"])
    if "loss" not in compile_arguments:
        compile_arguments["loss"] = _for_each(_loss_of_text, description["losses"]) or None
        compile_arguments.setdefault("loss_weights", description["loss_weights"])
    compile_arguments = {k: v for k, v in compile_arguments.items() if v is not None}
    model.compile(_with_loss_scale(optimizer, description["loss_scale"]), **compile_arguments)
    optimizer.create_slots(model.trainable_variables)
    status = _checkpoint(weights, optimizer).read(str(path / CHECKPOINT))
    status.assert_existing_objects_matched()
    return model


def _weights(model: tf.keras.Model) -> list[tf.Variable]:
    """All weights in the order of the layers: Keras lists frozen ones last."""
    own = (
        v.ref()
        for layer in model._flatten_layers()
        for v in (*layer._trainable_weights, *layer._non_trainable_weights)
    )
    place = {reference: number for number, reference in enumerate(dict.fromkeys(own))}
    return sorted(model.weights, key=lambda v: place.get(v.ref(), len(place)))


def _described(variable: tf.Variable) -> dict[str, Any]:
    return {"name": variable.name, "shape": list(variable.shape), "dtype": variable.dtype.name}


def _checkpoint(weights: Sequence[tf.Variable], optimizer: CowClipOptimizer) -> tf.train.Checkpoint:
    """A flat checkpoint, keyed by position: Keras's object graph differs after a load."""
    place = {v.ref(): position for position, v in enumerate(weights)}
    slots: list[tf.Variable] = []
    for variable, part, *_ in sorted(optimizer.owned(), key=lambda o: place[o.variable.ref()]):
        slots += [part.get_slot(variable, name) for name in ("m", "v")]
        deferred = part.deferred if isinstance(part, CowClipAdam) else None
        last_step = None if deferred is None else deferred.last_step_of(variable)
        slots += [] if last_step is None else [last_step]
    counters = [optimizer.iterations, *(part.iterations for part in optimizer.optimizers)]
    return tf.train.Checkpoint(weights=list(weights), slots=slots, iterations=counters)


def _in_saved_order(model: tf.keras.Model, saved: list[Any], path: Path) -> list[tf.Variable]:
    """The weights of the loaded model, in the order in which they were saved.

    Keras may load layers in another order (the towers of a `TwoTowerModel`). A weight is the one
    of its name, shape and content; of several such ones, the first is the first among the layers.
    """
    reader = tf.train.load_checkpoint(str(path / CHECKPOINT))
    left, found = dict(enumerate(saved)), {}
    for variable in _weights(model):
        described, value = _described(variable), variable.numpy()
        for position, one in left.items():
            key = f"weights/{position}/.ATTRIBUTES/VARIABLE_VALUE"
            if one == described and _same_bits(value, reader.get_tensor(key)):
                found[position] = variable
                del left[position]
                break
    if left or len(found) != len(model.weights):
        raise ValueError(
            f"The state in {path / FOLDER} must belong to the model beside it. Received weights "
            "that differ: the folder was changed after it was saved."
        )
    return [found[position] for position in range(len(found))]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape hold the same: unlike `==`, NaN is NaN, in any dtype."""
    x, y = (np.ravel(np.ascontiguousarray(array)).view(np.uint8) for array in (a, b))
    return np.array_equal(x, y)


def _freeze(
    model: tf.keras.Model, weights: Sequence[tf.Variable], trainable: Sequence[bool]
) -> None:
    """Which weights are trained, as it was saved: Keras loads inner layers as trainable."""
    trained = {v.ref(): flag for v, flag in zip(weights, trainable, strict=True)}
    for layer in model._flatten_layers(include_self=False):
        own = [trained[v.ref()] for v in layer._trainable_weights if v.ref() in trained]
        if own:
            layer._trainable = any(own)  # the property's setter would freeze layers within it too


def _check_classes(model: tf.keras.Model, optimizer: CowClipOptimizer) -> None:
    """Refuse a table in a layer that Keras loaded without its class: no lookup is recorded."""
    for layer in model._flatten_layers():
        within = list(layer._flatten_layers()) if isinstance(layer, RevivedLayer) else []
        if any(spec.layer is one for spec in optimizer.table_specs for one in within):
            raise ValueError(
                f"Keras does not know the class {type(layer).__name__!r} of the layer "
                f"{layer.name!r}, which holds a table: it predicts, but cannot be trained further. "
                "Give it get_config and @tf.keras.utils.register_keras_serializable(), or load "
                "within tf.keras.utils.custom_object_scope. To predict only, use "
                "tf.keras.models.load_model(path, compile=False)"
            )


def _check_clip_layers(optimizer: CowClipOptimizer) -> None:
    """Refuse layers in `clip_tables` that their names, which are saved, do not tell apart."""
    for item in optimizer.clip_tables or ():
        name = as_text(item)
        if not isinstance(item, str | Tags) and any(
            spec.selected([item]) != spec.selected([name]) for spec in optimizer.table_specs
        ):
            raise ValueError(
                f"clip_tables is saved by name, and {name!r} names more than the layer that is in "
                "it. Give the model's tables different names."
            )


def _as_json(value: Any) -> Any:
    """What JSON does not take, as it does: numbers of NumPy and TensorFlow, arrays too."""
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            "The configuration of an optimizer and its schedules must be made of numbers and "
            f"texts to be saved. Received: an object of type {type(value).__name__} in it."
        )
    return array.tolist()


def _settings(part: Any) -> dict[str, Any]:
    """A part's configuration; of a learning rate that warms up, what it rises to."""
    config, rate = dict(part.get_config()), part._hyper["learning_rate"]
    if isinstance(rate, LinearWarmup) and isinstance(rate.warmup_steps, tf.Variable):
        config["learning_rate"] = rate = rate.get_config()["learning_rate"]
    settings: dict[str, Any] = json.loads(json.dumps(config, default=_as_json))
    if callable(rate) and not _loads_as(rate, _schedules.deserialize, settings["learning_rate"]):
        raise ValueError(
            f"Keras must load the schedule of {config['name']!r} as what it is. Received: "
            f"{type(rate).__name__}, which it does not know, or knows as another class. Register "
            "it: @tf.keras.utils.register_keras_serializable()."
        )
    return settings


def _restore_settings(part: Any, settings: dict[str, Any]) -> None:
    """Set on a new part what differs from it in another's `_settings`."""
    now = _settings(part)
    for name, value in settings.items():
        if value != now.get(name):
            is_schedule = name == "learning_rate" and isinstance(value, dict)
            setattr(part, name, _schedules.deserialize(value) if is_schedule else value)


def _loads_as(one: Any, deserialize: Any, saved: Any) -> bool:
    """Whether Keras loads a saved object, or function, as what it is."""
    try:
        found = deserialize(saved)
    except (TypeError, ValueError):
        return False
    return found is one or (type(found) is type(one) and hasattr(one, "get_config"))


def _for_each(change: Callable[[Any], Any], losses: Any) -> Any:
    """Change each loss of a model that has one, a list, or one by output."""
    if isinstance(losses, Mapping):
        return {output: change(loss) for output, loss in losses.items()}
    is_list = isinstance(losses, list | tuple)
    return [change(loss) for loss in losses] if is_list else change(losses)


def _loss_as_text(loss: Any) -> str | None:
    """A loss as Keras writes it; a name that it does not know where it would load another one.

    Merlin saves an output's default loss by the name of Keras's: a `CategoricalOutput`, whose
    outputs are logits, would go on with Keras's loss of probabilities.
    """
    if loss is None:
        return None
    with contextlib.suppress(TypeError, ValueError):  # not of Keras's kind
        text = json.dumps(loss if isinstance(loss, str) else tf.keras.losses.serialize(loss))
        if isinstance(loss, str) or _loads_as(loss, tf.keras.losses.get, json.loads(text)):
            return text
    named = loss if hasattr(loss, "__name__") else type(loss)
    return json.dumps(f"{named.__module__}.{named.__name__}")


def _loss_of_text(text: str | None) -> Any:
    if text is None:
        return None
    saved = json.loads(text)
    try:
        return tf.keras.losses.get(saved)
    except ValueError:
        name = saved if isinstance(saved, str) else saved.get("class_name")
        raise ValueError(
            f"The loss must be known to Keras. Received: {name!r}, with which the model was "
            "compiled. Give load_model loss=…, or register it with Keras."
        ) from None


def _loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """The state of Keras's loss scaling, as plain numbers; `None` where it is not used."""
    if not isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        return None
    return {
        "scale": float(optimizer.loss_scale),
        "growth_steps": optimizer.dynamic_growth_steps,
        "counter": int(optimizer.dynamic_counter) if optimizer.dynamic else 0,
    }


def _with_loss_scale(optimizer: CowClipOptimizer, state: dict[str, Any] | None) -> Any:
    if state is None:
        return optimizer
    growth = state["growth_steps"]
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(
        optimizer, growth is not None, initial_scale=state["scale"], dynamic_growth_steps=growth
    )
    if scaled.dynamic:
        scaled.dynamic_counter.assign(state["counter"])
    return scaled
