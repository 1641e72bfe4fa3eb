"""What the commands made when the golden data were recorded: data, runs, predictions.

A case is a function of an empty folder that returns named arrays; `record` writes them, and the
tests compare what the code makes now (`differences`). Inputs are drawn here, by generators that
NumPy has frozen. Everything is done by commands and public names.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import gzip
import importlib.util
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

Arrays = dict[str, np.ndarray]
HERE = Path(__file__).parent
ROWS, TEST = 320, 64  # of the shop's log
TOLERANCE = 1e-6  # of floats, absolute and relative; all else must be equal
NETWORK = ("--embedding-dim", 4, "--mlp", "8")
RECIPE = (
    *("--rule", "cowclip"),
    *("--batch-size", 32, "--base-batch-size", 16, "--epochs", 2, "--seed", 7),
    *("--embedding-lr", 1e-2, "--dense-lr", 1e-2, "--l2", 3e-5, "--clip-floor", 1e-3),
    *("--dense-schedule", "cosine:to=0.1"),
)
UPDATES = ("exact", "lazy", "deferred")
LEAN = ("--no-saved-model", "--quiet")


# Adapters: the only places that know a module, an attribute or a name which may change


def command(*arguments: Any, code: int = 0) -> str:
    """Run `merlin-cowclip` in this process; returns what it printed."""
    from merlin_cowclip.workflows.commands.main import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        ended = main([str(argument) for argument in arguments])
    assert ended == code, f"{arguments} ended with {ended} instead of {code}"
    return printed.getvalue()


def metrics_of(run: Any) -> Arrays:
    """Metrics of the epochs; golden ones of the test part are of the validation part now."""
    names = {name: f"valid_{name}" for name in ("auc", "log_loss", "calibration")}
    names["train_loss"] = "train_loss"
    epochs = run.result["epochs"]
    metrics = {name: np.array([epoch[key] for epoch in epochs]) for name, key in names.items()}
    return {**metrics, "best_epoch": np.array(run.result["best_epoch"])}


def weights_of(run: Any) -> Arrays:
    """All weights of the network, by shape and then by their order in the model."""
    weights = sorted(run.model().get_weights(), key=lambda array: array.shape)
    return {str(place): array for place, array in enumerate(weights)}


def batches_of(data: Any, epoch: int = 0, part: str = "train", **options: Any) -> Arrays:
    """The batches of an epoch in their order, joined; `sizes` has the rows of each."""
    from merlin_cowclip.workflows import Loader

    batches = list(Loader(data, part, **options).batches(epoch))
    features = {name: [np.asarray(x[name]) for x, _ in batches] for name in batches[0][0]}
    labels = [np.asarray(y) for _, y in batches]
    joined = {name: np.concatenate([a.ravel() for a in of]) for name, of in features.items()}
    sizes = np.array([len(y) for y in labels])
    return {**joined, "label": np.concatenate(labels).ravel(), "sizes": sizes}


def exported(run: Path, out: Path, rows: pd.DataFrame) -> np.ndarray:
    """What an exported model answers to raw rows."""
    from merlin_cowclip.workflows import Repository

    command("export", run, "--out", out)
    return Repository.open(out).predict(rows)


# Raw logs


def _write(path: Path, rows: Iterable[Sequence[Any]], **form: Any) -> Path:
    """Rows as text; gzipped if the file is named .gz."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n", **form).writerows(rows)
    content = text.getvalue().encode()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def _holes(values: Iterable[Any], random: np.random.RandomState, share: float) -> list[Any]:
    return ["" if random.rand() < share else value for value in values]


def _ids(random: np.random.RandomState, rows: int, most: int) -> np.ndarray:
    """Few that are frequent, many that are rare."""
    return (random.pareto(1.0, rows) * 2).astype(np.int64) % most


