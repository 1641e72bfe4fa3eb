"""What the tests of the networks share: schemas, a batch, and each network's formula in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from merlin_cowclip.models import MODELS
from merlin_cowclip.models.blocks import (
    DCNBlock,
    DCNv2Block,
    DeepFMBlock,
    DLRMBlock,
    FMBlock,
    LogisticRegressionBlock,
    VectorCross,
    WideAndDeepBlock,
)
from merlin_cowclip.models.ctr_block import CTRBlock, Probability
from merlin_cowclip.plugins._tensorflow import ColumnSchema, Schema, Tags

from .embeddings import column as ids_column

WIDTH, MLP, BOTTOM = 3, (8, 5), (6, 4)

# Schemas and batches


def schema_of(ids: dict[str, int], numbers=(), lists: dict[str, int] | None = None, targets=1):
    columns = [ids_column(name, size) for name, size in ids.items()]
    columns += [ids_column(name, size, is_list=True) for name, size in (lists or {}).items()]
    columns += [ColumnSchema(n, tags=[Tags.CONTINUOUS], dtype="float32") for n in numbers]
    for i in range(targets):
        tags = [Tags.TARGET, Tags.BINARY_CLASSIFICATION]
        columns.append(ColumnSchema(f"click{i}", tags=tags, dtype="int64"))
    return Schema(columns)


SIZES = {"user": 9, "item": 6, "hour": 5}
NUMBERS = ("price", "age")
SCHEMA = schema_of(SIZES, NUMBERS, {"genres": 7})
LISTS = [[3, 5, 5], [], [6], [4, 3], [0, 3], [4]]
OTHER_LISTS = [[4], [4, 5], [], [], [3, 3, 3], [6, 5, 4]]
ROWS = len(LISTS)
LABELS = np.array([[1.0], [0.0], [0.0], [1.0], [1.0], [0.0]], "float32")


def features(schema=SCHEMA, lists=LISTS) -> dict[str, tf.Tensor]:
    """A batch as the loader gives it."""
    random = np.random.default_rng(4)
    given: dict[str, Any] = {}
    for column in schema.excluding_by_tag(Tags.TARGET):
        if column.is_list:
            given[f"{column.name}__values"] = np.array(list(itertools.chain(*lists)), "int64")
            given[f"{column.name}__offsets"] = np.cumsum([0, *map(len, lists)])
        elif Tags.CATEGORICAL in column.tags:
            size = column.int_domain.max + 1
            given[column.name] = random.integers(min(3, size - 1), size, (len(lists), 1))
        else:
            given[column.name] = random.random((len(lists), 1)).astype("float32")
    return {name: tf.constant(values) for name, values in given.items()}


class Sample(NamedTuple):
    """One row of a batch: each field's rows of the table with their shares, and the numbers."""

    fields: list[list[tuple[int, float]]]
    numbers: list[float]


SHARES = {"mean": lambda n: 1 / n, "sum": lambda n: 1.0, "sqrtn": lambda n: n**-0.5}


def samples_of(given, schema=SCHEMA, combiner="mean") -> list[Sample]:
    """One-hot fields, then lists, each in the schema's order; 0 in a ragged list is an id."""
    ids = schema.select_by_tag(Tags.CATEGORICAL)
    columns = sorted(ids, key=lambda column: bool(column.is_list))
    numbers = schema.select_by_tag(Tags.CONTINUOUS).column_names
    count = next(len(t) for n, t in given.items() if not n.endswith(("__values", "__offsets")))
    samples = []
    for i in range(count):
        fields, first = [], 0
        for column in columns:
            if column.is_list:
                start, stop = given[f"{column.name}__offsets"].numpy()[i : i + 2]
                held = given[f"{column.name}__values"].numpy()[start:stop].tolist()
            else:
                held = [given[column.name].numpy()[i, 0]]
            fields.append([(first + int(k), SHARES[combiner](len(held))) for k in held])
            first += column.int_domain.max + 1
        samples.append(Sample(fields, [float(given[name][i, 0]) for name in numbers]))
    return samples


