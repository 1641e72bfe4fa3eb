"""No training step has random state of its own: what a checkpoint holds is all that there is."""

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from merlin_cowclip.models import MODELS
from merlin_cowclip.workflows.training.builder import compile_model, network
from merlin_cowclip.workflows.training.configuration import UPDATES, TrainConfig
from merlin_cowclip.workflows.training.loader import Loader


def random_ops(function: tf.types.experimental.ConcreteFunction) -> list[str]:
    """The ops of a graph, and of all functions in it, that draw from a state which they keep."""
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for f in graph.library.function for node in f.node_def)]
    return sorted({node.op for node in nodes if draws(node.op)})


def draws(op: str) -> bool:
    """Ops with seeds of their own, and those that take a generator's state."""
    definition = op_def_registry.get(op)
    seeds = definition is not None and {"seed", "seed2"} & {a.name for a in definition.attr}
    if op.endswith("PartitionedCall"):
        return False
    return bool(seeds) or "Rng" in op or op.startswith("Stateful")


def step_of(model, loader):
    """The training step, as it is traced for this loader's batches."""
    step = tf.function(lambda features, labels: model.train_step((features, labels)))
    return step.get_concrete_function(*loader.element_spec)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "fm" else pytest.mark.extended) for n in MODELS],
)
def test_no_step_draws_random_numbers(data, name):
    options = {"mlp": (4,), "bottom_mlp": (4,)} if name == "dlrm" else {}
    options |= {} if name == "lr" else {"embedding_dim": 4}
    update = UPDATES[list(MODELS).index(name) % len(UPDATES)]
    config = TrainConfig(model=name, rule="cowclip", batch_size=500, update=update, **options)
    loader = Loader(data, batch_size=500)
    model, steps = network(config, data.schema), len(loader)
    optimizer = compile_model(config, model, updates=steps, batches=steps)
    optimizer.observe()
    model(loader.peek()[0])
    assert random_ops(step_of(model, loader)) == []


def test_one_that_does_is_noticed():
    generator = tf.random.Generator.from_seed(1)

    @tf.function
    def step(x):
        inner = tf.cond(x[0] > 0, lambda: tf.nn.dropout(x, 0.5), lambda: x)
        return inner + generator.normal([3]) + tf.random.stateless_normal([3], [1, 2])

    found = random_ops(step.get_concrete_function(tf.TensorSpec([3])))
    assert found == ["RandomUniform", "RngReadAndSkip"]