def criteo_logs(home: Path, rows: int = 240) -> list[Path]:
    """Tabs, no header; the second half is gzipped."""
    random = np.random.RandomState(1)
    columns: list[Any] = [random.randint(0, 2, rows)]
    for i in range(13):
        columns.append(_holes(random.randint(-2, 50 * (i + 1), rows), random, 0.1))
    for i in range(26):
        names = [f"{2654435761 * (id_ + 31 * i + 1) % 2**32:08x}" for id_ in _ids(random, rows, 90)]
        columns.append(_holes(names, random, 0.05 * (i % 3)))
    lines = list(zip(*columns, strict=True))
    halves = {"criteo-1.txt": lines[: rows // 2], "criteo-2.txt.gz": lines[rows // 2 :]}
    return [_write(home / name, part, delimiter="\t") for name, part in halves.items()]


def avazu_logs(home: Path, rows: int = 240) -> list[Path]:
    """Commas and a header."""
    random = np.random.RandomState(2)
    names = ("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain")
    names += ("app_category", "device_id", "device_ip", "device_model", "device_type")
    names += ("device_conn_type", *(f"C{i}" for i in range(14, 22)))
    hours = sorted(14102100 + 100 * (h // 24) + h % 24 for h in random.randint(0, 240, rows))
    columns = [[f"{10**18 + i}" for i in range(rows)], random.randint(0, 2, rows), hours]
    columns += [_ids(random, rows, 5 + 9 * i) for i in range(len(names))]
    header = ("id", "click", "hour", *names)
    return [_write(home / "avazu.csv", [header, *zip(*columns, strict=True)])]


SHOP = """
name = "shop"
format = "{format}"
label = "bought"
categorical = ["user", "item", "city"]
continuous = ["price", "visits"]
lists = ["genres"]
list_separator = ";"
non_finite = "missing"
freq_threshold = {{ item = 3 }}
hash_buckets = {{ item = 4 }}
[split]
{split}
"""
CITIES = ("Oslo", "Rio, RJ", 'the "Hague"', "two\nlines", "Zürich", "08", "8.0")


def shop_rows(rows: int = ROWS, seed: int = 3, users: int = 40) -> pd.DataFrame:
    """Clicks that depend on user and item; cells with separators, quotes and line ends."""
    random = np.random.RandomState(seed)
    user, item = _ids(random, rows, users), _ids(random, rows, 25)
    logit = 1.5 * np.sin(3.0 * user) + np.cos(2.0 * item) + random.normal(0, 0.5, rows)
    frame = pd.DataFrame({"bought": (logit > 0.4).astype(np.int64), "user": user * 1_000_003})
    frame["item"] = _holes([f"i{i}" for i in item], random, 0.05)
    frame["city"] = _holes([CITIES[c] for c in _ids(random, rows, len(CITIES))], random, 0.1)
    frame["price"] = _holes(random.normal(5, 2, rows).round(3), random, 0.1)
    frame.loc[rows // 3, "price"] = "inf"
    frame["visits"] = _holes(random.randint(0, 90, rows), random, 0.1)
    frame["genres"] = [
        ";".join(f"g{g}" for g in random.permutation(6)[: random.randint(0, 4)])
        for _ in range(rows)
    ]
    minutes = random.permutation(rows)
    frame["day"] = [f"2024-10-{1 + m // 60:02d} 10:{m % 60:02d}" for m in minutes]
    return frame


def held_out_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `prepare_shop`'s split by time, in their order."""
    return frame[frame["day"] >= frame["day"].sort_values().iloc[int(0.8 * len(frame))]]


def shop_csv(path: Path, frame: pd.DataFrame) -> Path:
    return _write(path, [frame.columns, *frame.itertuples(index=False)])


def shop_parquet(path: Path, frame: pd.DataFrame) -> Path:
    """The same rows with types: integers, numbers, texts and lists, with nulls."""
    typed = frame.astype(object).where(frame != "", None)
    numbers = {n: [None if v is None else float(v) for v in typed[n]] for n in ("price", "visits")}
    lists = [text.split(";") if text else [] for text in frame["genres"]]
    columns = {name: typed[name].tolist() for name in frame} | numbers | {"genres": lists}
    pq.write_table(pa.table(columns), path, row_group_size=100)
    return path


def new_rows() -> pd.DataFrame:
    """Rows that no training had: unseen ids, missing values, and tied ones of both labels."""
    frame = shop_rows(60, seed=4, users=55)
    four = pd.concat([frame[:4]] * 5, ignore_index=True)
    four["bought"] = np.arange(20) % 3 % 2
    return pd.concat([frame, four], ignore_index=True)


# What was made, as arrays


def _under(name: str, arrays: Mapping[str, Any]) -> Arrays:
    return {f"{name}/{key}": np.asarray(value) for key, value in arrays.items()}


def _texts(values: Iterable[Any]) -> np.ndarray:
    return np.array(["" if value is None else str(value) for value in values])


def _numbers(report: Mapping[str, Any], place: str = "report") -> Iterator[tuple[str, Any]]:
    """The numbers of nested mappings, by their place; but those of an empty validation part."""
    for key, value in report.items():
        if key.startswith("valid"):
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{place}/{key}")
        elif isinstance(value, int | float):
            yield f"{place}/{key}", np.array(value)


def _parts(data: Any) -> Arrays:
    """All rows of a prepared folder in their order, with the types of the parquet."""
    arrays: Arrays = {}
    for part, files in (("train", data.train_files), ("test", data.test_files)):
        table = pa.concat_tables(pq.read_table(file) for file in files)
        # Newer pyarrow calls the values of a list "element".
        types = (f"{field.name}: {field.type}" for field in table.schema)
        arrays[f"{part}/types"] = _texts(one.replace("<element: ", "<item: ") for one in types)
        for name in table.column_names:
            column = table[name].combine_chunks()
            if pa.types.is_list(column.type):
                arrays[f"{part}/{name}/lengths"] = np.array([len(ids) for ids in column])
                column = column.flatten()
            arrays[f"{part}/{name}"] = column.to_numpy(zero_copy_only=False)
    return arrays


def _about(data: Any) -> Arrays:
    """Sizes, counts and schema."""
    rows = {part: data.rows[part] for part in ("train", "test")}
    arrays = _under("rows", rows) | _under("cardinality", data.cardinalities)
    arrays["table_rows"] = np.array(data.table_rows)
    for field in data.cardinalities:
        counts = data.counts(field)
        arrays |= _under(f"counts/{field}", {name: counts[name] for name in ("id", "count")})
        arrays[f"counts/{field}/raw"] = _texts(counts["raw"])
    columns = []
    for column in data.schema:
        domain = column.int_domain
        limits = domain and (domain.min, domain.max)
        # A domain's name is that of its column, unless it is shared.
        shared = domain and domain.name != column.name and domain.name
        tags = sorted(tag.value for tag in column.tags)
        dtype = column.dtype.name if hasattr(column.dtype, "name") else str(column.dtype)
        known = {k: column.properties.get(k) for k in ("num_buckets", "freq_threshold", "max_size")}
        columns.append((column.name, tags, dtype, column.is_list, limits, shared, known))
    arrays["schema"] = _texts(json.dumps(column) for column in sorted(columns))
    return arrays


def _scores(run: Path, log: Path, out: Path, *options: Any) -> Arrays:
    command("predict", run, log, "--out", out, "--quiet", *options)
    return {name: values.to_numpy() for name, values in pq.read_table(out).to_pandas().items()}


def _printed(*arguments: Any) -> np.ndarray:
    """AUC and log loss, as `evaluate` prints them."""
    printed = command("evaluate", *arguments, "--quiet")
    return np.array(re.findall(r"(?:AUC|log loss) (\d\.\d+)", printed), np.float64)


# Cases


def opened(folder: Path) -> Any:
    from merlin_cowclip.workflows import PreparedData

    return PreparedData.open(folder)


WITH_TEST, WITH_VALID = ("--valid", 0), ("--valid", 0.2, "--test", 0)  # the same rows are held out


def prepare_shop(home: Path, kind: str = "csv", *options: Any) -> Path:
    """The shop's log, prepared: as two files of CSV, split by time, or as parquet, at random.

    Without a test part, unless the options say so.
    """
    frame, half = shop_rows(), ROWS // 2
    options = options or WITH_VALID
    if kind == "csv":
        split = 'kind = "time"\ntest = 0.2\ncolumn = "day"'
        parts = (("log-1.csv", frame[:half]), ("log-2.csv.gz", frame[half:]))
        logs = [shop_csv(home / name, part) for name, part in parts]
    else:
        split = 'kind = "random"\ntest = 0.2'
        logs = [shop_parquet(home / "log.parquet", frame)]
    (home / "shop.toml").write_text(SHOP.format(format=kind, split=split))
    command("prepare", home / "shop.toml", *logs, "--out", home / "data", "--seed", 5, *options)
    return home / "data"


def prepared(name: str, home: Path, *options: Any) -> Arrays:
    """`prepare`: all rows, counts, schema and report."""
    options = (*WITH_TEST, *options)
    if name in ("csv", "parquet"):
        prepare_shop(home, name, *options)
    else:
        logs = {"criteo": criteo_logs, "avazu": avazu_logs}[name](home)
        more = ("--freq-threshold", "C3=3,C4=2") if name == "criteo" else ()
        command("prepare", name, *logs, "--out", home / "data", *more, *options)
    data = opened(home / "data")
    return _parts(data) | _about(data) | dict(_numbers(data.report))


def synthetic(home: Path) -> Arrays:
    """`write_synthetic`: every byte, and the truth."""
    from merlin_cowclip.workflows import write_synthetic

    arrays: Arrays = {}
    for name in ("criteo", "avazu"):
        truth = write_synthetic(name, home / name, rows=100, seed=3, cardinality=50)
        arrays[f"{name}/bytes"] = np.frombuffer((home / name).read_bytes(), np.uint8)
        numbers = {key: getattr(truth, key) for key in ("click_rate", "best_auc", "best_log_loss")}
        arrays |= _under(name, numbers)
    return arrays


def adopt_stock(home: Path, held_out: str = "test") -> Any:
    """A stock NVTabular pipeline, as its users have it, adopted; returns the prepared folder."""
    from merlin_cowclip.workflows.quiet import quiet_imports

    with quiet_imports():
        import nvtabular as nvt
        from merlin.io import Dataset
        from merlin.schema import Tags
        from nvtabular import ops

    random = np.random.RandomState(6)
    log = shop_rows(seed=8)[["bought", "user", "item"]]
    log["item"] = log["item"].where(log["item"] != "", None)
    for name in ("src", "dst"):
        log[name] = [f"c{c}" for c in _ids(random, ROWS, 12)]
    log["genres"] = [[f"g{g}" for g in random.permutation(6)[: 1 + i % 3]] for i in range(ROWS)]
    log["price"], log["paid"] = random.normal(5, 2, ROWS).round(3), random.rand(ROWS).round(4)
    log["visits"] = np.where(random.rand(ROWS) < 0.1, np.nan, random.randint(0, 90, ROWS))
    log["shop"] = random.randint(0, 9, ROWS)
    shops = pd.DataFrame({"shop": np.arange(9), "size": np.arange(9) ** 2 / 10})
    raws = {}
    for part, rows in (("train", log[:-TEST]), ("test", log[-TEST:])):
        rows.reset_index(drop=True).to_parquet(home / f"raw-{part}.parquet")
        raws[part] = Dataset(str(home / f"raw-{part}.parquet"), engine="parquet")
    fitted = str(home / "fitted")
    workflow = nvt.Workflow(
        (["user", "item", "genres"] >> ops.Categorify(out_path=fitted))
        + ([["src", "dst"]] >> ops.Categorify(out_path=fitted, encode_type="joint"))
        + (["price"] >> ops.Normalize())
        + (["visits"] >> ops.FillMissing(fill_val=3) >> ops.Normalize())
        + (["shop"] >> ops.TargetEncoding("paid", kfold=3, fold_seed=4, out_path=fitted))
        + ((["shop"] >> ops.JoinExternal(shops, on="shop"))["size"] >> ops.Normalize())
        + (["bought"] >> ops.AddMetadata(tags=[Tags.TARGET, Tags.BINARY_CLASSIFICATION]))
    )
    workflow.fit(raws["train"]).save(str(home / "workflow"))
    for part, raw in raws.items():
        workflow.transform(raw).to_parquet(str(home / part))
    options = ("--workflow", home / "workflow", "--label", "bought", "--out", home / "data")
    command("adopt", home / "train", f"--{held_out}", home / "test", *options)
    return opened(home / "data")


def adopted(home: Path) -> Arrays:
    """`adopt`: the record, and batches of both parts in their order, one rank's among them."""
    data = adopt_stock(home)
    arrays = _about(data) | _under("order/test", batches_of(data, part="test", batch_size=50))
    for epoch in range(2):
        arrays |= _under(f"order/{epoch}", batches_of(data, epoch, batch_size=60, seed=9))
    share = batches_of(data, 1, batch_size=60, seed=9, rank=1, ranks=2)
    return arrays | _under("order/second of two ranks", share)


def adopted_run(home: Path) -> Arrays:
    """A run on the adopted pipeline, and its predictions on raw rows, also as a server's."""
    adopt_stock(home, "valid")
    train(home / "data", home / "run")
    run, raw = home / "run", home / "raw-test.parquet"
    scores = _under("raw", _scores(run, raw, home / "scores.parquet", "--raw"))
    answers = {"served": exported(run, home / "repository", pd.read_parquet(raw))}
    return of_run(run) | scores | answers


def train(data: Path, out: Path, *options: Any, code: int = 0) -> None:
    command("train", data, "--out", out, *NETWORK, *RECIPE, *LEAN, *options, code=code)


def of_run(run: Path) -> Arrays:
    """Metrics and final weights."""
    from merlin_cowclip.workflows import Run

    done = Run.open(run)
    return _under("metrics", metrics_of(done)) | _under("weights", weights_of(done))


def trained(update: str, home: Path) -> Arrays:
    """`train`, and what `predict` and `evaluate` say of the run."""
    train(prepare_shop(home), home / "run", "--update", update)
    arrays, log = of_run(home / "run"), shop_csv(home / "new.csv", new_rows())
    arrays |= _under("new", _scores(home / "run", log, home / "scores.parquet"))
    held_out = shop_csv(home / "held-out.csv", held_out_rows(shop_rows()))
    arrays["evaluated"] = _printed(home / "run", held_out)
    arrays["evaluated/new"] = _printed(home / "run", log)
    return arrays


def stop(data: Path, out: Path, *options: Any) -> None:
    """A run that is stopped after its first update."""
    train(data, out, *options, "--max-minutes", 1e-9, code=3)


def resume(run: Path) -> None:
    command("train", "--resume", run, "--quiet")


def on_rank(home: Path, steps: Sequence[str]) -> None:
    """What each rank does in one launch, of which a stop is the end."""
    for step in steps:
        what, tables = step.split("-")
        run, options = home / tables, ("--tables", tables)
        if what == "resume":
            resume(run)
        else:
            {"train": train, "stop": stop}[what](home / "data", run, *options)


def ranks(home: Path, *launches: Sequence[str]) -> None:
    """Do this on two ranks, launch after launch; runs are named by where their tables are."""
    from tests.ranks.launch import on_ranks

    prepare_shop(home)
    for steps in launches:
        ended = on_ranks(2, [sys.executable, "-m", __name__, home, *steps])
        assert ended.code == 0, ended


def sharded(home: Path) -> Arrays:
    """A run of two ranks with tables in shards; with replicated ones it is that of one process."""
    ranks(home, ["train-sharded"])
    return of_run(home / "sharded")


CASES: dict[str, Callable[[Path], Arrays]] = {
    f"prepare-{name}": functools.partial(prepared, name)
    for name in ("criteo", "avazu", "csv", "parquet")
}
CASES |= {f"train-{update}": functools.partial(trained, update) for update in UPDATES}
CASES |= {"adopt": adopted, "adopt-run": adopted_run}
CASES |= {"synthetic": synthetic}


# Recorded and compared


def record(folder: Path) -> None:
    """Write all golden data; those of ranks only where Horovod is installed."""
    on_ranks = {"ranks-sharded": sharded} if importlib.util.find_spec("horovod") else {}
    for name, case in (CASES | on_ranks).items():
        with tempfile.TemporaryDirectory() as home:
            np.savez_compressed(folder / f"workflow-{name}.npz", **case(Path(home)))


def golden(name: str) -> Arrays:
    """What was recorded of a case."""
    with np.load(HERE / f"workflow-{name}.npz") as file:
        return dict(file)


def differences(arrays: Mapping[str, np.ndarray], name: str) -> list[str]:
    """What is not as it was recorded; `arrays` may lack whole groups."""
    recorded = golden(name)
    problems = [f"{key}: it is new" for key in arrays if key not in recorded]
    groups = {key.split("/")[0] for key in arrays}
    for key, wanted in recorded.items():
        if key not in arrays:
            problems += [f"{key}: it is gone"] if key.split("/")[0] in groups else []
        elif problem := _difference(np.asarray(arrays[key]), wanted):
            problems.append(f"{key}: {problem}")
    return problems


def _difference(array: np.ndarray, wanted: np.ndarray) -> str | None:
    if array.shape != wanted.shape or array.dtype.kind != wanted.dtype.kind:
        return f"{array.dtype} {array.shape} instead of {wanted.dtype} {wanted.shape}"
    same = array == wanted
    if wanted.dtype.kind == "f":
        same = np.isclose(array, wanted, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
    if np.all(same):
        return None
    first = tuple(np.argwhere(~same)[0])
    return f"{array[first]!r} instead of {wanted[first]!r} at {first}, {np.sum(~same)} differ"


if __name__ == "__main__":
    on_rank(Path(sys.argv[1]), sys.argv[2:])
