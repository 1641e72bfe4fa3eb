"""Save and load a model with its optimizer as one: weights, every slot, the step count.

Keras cannot restore the slots of its legacy optimizers from a SavedModel, and a plain load of
Merlin's resets a `MultiOptimizer`. So a TensorFlow checkpoint of all of it lies in the SavedModel's
folder; a plain load still works, and warns that the optimizer starts anew.
"""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from merlin_cowclip.plugins._stack import Tags, quiet_stack, tf
from merlin_cowclip.plugins.adam import CowClipAdam
from merlin_cowclip.plugins.checks import check_path
from merlin_cowclip.plugins.configured import as_json, state_follows
from merlin_cowclip.plugins.joining import done_for_all, ranks
from merlin_cowclip.plugins.merlin_tables import find_tables
from merlin_cowclip.plugins.optimizer import CowClipOptimizer, Owned
from merlin_cowclip.plugins.part_settings import set_again, settings_of
from merlin_cowclip.plugins.replacing import find, replacing
from merlin_cowclip.plugins.state import optimizer_of
from merlin_cowclip.plugins.whole import is_in_shards, whole_tables

FOLDER = "merlin_cowclip"  # within the SavedModel
CHECKPOINT = "state"
DESCRIPTION = "state.json"  # written last: without it the state is not whole
MARKER = f"{FOLDER}/{DESCRIPTION}"
SAVED_MODEL = (
    *("saved_model.pb", "keras_metadata.pb", "fingerprint.pb", "variables", "assets"),
    *(".merlin", FOLDER),
)
SIGNS = ("saved_model.pb",)  # of a model that was saved otherwise
SLOTS = ("m", "v")
_OF_ALL = "*"  # outputs
FORMAT = 2


def save_model(model: tf.keras.Model, path: str | os.PathLike[str]) -> None:
    """Save a compiled model and all state of its `CowClipOptimizer` to the folder `path`.

    The model is Merlin's, `mm.Model`, or Keras's own.

    A model whose tables are in shards is saved as one process has it, by rank 0: all ranks call
    this, at once (`whole_tables`), and go on once it is saved. Any other is saved by rank 0, too:
    Merlin saves nothing on other ranks, nor does this, whether they call it or not. There it
    returns at once: before another rank calls `load_model`, all must meet, as by `hvd.barrier()`.

    Layout: the SavedModel, and in `merlin_cowclip/` a checkpoint with weights, slots
    and step counts in the model's order.

    A model that is there already is replaced as a whole (`replacing.py`): whatever interrupts this
    call, and be it the machine's end of the process, `load_model` finds the old model or the new.

    Raises:
      ValueError: the model is not built, or not compiled with a `CowClipOptimizer`; a schedule of
        one's own has the name of one of Keras's, or a configuration of other things than numbers
        and texts; `path` is a file, or holds a model and cannot be renamed, or has a sign that
        TensorFlow takes for a pattern's.
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
    if _slots(optimizer.owned(), every=False):
        # A weight that no gradient has reached yet has none; zeros are what its first step finds.
        optimizer.create_slots(model.trainable_variables)
    trained = {v.ref() for v in model.trainable_variables}
    description = {
        "format": FORMAT,
        "optimizer": optimizer.get_config(),
        "clip_layers": _clip_layers(model, optimizer),
        "learning_rate": float(tf.keras.backend.get_value(optimizer.learning_rate)),
        "warmup_steps": optimizer.warmup_steps,
        "loss_scale": _loss_scale(model.optimizer),
        "parts": [settings_of(part) for part in optimizer.optimizers],
        "losses": _losses(model),
        "loss_weights": _loss_weights(model),
        "weights": [_described(v) for v in model.weights],
        "trainable": [v.ref() in trained for v in model.weights],
        "places": _places(model),
        "slots": len(_slots(optimizer.owned())),
    }
    text = json.dumps(description, indent=2, default=as_json) + "\n"
    with replacing(Path(path), MARKER, SAVED_MODEL, SIGNS) as folder:
        with quiet_stack(), state_follows():  # Merlin loads what it saved, for the output's schema
            model.save(str(folder))
        _state(model, optimizer).write(str(folder / FOLDER / CHECKPOINT))
        partial = folder / FOLDER / f".{DESCRIPTION}.partial"
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, folder / MARKER)


def load_model(path: str | os.PathLike[str], **compile_arguments: Any) -> tf.keras.Model:
    """A model that `save_model` wrote, Merlin's or Keras's, compiled, its optimizer as it was.

    Args:
      path: the folder.
      compile_arguments: as for `model.compile`, but for the optimizer; without `loss` that which
        the model was compiled with, and its `loss_weights`.

    A model whose weights are not all finite is loaded as it is, with a warning that says so; so is
    one whose class Keras does not know, which is none to train on.

    Raises:
      ValueError: the folder holds no whole state, the state does not belong to the model, Keras
        does not know the class of one whose rows wait for updates (`update="deferred"`), or a
        loss was saved that is neither registered with Keras nor given as `loss`; or `path` has a
        sign that TensorFlow takes for a pattern's.
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
    with quiet_stack():
        model = tf.keras.models.load_model(str(path), compile=False)
    order = _saved_order(model, description, path)
    place = {v.ref(): position for v, position in zip(model.weights, order, strict=True)}
    with state_follows():
        optimizer = CowClipOptimizer.from_config(_with_clip_layers(description, model, place))
    _freeze(model, [description["trainable"][position] for position in order])
    order = [place[v.ref()] for v in model.weights]  # Keras lists frozen ones last
    _warn_of_weights_that_are_not_finite(model, path)
    optimizer.bind(model)
    for part, settings in zip(optimizer.optimizers, description["parts"], strict=True):
        set_again(part, settings)
    optimizer.resume(description["learning_rate"], description["warmup_steps"])
    outer = _with_loss_scale(optimizer, description["loss_scale"])
    if description["loss_weights"] and "loss" not in compile_arguments:
        compile_arguments.setdefault("loss_weights", description["loss_weights"])
    if description["losses"] and "loss" not in compile_arguments:
        compile_arguments["loss"] = _losses_of(description["losses"])
    model.compile(optimizer=outer, **compile_arguments)
    if description["slots"]:
        optimizer.create_slots(model.trainable_variables)
    status = _state(model, optimizer, order).read(str(path / FOLDER / CHECKPOINT))
    status.assert_existing_objects_matched()
    return model