# Parts of a model


def block_of(model) -> CTRBlock:
    (block,) = (layer for layer in model._flatten_layers() if isinstance(layer, CTRBlock))
    return block


def probability_of(model) -> Probability:
    (layer,) = (layer for layer in model._flatten_layers() if isinstance(layer, Probability))
    return layer


def dense_layers(layer) -> list[tf.keras.layers.Dense]:
    return [x for x in layer._flatten_layers() if isinstance(x, tf.keras.layers.Dense)]


def weights_of(model) -> dict[str, tf.Variable]:
    """Every trainable variable by what it is in the formula."""
    block = block_of(model)
    found = {"bias": probability_of(model).bias}
    for name in ("embeddings", "linear"):
        if hasattr(block, name):
            found[name] = getattr(block, name).table
    for name in ("continuous_logit", "deep_logit", "cross_logit", "top_logit"):
        if hasattr(block, name) and getattr(block, name).built:
            found[name] = getattr(block, name).kernel
    for name in ("deep", "bottom", "top"):
        for i, dense in enumerate(dense_layers(getattr(block, name, tf.keras.layers.Layer()))):
            found |= {f"{name}/{i}/kernel": dense.kernel, f"{name}/{i}/bias": dense.bias}
    cross = getattr(block, "cross", None)
    if isinstance(cross, VectorCross):
        for i, (kernel, bias) in enumerate(zip(cross.kernels, cross.biases, strict=True)):
            found |= {f"cross/{i}/kernel": kernel, f"cross/{i}/bias": bias}
    elif cross is not None:
        for i, layer in enumerate(cross.layers):
            (dense,) = dense_layers(layer.dense.dense)
            found |= {f"cross/{i}/kernel": dense.kernel, f"cross/{i}/bias": dense.bias}
            if layer.dense.low_rank_dim:
                (inner,) = dense_layers(layer.dense.dense_u)
                found[f"cross/{i}/inner"] = inner.kernel
    given, named = model.trainable_variables, list(found.values())
    assert len(given) == len(named)
    assert {v.ref() for v in given} == {v.ref() for v in named}
    return found


def network_weights(model) -> int:
    """How many weights the network has without its embeddings, as Table 7 counts them."""
    weights = weights_of(model).items()
    return sum(int(np.prod(v.shape)) for n, v in weights if n not in ("embeddings", "linear"))


# Formulas: weights (by the names of `weights_of`) and one sample to one logit


def combined(table, field) -> np.ndarray:
    return sum((table[row] * share for row, share in field), np.zeros(table.shape[1]))


def vectors(w, sample) -> list[np.ndarray]:
    return [combined(w["embeddings"], field) for field in sample.fields]


def inputs(w, sample) -> np.ndarray:
    return np.concatenate([*vectors(w, sample), sample.numbers])


def linear(w, sample) -> float:
    y = sum(combined(w["linear"], field)[0] for field in sample.fields)
    for i, number in enumerate(sample.numbers):
        y += number * w["continuous_logit"][i, 0]
    return y


def pairs(w, sample) -> float:
    """Rendle 2010, equation 1: Σ_{i<j} ⟨v_i, v_j⟩."""
    return sum(float(np.dot(v, u)) for v, u in itertools.combinations(vectors(w, sample), 2))


def depth(w, name) -> int:
    return sum(key.startswith(f"{name}/") and key.endswith("/kernel") for key in w)


def mlp(w, name, x) -> np.ndarray:
    for i in range(depth(w, name)):
        x = np.maximum(x @ w[f"{name}/{i}/kernel"] + w[f"{name}/{i}/bias"], 0.0)
    return x


def deep(w, sample) -> float:
    return float(mlp(w, "deep", inputs(w, sample)) @ w["deep_logit"][:, 0])


