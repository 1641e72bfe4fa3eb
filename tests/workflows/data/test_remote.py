"""Inputs at URLs, from a real S3 server (moto) and Python's HTTP server, both on this machine."""

import functools
import gzip
import http.server
import pickle
import re
import threading
from pathlib import Path

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from merlin_cowclip.workflows.data.adopt.validate import open_files
from merlin_cowclip.workflows.data.prepare.pipeline import prepare
from merlin_cowclip.workflows.data.prepared_data import file_state
from merlin_cowclip.workflows.data.sources.csv import CsvSource
from merlin_cowclip.workflows.data.sources.files import expand_paths
from merlin_cowclip.workflows.data.sources.parquet import ParquetSource
from merlin_cowclip.workflows.data.spec import DatasetSpec
from merlin_cowclip.workflows.errors import UserError
from tests.logs import CLICKS, write_log

SPEC = DatasetSpec("toy", "y", ("a",), ("n",), quotes=False)
FRAME = pd.DataFrame({"y": [0, 1] * 3_000, "a": [f"u{i}" for i in range(6_000)], "n": 1.5})
TEXT = FRAME.to_csv(index=False).encode()
FILES = {
    "log.csv": TEXT,
    "log.csv.gz": gzip.compress(TEXT),
    "log.csv.zst": pa.Codec("zstd").compress(TEXT, asbytes=True),
    "log.parquet": FRAME.to_parquet(),
    "days/day=10/b.csv": b"y,a,n\n1,b,2\n",
    "days/day=9/a b.csv": b"y,a,n\n0,a,1\n",
    "days/day=9/_temporary/a.csv": b"y,a,n\n",
    "days/_SUCCESS": b"",
}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Answers requests for a range, unless told not to."""

    has_ranges = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        if not self.has_ranges or "Range" not in self.headers:
            return super().do_GET()
        start, stop = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        content = Path(self.translate_path(self.path)).read_bytes()[start : stop + 1]
        self.send_response(206)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("files")
    for name, content in FILES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_bytes(content)
    return home


@pytest.fixture
def web(home):
    """The address of a server of the files."""
    pytest.importorskip("aiohttp")
    bound = functools.partial(Handler, directory=home)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), bound) as server:
        server.handle_error = lambda *_: None  # a client that has enough hangs up
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def bucket(home):
    """Writes a key of the bucket; `url` is that of a key."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        system = fs.S3FileSystem(
            endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True
        )
        system.create_dir("bucket")

        def write(key, content):
            with system.open_output_stream(f"bucket/{key}", compression=None) as file:
                file.write(content)

        write.url = lambda key, bucket="bucket": (
            f"s3://{bucket}/{key}?endpoint_override=127.0.0.1:{port}&scheme=http"
        )
        for name, content in FILES.items():
            write(name, content)
        yield write
    server.stop()


@pytest.fixture(params=["s3", "http"])
def url(request):
    if request.param == "http":
        address = request.getfixturevalue("web")
        return lambda name: f"{address}/{name}"
    return request.getfixturevalue("bucket").url


def source(path, root=None):
    if ".parquet" in str(path):
        return ParquetSource(DatasetSpec("toy", "y", ("a",), ("n",), format="parquet"), path)
    return CsvSource(SPEC, path, root=root)


def rows_of(log, size=20_000):
    batches = [batch for chunk in log.chunks(size) for batch in log.batches(chunk)]
    return pa.Table.from_batches(batches).to_pandas().astype({"a": str})[["y", "a", "n"]]


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("log")])
def test_files(url, name):
    ((path, root),) = expand_paths(url(name)).items()
    assert str(path) == url(name)
    log = pickle.loads(pickle.dumps(source(path, root)))  # as Dask sends it to a worker
    log.check()
    assert log.size == len(FILES[name])
    pd.testing.assert_frame_equal(rows_of(log), FRAME, check_dtype=False)


@pytest.mark.parametrize("given", ["days/", "d*", "days/*/*.csv", "**/*.csv"])
def test_folders_and_globs(bucket, home, given):
    """As of the same local files."""
    local = [path for path in expand_paths(f"{home}/{given}") if "days" in str(path)]
    remote = [path for path in expand_paths(bucket.url(given)) if "days" in path]
    assert remote == [bucket.url(path.relative_to(home)) for path in local]
    assert [path.name for path in local] == ["a b.csv", "b.csv"]


@pytest.mark.parametrize("given", ["s3", "memory://days/day=*/*.csv"])
def test_hive_columns(request, given):
    """Of a file system of pyarrow, and of fsspec."""
    if given == "s3":
        given = request.getfixturevalue("bucket").url("days")
    else:
        system = fsspec.filesystem("memory")
        system.pipe({f"/{name}": content for name, content in FILES.items() if "day=" in name})
    spec, rows = DatasetSpec("toy", "y", ("a", "day")), []
    for file, root in expand_paths(given).items():
        log = CsvSource(spec, file, root=root)
        log.check()
        (batch,) = log.batches(*log.chunks(99))
        rows += batch.to_pylist()
    assert rows == [{"y": 0, "a": "a", "day": "9"}, {"y": 1, "a": "b", "day": "10"}]


@pytest.mark.parametrize("name", ["none.csv", "none/*.csv"])
def test_inputs_that_are_not_there(bucket, name):
    for url in (bucket.url(name), bucket.url(name, "nobucket")):
        with pytest.raises(UserError, match=f"no input file found for {re.escape(url)}"):
            expand_paths(url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/a?regio=x", "s3://bucket/a.*regio"),
        ("http://127.0.0.1:9/a.csv", "no input file found for http://127.0.0.1:9/a.csv. Check"),
        ("nowhere://a/b", "cannot read input file nowhere://a/b: Protocol not known: nowhere"),
        ("abfs://a/b", "cannot read input file abfs://a/b: Install adlfs"),
    ],
)
def test_urls_that_cannot_be_read(url, message):
    with pytest.raises(UserError, match=message):
        expand_paths(url)


def test_a_connection_that_breaks(web, monkeypatch):
    log = source(f"{web}/log.csv")
    chunks = log.chunks(20_000)
    with monkeypatch.context() as patch:
        patch.setattr(Handler, "do_GET", lambda self: self.connection.close())
        with pytest.raises(UserError, match=f"input file {web}/log.csv: .*connection"):
            list(log.batches(chunks[1]))
    monkeypatch.setattr(Handler, "has_ranges", False)  # as Python's server is
    with pytest.raises(UserError, match=f"{web}/log.csv: .*support range requests"):
        list(log.batches(chunks[1]))


def test_adopted_parquet(bucket):
    """It is read at a URL, but not trained on."""
    ((file,), (part,)) = (open_files(bucket.url(name)) for name in ("log.parquet", "*.parquet"))
    assert (file, file.rows) == (part, len(FRAME))
    with pytest.raises(UserError, match="adopted parquet must be local. Received: s3://bucket/log"):
        file_state(file.path)


def test_prepare(bucket, tmp_path):
    """From a folder of the bucket: the same data as from the same local files."""
    (tmp_path / "logs").mkdir()
    log = write_log(tmp_path / "logs" / "log.csv")
    bucket("clicks/log.csv.gz", gzip.compress(log.read_bytes()))
    prepared = [
        prepare(CLICKS, given, tmp_path / name, progress=False)
        for name, given in (("local", log.parent), ("remote", bucket.url("clicks")))
    ]
    assert prepared[1].record["inputs"][0]["path"] == bucket.url("clicks/log.csv.gz")
    for part in ("train", "test"):
        local, remote = (pq.read_table(data.path / part) for data in prepared)
        assert local.equals(remote)
