"""Names that TensorFlow saves, and the ones that it would refuse after the training."""

import pytest
import tensorflow as tf

from merlin_cowclip.models import lr
from merlin_cowclip.plugins._checks import unsavable_names

from ..models.networks import schema_of


@pytest.mark.parametrize(
    ("names", "refused"),
    [
        (["C1", "site_id", "a.b", "a-c", "1st"], []),
        (["from", "self", "user id", "größe", "_x", "", "C1\n"], None),
        (["a.b", "a_b", "a-b", "c"], ["a_b", "a-b"]),
        (["1st", "arg_1st", "arg_2"], ["arg_1st"]),
        (["Ad", "ad", "AD"], ["ad", "AD"]),
        (["A.b", "a_b"], []),
    ],
)
def test_names(names, refused):
    assert unsavable_names(names) == (names if refused is None else refused)


def test_a_model_with_unusual_names_is_saved_and_served(tmp_path):
    names = ["C1", "a.b", "a-c", "1st"]
    model = lr(schema_of(dict.fromkeys(names, 9), numbers=("price",)))
    given = {name: tf.constant([[3], [4]], tf.int64) for name in names}
    given["price"] = tf.constant([[0.5], [1.5]])
    expected = model(given).numpy()
    model.save(str(tmp_path / "model"))
    serve = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    inputs = serve.structured_input_signature[1]
    called = {"C1": "C1", "a.b": "a_b", "a-c": "a_c", "1st": "arg_1st", "price": "price"}
    assert set(inputs) == set(called.values())
    (served,) = serve(**{called[name]: values[:, 0] for name, values in given.items()}).values()
    assert served.numpy().tolist() == expected.tolist()


def test_a_model_with_other_names_is_refused():
    with pytest.raises(ValueError, match=r"names that TensorFlow can save.*\['user id'\]"):
        lr(schema_of({"user id": 9, "item": 5}))
