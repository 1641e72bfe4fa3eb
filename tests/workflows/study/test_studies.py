"""The list of runs of each study, known before anything is trained."""

from __future__ import annotations

import dataclasses

import pytest

from merlin_cowclip.plugins.scaling import SCALING_RULES, K, recipe, scale
from merlin_cowclip.workflows.errors import UserError
from merlin_cowclip.workflows.study.configuration import TuneConfig
from merlin_cowclip.workflows.study.studies import (
    NETWORKS,
    STUDIES,
    TOP,
    Cell,
    Setting,
    batch_sizes,
    of_tune,
)
from merlin_cowclip.workflows.training.configuration import TrainConfig, base_fields

# A tuned base may come with a notice; none of these tests is about it.
pytestmark = pytest.mark.filterwarnings("ignore::merlin_cowclip.workflows.errors.Notice")
SIZES = (1 * K, 8 * K, 128 * K)
SETTING = Setting(SIZES, seeds=(1,))
TUNED = TrainConfig(
    model="dcn_v2",
    mlp=(8,),
    low_rank_dim=3,
    combiner={"genres": "sum"},
    batch_size=2 * K,
    rule="none",
    **base_fields(recipe("none").replace(batch_size=2 * K, l2=1e-7)),
    update="lazy",
    epochs=3,
    dense_schedule={"name": "linear", "epochs": 3},
    embedding_schedule={"name": "linear", "epochs": 3},
)


def tuned(sizes, config, values=(), found=TUNED) -> Setting:
    """A setting whose base a tune found."""
    own, config = of_tune(found, sizes[0], config)
    return Setting(sizes, {**own, **dict(values)}, config)


def cells(name: str, setting: Setting = SETTING) -> dict[tuple[str, str], Cell]:
    found = list(STUDIES[name].cells(setting))
    by_place = {(cell.row, cell.column): cell for cell in found}
    assert len(by_place) == len(found)
    return by_place


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_a_whole_table(name):
    for sizes in (SIZES, (64,)):
        found = cells(name, Setting(sizes))
        rows, columns = ({place[i] for place in found} for i in (0, 1))
        assert len(found) == len(rows) * len(columns)


def test_the_rules_start_from_one_base():
    found = cells("scaling-rules", Setting(SIZES, {"l2": 1e-4, "dense_lr": 1e-3}))
    assert {row for row, _ in found} == {*SCALING_RULES} - {"sqrt_decay"}  # the paper's
    for (rule, _), cell in found.items():
        base = recipe(rule).replace(l2=1e-4, dense_lr=1e-3)
        assert cell.config.hyperparameters == scale(base, to=cell.config.batch_size, rule=rule)
    at_base = {cell.config.identity for (_, size), cell in found.items() if size == "1,024"}
    assert len(at_base) == 2  # CowClip's recipe, and the one of the five other rules


def test_tuned_hyperparameters_are_a_row_next_to_the_rules():
    values = recipe("none").replace(batch_size=8 * K, dense_lr=3e-3)
    found = TrainConfig(
        batch_size=8 * K, rule="none", **base_fields(values), epochs=7, update="lazy"
    )
    setting = Setting(SIZES, config={"epochs": 2}, found=[found])
    config = cells("scaling-rules", setting)["tune", "8,192"].config
    assert config.hyperparameters == values
    assert (config.epochs, config.update) == (2, "lazy")
    for words, changes in (
        ("Received: .8192., and batch_sizes .1024.", {"batch_sizes": (1024,)}),
        ("network. Received: model='deepfm'", {"config": {"model": "dcn"}}),
        ("each at another", {"found": [found, found]}),
    ):
        with pytest.raises(UserError, match=words):
            Setting(**{"batch_sizes": SIZES, "found": [found], **changes})


@pytest.mark.parametrize("model", NETWORKS)
def test_a_tuned_configuration_from_json_has_the_same_network(model):
    found = TrainConfig(model=model, rule="none")
    written = TrainConfig.from_dict(found.to_dict())
    assert Setting(SIZES, config={"model": model}, found=[written]).found == [written]


def test_a_tuned_base_determines_the_runs():
    setting = tuned((2 * K, 8 * K), {"epochs": 7, "mlp": (8,)}, {"dense_lr": 0.5})
    config = cells("scaling-rules", setting)["sqrt", "2,048"].config
    assert (config.base.dense_lr, config.base.l2) == (0.5, 1e-7)
    assert config.network_options == TUNED.network_options
    assert (config.model, config.update, config.epochs) == ("dcn_v2", "lazy", 7)
    assert config.deterministic
    assert config.dense_schedule == {"name": "linear", "to": 0.0, "epochs": None}
    fast = dataclasses.replace(TUNED, deterministic=False)
    assert not tuned((2 * K,), {}, found=fast).run("sqrt", 2 * K).deterministic
    with pytest.raises(UserError, match="first of the batch sizes .* 1,024, and .* at 2,048"):
        tuned(SIZES, {})


@pytest.mark.parametrize("name", ["networks", "time"])
def test_each_of_several_networks_takes_its_own_options_of_a_tuned_base(name):
    setting = tuned((2 * K,), {"cross_layers": 3})
    found = cells(name, setting)
    for model in NETWORKS:
        config = found[model, "2,048"].config
        assert (config.mlp, config.combiner) == ((8,), {"genres": "sum"})
        assert config.low_rank_dim == (3 if model == "dcn_v2" else None)