def _slots(owned: Iterable[Owned], *, every: bool = True) -> list[tf.Variable]:
    """The moments of these variables; none before the first step.

    Args:
      owned: the variables.
      every: whether each variable of a part that has moments must have them (`KeyError`), or those
        are listed that there are.
    """
    found = []
    for variable, owner, *_ in owned:
        names = [name for name in SLOTS if name in owner.get_slot_names()]
        if not every:
            names = [name for name in names if _has_slot(owner, variable, name)]
        found += [owner.get_slot(variable, name) for name in names]
        deferred = owner.deferred if isinstance(owner, CowClipAdam) else None
        last_step = None if deferred is None else deferred.last_step_of(variable)
        found += [] if last_step is None else [last_step]
    return found


def _has_slot(owner: Any, variable: tf.Variable, name: str) -> bool:
    try:
        owner.get_slot(variable, name)
    except KeyError:
        return False
    return True


def _freeze(model: tf.keras.Model, trainable: Sequence[bool]) -> None:
    """Which weights are trained, as it was saved: Keras loads inner layers as trainable.

    Args:
      model: the loaded one.
      trainable: for each of its weights.
    """
    trained = {v.ref(): flag for v, flag in zip(model.weights, trainable, strict=True)}
    for layer in model._flatten_layers(include_self=False):
        own = [trained[v.ref()] for v in layer._trainable_weights if v.ref() in trained]
        if own:
            layer._trainable = any(own)  # the property's setter would freeze layers within it too


