"""A `CowClipOptimizer` on several ranks of Horovod: an equal start, and gradients of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.distributed.gradients import all_reduce_dense
from merlin_cowclip.plugins.distributed.horovod import (
    all_gather_object,
    broadcast,
    check_same,
)
from merlin_cowclip.plugins.distributed.sharding import agree_on_finite
from merlin_cowclip.plugins.optimizers.state import state_of

if TYPE_CHECKING:
    from merlin_cowclip.plugins.optimizers.cowclip import CowClipOptimizer


def broadcast_state(optimizer: CowClipOptimizer, model: tf.keras.Model) -> None:
    """Give all ranks rank 0's state, after checking that they train the same by the same."""
    _check_losses(model)
    sharded = optimizer.in_shards()
    state = [v for v in state_of(model, optimizer).values() if v.ref() not in sharded]
    tables = [
        {
            "fields": [column.name for column in spec.columns],
            "first rows": spec.row_offsets,
            "width": spec.width,
            "clipped": clipped,
            "in shards": spec.shard is not None,
        }
        for spec, clipped in optimizer.clipped_ranges().items()
    ]
    described = {
        "update": optimizer.update_mode,
        "hyperparameters": optimizer.hyperparameters.to_dict(),
        "tables": tables,
        "variables": len(state),
    }
    check_same(described, "All ranks must train the same model by the same optimizer.")
    broadcast(state)


def synchronize(optimizer: CowClipOptimizer, model: tf.keras.Model) -> None:
    """Broadcast rank 0's state as a fit begins, its learning rate as another epoch does.

    A model that some rank has not built yet is broadcast in its first step.
    """
    if optimizer.is_started:
        broadcast([optimizer.learning_rate])
    elif all(all_gather_object(bool(model.built))):
        optimizer.create_slots(model.trainable_variables)
        optimizer.broadcast()


def reduce_gradients(
    optimizer: CowClipOptimizer, pairs: Sequence[tuple[Any, tf.Variable]], *, scaled: bool = False
) -> list[Any]:
    """Gradients and counts of the global batch, from those of this rank's share.

    The same on all ranks, but of sharded tables, of which each rank has those of its rows.

    Args:
      optimizer: which starts, if it has not.
      pairs: gradients of the share's mean loss and their variables.
      scaled: whether loss scaling decides by them whether to make the step: then a gradient that is
        not finite on one rank is so on all.
    """
    _start(optimizer, [variable for _, variable in pairs])
    reduced: dict[Any, Any] = {}
    # An id out of range ends the step before the other ranks hear of it: they would make it.
    with tf.control_dependencies(optimizer.checks_of_ids()):
        for part, mine in optimizer.by_part(pairs):
            if part is not optimizer.default_optimizer:
                reduced.update((v.ref(), gradient) for gradient, v in part.reduce(mine))
            else:
                means = all_reduce_dense([gradient for gradient, _ in mine])
                reduced.update((v.ref(), mean) for mean, (_, v) in zip(means, mine, strict=True))
    if scaled:
        sharded = [key for key in reduced if key in optimizer.in_shards()]
        checked = agree_on_finite([reduced[key] for key in sharded])
        reduced.update(zip(sharded, checked, strict=True))
    return [(reduced[variable.ref()], variable) for _, variable in pairs]


def _start(optimizer: CowClipOptimizer, variables: list[tf.Variable]) -> None:
    if optimizer.awaits_rank_sync:
        raise ValueError(
            "On several ranks, fit needs the callback RankSync. Received: none in callbacks. "
            "Pass it first and last: sync = RankSync(); fit(…, callbacks=[sync, …, sync])."
        )
    with tf.init_scope():
        optimizer.create_slots(variables)
    if optimizer.is_started:
        return
    if tf.executing_eagerly():
        raise ValueError(
            "On several ranks all must begin with the same weights. Received: a first eager step. "
            "Call the model on a batch, so that it is built, then optimizer.broadcast(), before "
            "it; or make the step in a tf.function, or by fit, which broadcast themselves."
        )
    with tf.init_scope():  # while the step is traced: it runs after this
        optimizer.broadcast()


def _check_losses(model: tf.keras.Model) -> None:
    """Refuse losses that are no means over samples: the ranks' gradients are averaged."""
    for loss in tf.nest.flatten(getattr(model, "loss", None)):
        reduction = getattr(loss, "reduction", None)
        if reduction in (tf.keras.losses.Reduction.SUM, tf.keras.losses.Reduction.NONE):
            raise ValueError(
                "On several ranks all losses must be means over their samples: the ranks' "
                f"gradients are averaged. Received: {type(loss).__name__}(reduction="
                f'{reduction!r}). Use reduction="sum_over_batch_size", or leave it out.'
            )