def test_a_tuned_base_is_for_no_other_network():
    words = "model='dcn_v2', tuned at 2,048, and model='deepfm' for its"
    with pytest.raises(UserError, match=words):
        tuned((2 * K,), {"model": "deepfm"})
    with pytest.raises(UserError, match=words):
        TuneConfig(network={"model": "deepfm"}, base=TUNED)


def test_another_tune_starts_from_a_tuned_base():
    config = TuneConfig(batch_size=8 * K, base=TUNED, network={"mlp": (8,)})
    assert config.rules["cowclip"].hyperparameters.clip is None
    assert config.train_config(config.rules["sqrt"]).network_options == TUNED.network_options
    assert (config.update, config.rates) == ("lazy", "falling")
    assert config.base == TUNED.hyperparameters.to_dict()
    assert dataclasses.asdict(TuneConfig(**dataclasses.asdict(config))) == dataclasses.asdict(
        config
    )
    for other in ({"embedding_schedule": "cosine"}, {"clip_tables": ("C1",)}):
        with pytest.raises(UserError, match="base must have what a tune searches.*hyperparameters"):
            TuneConfig(base=TrainConfig(batch_size=K, **other))


def test_networks_have_a_baseline_and_only_their_own_options():
    options = {"cross_layers": 2, "low_rank_dim": 4, "mlp": (8,)}
    found = cells("networks", Setting(SIZES, config=options))
    for name in NETWORKS:
        assert found[name, "baseline"].config.hyperparameters.clip is None
        config = found[name, "131,072"].config
        assert (config.model, config.mlp) == (name, (8,))
        assert config.hyperparameters.clip == "adaptive_column"
        assert config.cross_layers == (2 if name in ("dcn", "dcn_v2") else None)
        assert config.low_rank_dim == (4 if name == "dcn_v2" else None)


def test_the_control_changes_the_data_alone():
    found = cells("control")
    for (row, column), cell in found.items():
        if cell.data == TOP:
            assert cell.config == found[row.replace("top-3", "full"), column].config


def test_constant_clips_follow_the_batch():
    """Appendix I of the paper: the threshold grows with √s."""
    found = cells("clipping")
    assert {column for _, column in found} == {"8,192", "131,072"}
    for size in (8 * K, 128 * K):
        clipped = found["global", f"{size:,}"].config.hyperparameters
        assert clipped.clip_threshold == pytest.approx(25 * (size / K) ** 0.5)
        assert found["no clip", f"{size:,}"].config.hyperparameters.clip is None
        ours = found["adaptive_column", f"{size:,}"].config
        assert ours.identity == SETTING.run("cowclip", size).identity


def test_the_ablation_is_at_the_papers_batch_sizes_or_the_nearest():
    for sizes, wanted in (
        (SIZES, {"8,192", "131,072"}),
        ((1 * K, 16 * K), {"16,384"}),  # at the base the recipes do not differ in scaling
        ((1 * K, 4 * K, 32 * K), {"4,096", "32,768"}),
    ):
        assert {column for _, column in cells("ablation", Setting(sizes))} == wanted


def test_the_ablation_takes_one_thing_away_each_time():
    """Table 12: at 128K the dense η is 64√2·1e-4, and 1024e-4 where it is scaled linearly."""
    found = {
        row: cell.config.hyperparameters.to_dict()
        for (row, c), cell in cells("ablation").items()
        if c == "131,072"
    }
    whole = found.pop("cowclip")
    assert whole["dense_lr"] == pytest.approx(64 * 2**0.5 * 1e-4)
    changed = {row: {k: v for k, v in hp.items() if v != whole[k]} for row, hp in found.items()}
    assert changed == {
        "linear scale on dense": {"dense_lr": pytest.approx(1024e-4)},
        "empirical scale": {"l2": pytest.approx(128**2 * 1e-5)},
        "without ζ": {"clip_floor": 0.0},
        "without warm-up": {"warmup_epochs": 0.0},
        "without large init": {"init_stddev": 1e-4},
        "without clip": {"clip": None},
    }


def test_batch_sizes_end_where_an_epoch_has_too_few_updates():
    assert batch_sizes(1 * K, 10**9) == tuple(K * 2**i for i in range(8))
    assert batch_sizes(1 * K, 300_000) == (1 * K, 2 * K, 4 * K, 8 * K)
    assert batch_sizes(1 * K, 100) == (1 * K,)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_sizes": ()}, "must rise from the base"),
        ({"batch_sizes": (64, 64)}, r"must rise from the base.* Received: \[64, 64\]"),
        ({"batch_sizes": (128, 64)}, r"must rise from the base.* Received: \[128, 64\]"),
        (
            {"config": {"rule": "sqrt", "seed": 7}},
            "config of a setting has the keys .* Received: 'rule'",
        ),
        (
            {"values": {"clip": None}},
            "values of a setting has the keys dense_lr, .* Received: 'clip'",
        ),
    ],
    ids=str,
)
def test_a_setting_is_checked(options, words):
    with pytest.raises(UserError, match=words):
        Setting(**{"batch_sizes": (64,), **options})