def _clip_layers(model: tf.keras.Model, optimizer: CowClipOptimizer) -> list[list[int] | None]:
    """Of each item of `clip_tables` that is a layer, where its tables stand among the weights.

    By name, as `get_config` has it, it could be another layer's: names of tables may repeat.
    """
    place = {v.ref(): position for position, v in enumerate(model.weights)}
    built = [spec for spec in optimizer.table_specs if spec.layer.built]
    return [
        None
        if isinstance(item, str | Tags)
        else [place[spec.variable.ref()] for spec in built if any(spec.selected([item]))]
        for item in optimizer.clip_tables or ()
    ]


def _with_clip_layers(
    description: Mapping[str, Any], model: tf.keras.Model, place: Mapping[Any, int]
) -> dict[str, Any]:
    """The optimizer's configuration, with layers of `model` for what `_clip_layers` wrote."""
    config = dict(description["optimizer"])
    if any(description["clip_layers"]):
        layers = {place[s.variable.ref()]: s.layer for s in find_tables(model) if s.layer.built}
        pairs = zip(config["clip_tables"], description["clip_layers"], strict=True)
        chosen = [[layers[p] for p in found] if found else [item] for item, found in pairs]
        config["clip_tables"] = list(itertools.chain.from_iterable(chosen))
    return config


def _state(
    model: tf.keras.Model, optimizer: CowClipOptimizer, order: Sequence[int] = ()
) -> tf.train.Checkpoint:
    """A flat checkpoint, keyed by position: Keras's object graph differs after a load.

    Args:
      model: its weights in the order of `order`, or in their own.
      optimizer: the model's.
      order: for each weight, its position in the checkpoint.
    """
    weights = list(model.weights)
    positions = order or range(len(weights))
    place = {v.ref(): position for v, position in zip(weights, positions, strict=True)}
    counters = [optimizer.iterations, *(part.iterations for part in optimizer.optimizers)]
    tracked = {
        "weights": sorted(weights, key=lambda v: place[v.ref()]),
        "slots": _slots(sorted(optimizer.owned(), key=lambda o: place[o.variable.ref()])),
        "iterations": counters,
    }
    return tf.train.Checkpoint(**tracked)


def _saved_order(model: tf.keras.Model, description: dict[str, Any], path: Path) -> list[int]:
    """For each weight of the loaded model, its position among the saved ones.

    Slots are kept by the position of their weight, and Keras may load layers in another order (the
    towers of a `TwoTowerModel`). A weight is the one of its name, shape and content; of several
    such ones, as of tables with the same given values, the first is the first among the layers.
    """
    reader = tf.train.load_checkpoint(str(path / FOLDER / CHECKPOINT))
    saved, weights = description["weights"], list(model.weights)
    places, mine = description["places"], _places(model)
    left = sorted(range(len(saved)), key=lambda i: places[i])
    order = {}
    for at in sorted(range(len(weights)), key=lambda i: mine[i]):
        described, value = _described(weights[at]), weights[at].numpy()
        found = next(
            (
                i
                for i in left
                if saved[i] == described
                and _same_bits(value, reader.get_tensor(f"weights/{i}/.ATTRIBUTES/VARIABLE_VALUE"))
            ),
            None,
        )
        if found is None:
            break
        left.remove(found)
        order[at] = found
    if left or len(order) != len(weights):
        raise ValueError(
            f"The state in {path / FOLDER} must belong to the model beside it. Received weights "
            "that differ: the folder was changed after it was saved."
        )
    return [order[at] for at in range(len(weights))]


def _places(model: tf.keras.Model) -> list[int]:
    """For each weight, its place among those of all layers: Keras lists frozen ones last."""
    own = (
        v.ref()
        for layer in model._flatten_layers()
        for v in (*layer._trainable_weights, *layer._non_trainable_weights)
    )
    place = {reference: number for number, reference in enumerate(dict.fromkeys(own))}
    return [place.get(v.ref(), len(place)) for v in model.weights]


def _same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays hold the same: unlike `==`, NaN is NaN, in any dtype."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    x, y = (np.ravel(np.ascontiguousarray(array)).view(np.uint8) for array in (a, b))
    return np.array_equal(x, y)