def cross_of_vectors(w, sample) -> float:
    """Wang et al. 2017, equation 3: x_{l+1} = x_0 (x_lᵀ w_l) + b_l + x_l."""
    x0 = x = inputs(w, sample)
    for layer in range(depth(w, "cross")):
        kernel, bias = w[f"cross/{layer}/kernel"][:, 0], w[f"cross/{layer}/bias"]
        product = sum(x[j] * kernel[j] for j in range(len(x)))
        x = np.array([x0[i] * product + bias[i] + x[i] for i in range(len(x))])
    return float(x @ w["cross_logit"][:, 0])


def cross_of_matrices(w, sample) -> float:
    """Wang et al. 2021, equation 1: x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l.

    Equation 2 has W = U Vᵀ. A Keras kernel multiplies from the right, and so is the transpose.
    """
    x0 = x = inputs(w, sample)
    for layer in range(depth(w, "cross")):
        matrix, bias = w[f"cross/{layer}/kernel"].T, w[f"cross/{layer}/bias"]
        if f"cross/{layer}/inner" in w:
            matrix = matrix @ w[f"cross/{layer}/inner"].T
        projected = [matrix[i] @ x + bias[i] for i in range(len(x))]
        x = np.array([x0[i] * projected[i] + x[i] for i in range(len(x))])
    return float(x @ w["cross_logit"][:, 0])


def dlrm(w, sample) -> float:
    """Naumov et al. 2019, Section 2: the top MLP over z_0 and the products of all pairs."""
    first = [mlp(w, "bottom", np.array(sample.numbers))] if sample.numbers else []
    z = first + vectors(w, sample)
    products = [float(np.dot(a, b)) for a, b in itertools.combinations(z, 2)]
    return float(mlp(w, "top", np.concatenate([*first, products])) @ w["top_logit"][:, 0])


class Network(NamedTuple):
    """A builder with small arguments, its block, and the formula of its logit, term by term."""

    builder: str
    block: type[CTRBlock]
    terms: tuple[Callable[[Any, Sample], float], ...]
    options: Mapping[str, Any] = MappingProxyType({})

    def build(self, schema=SCHEMA, **options):
        small = {"embedding_dim": WIDTH, "mlp": MLP}
        return MODELS[self.builder](schema, **{**small, **self.options, **options})

    def logit(self, weights, sample) -> float:
        return float(weights["bias"][0]) + sum(term(weights, sample) for term in self.terms)


NETWORKS = {
    "lr": Network("lr", LogisticRegressionBlock, (linear,)),
    "fm": Network("fm", FMBlock, (linear, pairs)),
    "wide_and_deep": Network("wide_and_deep", WideAndDeepBlock, (linear, deep)),
    "deepfm": Network("deepfm", DeepFMBlock, (linear, deep, pairs)),
    "dcn": Network("dcn", DCNBlock, (linear, deep, cross_of_vectors)),
    "dcn_v2": Network("dcn_v2", DCNv2Block, (linear, deep, cross_of_matrices)),
    "dcn_v2, rank 2": Network(
        "dcn_v2", DCNv2Block, (linear, deep, cross_of_matrices), {"low_rank_dim": 2}
    ),
    "dlrm": Network("dlrm", DLRMBlock, (dlrm,), {"bottom_mlp": BOTTOM}),
}


def randomise(model, scale=0.5, seed=11) -> None:
    """Set all weights to values none of which is zero; ReLU layers keep units that are on."""
    random = np.random.default_rng(seed)
    for key, variable in weights_of(model).items():
        values = random.normal(scale=scale, size=variable.shape)
        variable.assign(np.abs(values) if key.endswith("/bias") else values)


def as_numpy(model) -> dict[str, np.ndarray]:
    """The weights in double precision."""
    return {name: v.numpy().astype("float64") for name, v in weights_of(model).items()}
