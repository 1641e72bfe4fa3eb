"""A trial that reuses a compiled step comes to what `train` comes to, to the last bit."""

import pytest

from merlin_cowclip.plugins import Hyperparameters
from merlin_cowclip.plugins._tensorflow import tf
from merlin_cowclip.plugins.optimizers.state import training_state, weights_of
from merlin_cowclip.workflows import train
from merlin_cowclip.workflows.errors import NotFiniteError
from merlin_cowclip.workflows.study.configuration import CHOICES
from merlin_cowclip.workflows.training.builder import in_precision
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_fields
from merlin_cowclip.workflows.training.stopping import Stopping
from merlin_cowclip.workflows.training.trainers import MOST_STEPS, Trainers

from .conftest import NETWORK

pytestmark = pytest.mark.filterwarnings("ignore:Even though the `tf.config.exp")

SIZE = 256
FIRST = Hyperparameters(
    batch_size=SIZE,
    dense_lr=3.3e-3,
    embedding_lr=1.1e-2,
    l2=1.7e-4,
    init_stddev=3e-2,
    clip_ratio=0.07,
    clip_floor=3.3e-5,
    warmup_epochs=0.7,
)
ZEROS = FIRST.replace(
    dense_lr=7e-3, embedding_lr=2.3e-2, l2=0, init_stddev=1e-2, clip_floor=0, warmup_epochs=0
)
LAST = ZEROS.replace(dense_lr=1.9e-3, l2=1.3e-3, clip_ratio=1.9, warmup_epochs=1.3)
DIVERGES = FIRST.replace(dense_lr=1e25)
TRIALS = [  # of a seed each
    (FIRST, 5),
    (DIVERGES, 5),
    (ZEROS.replace(decay=True), 5),
    (LAST.replace(decay=True), 6),
    (FIRST.replace(decay=True), 5),
]


def config_of(hp: Hyperparameters, **options) -> TrainConfig:
    values = {"rule": "none", "epochs": 3, "batch_size": SIZE, **NETWORK, **base_fields(hp)}
    return TrainConfig(**{**values, **options})


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.extended)])
def _either_way(request):
    """Eager, and with graphs, which round as their constants are folded."""
    tf.config.run_functions_eagerly(request.param)
    yield
    tf.config.run_functions_eagerly(False)


@pytest.mark.usefixtures("_either_way")
@pytest.mark.parametrize("clip", CHOICES["clip"])
@pytest.mark.parametrize("update", CHOICES["update"])
def test_reused_as_if_new(data, tmp_path, update, clip):
    trainers, trials = Trainers(data), []
    for hp, seed in TRIALS:
        trial = config_of(hp, clip=clip, update=update, seed=seed)
        if hp.dense_lr > 1:
            with pytest.raises(NotFiniteError):
                list(trainers.epochs(trial, Stopping()))
            continue
        epochs = list(trainers.epochs(trial, Stopping()))
        (trainer,) = trainers._kept.values()  # one for all
        weights = {name: v.numpy() for name, v in weights_of(trainer.model).items()}
        trials.append((trial, epochs, weights))
    for number, (trial, epochs, weights) in enumerate(trials):
        run = train(data, trial, tmp_path / str(number), progress=False)
        for ours, theirs in zip(epochs, run.result["epochs"], strict=True):
            names = ours.keys() - {"seconds"}
            valid = {name.removeprefix("valid_"): value for name, value in theirs.items()}
            assert {n: ours[n] for n in names} == {n: valid[n] for n in names}
        theirs = {name: tf.Variable(value) for name, value in weights.items()}
        run.checkpoint().read(theirs)
        for name, value in weights.items():
            assert theirs[name].numpy().tobytes() == value.tobytes()


@pytest.mark.usefixtures("eager")
def test_few_are_kept(data):
    """What is clipped in absent data, too, has a step of its own."""
    trainers = Trainers(data)
    for update in CHOICES["update"]:
        for hp in (FIRST, FIRST.replace(clip=None), FIRST.replace(clip_ratio=1e-4)):
            trainers.get(config_of(hp, update=update), Stopping(), lambda: None)
    assert len(trainers._kept) == MOST_STEPS


@pytest.mark.usefixtures("eager")
def test_the_loss_scale_begins_anew(data):
    trainers = Trainers(data)
    with in_precision("mixed_float16"):
        for _ in range(2):
            trainer = trainers.get(config_of(FIRST), Stopping(), lambda: None)
            state = training_state(trainer.model)
            scale = next(v for name, v in state.items() if name.startswith("loss_scale/"))
            assert float(scale) > 2
            scale.assign(2.0)