def _warn_of_weights_that_are_not_finite(model: tf.keras.Model, path: Path) -> None:
    broken = [
        v.name
        for v in model.weights
        if v.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(v)))
    ]
    if broken:
        warnings.warn(
            f"{len(broken)} of the {len(model.weights)} weights in {path} hold NaN or infinity, "
            f"the first of them {broken[0]}: the model had diverged before it was saved.",
            stacklevel=3,
        )


def _described(variable: tf.Variable) -> dict[str, Any]:
    return {"name": variable.name, "shape": list(variable.shape), "dtype": variable.dtype.name}


def _loss_scale(optimizer: Any) -> dict[str, Any] | None:
    """The state of Keras's loss scaling, as plain numbers; `None` where it is not used."""
    if not isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer):
        return None
    return {
        "scale": float(optimizer.loss_scale),
        "growth_steps": optimizer.dynamic_growth_steps,
        "counter": int(optimizer.dynamic_counter) if optimizer.dynamic else 0,
    }


def _losses(model: tf.keras.Model) -> Any:
    """What the model was compiled with, as Keras writes it; `None` without a loss.

    By output, as Merlin's models have them, or as Keras takes them: a list by output, or of all
    outputs the one in `_OF_ALL`.

    Merlin saves an output's default loss by the name of Keras's: a `CategoricalOutput`, whose
    outputs are logits, would go on with Keras's loss of probabilities.
    """
    if model.loss is None:
        return None
    if isinstance(model.loss, Mapping):
        return {output: _loss(loss) for output, loss in model.loss.items()}
    if isinstance(model.loss, list | tuple):
        return [_loss(loss) for loss in model.loss]
    return {_OF_ALL: _loss(model.loss)}


def _loss(loss: Any) -> Any:
    if loss is None:  # of an output that has none
        return None
    try:
        saved = json.loads(
            json.dumps(loss if isinstance(loss, str) else tf.keras.losses.serialize(loss))
        )
    except (TypeError, ValueError):  # not of Keras's kind; load_model says what to do
        saved = getattr(loss, "__name__", type(loss).__name__)
    if not isinstance(loss, str) and _is_of_another(saved, loss):
        named = loss if hasattr(loss, "__name__") else type(loss)
        saved = f"{named.__module__}.{named.__name__}"  # load_model finds none by it
    return saved


def _losses_of(saved: Any) -> Any:
    """What `_losses` has written, to compile with."""
    if isinstance(saved, list):
        return [_loss_of(loss, f"output {number}") for number, loss in enumerate(saved)]
    if _OF_ALL in saved:
        return _loss_of(saved[_OF_ALL], "all outputs")
    return {output: _loss_of(loss, repr(output)) for output, loss in saved.items()}


def _is_of_another(saved: Any, loss: Any) -> bool:
    """Whether Keras has a loss of its own by the name of this one, and would load that."""
    try:
        found = tf.keras.losses.get(saved)
    except (TypeError, ValueError):
        return False
    is_loss = isinstance(loss, tf.keras.losses.Loss)
    return not (found is loss or (is_loss and type(found) is type(loss)))


def _loss_weights(model: tf.keras.Model) -> Any:
    """By output, or in the order of outputs, as the model was compiled with; `None` without."""
    weights = model.compiled_loss._user_loss_weights
    return None if weights is None else tf.nest.map_structure(float, weights)


def _loss_of(saved: Any, output: str) -> Any:
    if saved is None:
        return None
    try:
        return tf.keras.losses.get(saved)
    except ValueError:
        name = saved if isinstance(saved, str) else saved.get("class_name")
        raise ValueError(
            f"The loss of {output} must be known to Keras. Received: {name!r}, with which the "
            "model was compiled. Give load_model loss=…, or register it with Keras."
        ) from None


def _with_loss_scale(optimizer: CowClipOptimizer, state: dict[str, Any] | None) -> Any:
    if state is None:
        return optimizer
    dynamic = state["growth_steps"] is not None
    scaled = tf.keras.mixed_precision.LossScaleOptimizer(
        optimizer,
        dynamic=dynamic,
        initial_scale=state["scale"],
        dynamic_growth_steps=state["growth_steps"],
    )
    if dynamic:
        scaled.dynamic_counter.assign(state["counter"])
    return scaled
