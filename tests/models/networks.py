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


# Parts of a model


def block_of(model) -> CTRBlock:
    (block,) = (layer for layer in model._flatten_layers() if isinstance(layer, CTRBlock))
    return block


def dense_layers(layer) -> list[tf.keras.layers.Dense]:
    return [x for x in layer._flatten_layers() if isinstance(x, tf.keras.layers.Dense)]


def weights_of(model) -> dict[str, tf.Variable]:
    """Every trainable variable by what it is in the formula."""
    block = block_of(model)
    (probability,) = (x for x in model._flatten_layers() if isinstance(x, Probability))
    weights = {"bias": probability.bias}
    for name in ("embeddings", "linear"):
        if hasattr(block, name):
            weights[name] = getattr(block, name).table
    for name in ("continuous_logit", "deep_logit", "cross_logit", "top_logit"):
        if hasattr(block, name) and getattr(block, name).built:
            weights[name] = getattr(block, name).kernel
    for name in ("deep", "bottom", "top"):
        for i, dense in enumerate(dense_layers(getattr(block, name, tf.keras.layers.Layer()))):
            weights |= {f"{name}/{i}/kernel": dense.kernel, f"{name}/{i}/bias": dense.bias}
    cross = getattr(block, "cross", None)
    if isinstance(cross, VectorCross):
        for i, (kernel, bias) in enumerate(zip(cross.kernels, cross.biases, strict=True)):
            weights |= {f"cross/{i}/kernel": kernel, f"cross/{i}/bias": bias}
    elif cross is not None:
        for i, layer in enumerate(cross.layers):
            (dense,) = dense_layers(layer.dense.dense)
            weights |= {f"cross/{i}/kernel": dense.kernel, f"cross/{i}/bias": dense.bias}
            if layer.dense.low_rank_dim:
                (inner,) = dense_layers(layer.dense.dense_u)
                weights[f"cross/{i}/inner"] = inner.kernel
    refs = [sorted(id(v) for v in some) for some in (model.trainable_variables, weights.values())]
    assert refs[0] == refs[1]
    return weights


def network_weights(model) -> int:
    """How many weights the network has without its embeddings, as in Table 7."""
    weights = weights_of(model).items()
    return sum(int(np.prod(v.shape)) for n, v in weights if n not in ("embeddings", "linear"))


# Formulas: weights (by the names of `weights_of`) and a batch to logits b


class Batch(NamedTuple):
    """What the layers look up (`FusedEmbeddings` has its own tests), and the numeric features."""

    embedded: np.ndarray  # b×F×d
    linear: np.ndarray  # b×F
    numbers: np.ndarray  # b×C

    @property
    def all(self) -> np.ndarray:
        """b×(F·d + C)."""
        return np.concatenate([self.embedded.reshape(len(self.numbers), -1), self.numbers], axis=1)


def batch_of(model, given, schema=SCHEMA) -> Batch:
    block, ids = block_of(model), dict(given)
    for column in schema:
        if column.is_list:
            parts = (given[f"{column.name}__{part}"] for part in ("values", "offsets"))
            ids[column.name] = tf.RaggedTensor.from_row_splits(*parts)
    embedded, linear = (
        getattr(block, name)(ids).numpy().astype("float64") if hasattr(block, name) else None
        for name in ("embeddings", "linear")
    )
    names = schema.select_by_tag(Tags.CONTINUOUS).column_names
    numbers = [given[name].numpy() for name in names]
    rows = len(linear if embedded is None else embedded)
    linear = None if linear is None else linear[..., 0]
    return Batch(embedded, linear, np.concatenate([np.empty((rows, 0)), *numbers], axis=1))


def linear(w, x: Batch) -> np.ndarray:
    numbers = x.numbers @ w["continuous_logit"][:, 0] if x.numbers.size else 0.0
    return x.linear.sum(axis=1) + numbers


def products(vectors: np.ndarray) -> list[np.ndarray]:
    """⟨v_i, v_j⟩ of all pairs i < j of b×F×d: b each."""
    pairs = itertools.combinations(np.moveaxis(vectors, 1, 0), 2)
    return [(v * u).sum(axis=1) for v, u in pairs]


def pairs(w, x: Batch) -> np.ndarray:
    """Rendle 2010, equation 1: Σ_{i<j} ⟨v_i, v_j⟩."""
    return sum(products(x.embedded), np.zeros(len(x.embedded)))


def depth(w, name) -> int:
    return sum(key.startswith(f"{name}/") and key.endswith("/kernel") for key in w)


def mlp(w, name, x) -> np.ndarray:
    for i in range(depth(w, name)):
        x = np.maximum(x @ w[f"{name}/{i}/kernel"] + w[f"{name}/{i}/bias"], 0.0)
    return x


def deep(w, x: Batch) -> np.ndarray:
    return mlp(w, "deep", x.all) @ w["deep_logit"][:, 0]


def cross_of_vectors(w, x: Batch) -> np.ndarray:
    """Wang et al. 2017, equation 3: x_{l+1} = x_0 (x_lᵀ w_l) + b_l + x_l."""
    x0 = xl = x.all
    for layer in range(depth(w, "cross")):
        product = np.einsum("bi,i->b", xl, w[f"cross/{layer}/kernel"][:, 0])
        xl = x0 * product[:, np.newaxis] + w[f"cross/{layer}/bias"] + xl
    return xl @ w["cross_logit"][:, 0]


def cross_of_matrices(w, x: Batch) -> np.ndarray:
    """Wang et al. 2021, equation 1: x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l.

    Equation 2 has W = U Vᵀ. A Keras kernel multiplies from the right, and so is the transpose.
    """
    x0 = xl = x.all
    for layer in range(depth(w, "cross")):
        matrix = w[f"cross/{layer}/kernel"].T
        if f"cross/{layer}/inner" in w:
            matrix = matrix @ w[f"cross/{layer}/inner"].T
        projected = np.einsum("ij,bj->bi", matrix, xl) + w[f"cross/{layer}/bias"]
        xl = x0 * projected + xl
    return xl @ w["cross_logit"][:, 0]


def dlrm(w, x: Batch) -> np.ndarray:
    """Naumov et al. 2019, Section 2: the top MLP over z_0 and the products of all pairs."""
    first = [mlp(w, "bottom", x.numbers)] if x.numbers.size else []
    z = np.concatenate([*(one[:, np.newaxis] for one in first), x.embedded], axis=1)
    top = np.concatenate([*first, np.stack(products(z), axis=1)], axis=1)
    return mlp(w, "top", top) @ w["top_logit"][:, 0]


class Network(NamedTuple):
    """A builder with small arguments, its block, and the formula of its logit, term by term."""

    builder: str
    block: type[CTRBlock]
    terms: tuple[Callable[[Any, Batch], np.ndarray], ...]
    options: Mapping[str, Any] = MappingProxyType({})

    def build(self, schema=SCHEMA, **options):
        small = {"embedding_dim": WIDTH, "mlp": MLP}
        return MODELS[self.builder](schema, **{**small, **self.options, **options})

    def logits(self, weights, batch: Batch) -> np.ndarray:
        return weights["bias"][0] + sum(term(weights, batch) for term in self.terms)


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
