"""What another number of ranks makes of a checkpoint, without any: see also `tests/ranks`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import re
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from merlin_cowclip.plugins._stack import Schema
from merlin_cowclip.plugins.joining import ALONE
from merlin_cowclip.plugins.sharding import Shard
from merlin_cowclip.plugins.statistics import StepStatistics
from merlin_cowclip.plugins.tables import TableSpec
from merlin_cowclip.workflows.errors import AgreedError, UserError
from merlin_cowclip.workflows.training import at_work, checkpoint_files, evaluation
from merlin_cowclip.workflows.training import heartbeat as heartbeats
from merlin_cowclip.workflows.training import meeting as meetings
from merlin_cowclip.workflows.training.checkpoint_files import (
    STATE,
    rank_of,
    read_rows,
    rows_of,
    write_tensors,
)
from merlin_cowclip.workflows.training.checkpoints import Checkpoints
from merlin_cowclip.workflows.training.heartbeat import Heartbeat
from merlin_cowclip.workflows.training.meeting import Meeting
from merlin_cowclip.workflows.training.resuming import leaves_rows_out, refuse_last_batch
from merlin_cowclip.workflows.training.saved_state import State
from merlin_cowclip.workflows.training.stopping import Stopping
from tests.plugins.merlin_models import category

V = 11


@pytest.mark.parametrize("saved", [1, 2, 3, 5])
@pytest.mark.parametrize("now", [1, 2, 3, 5])
def test_rows_find_their_ranks(tmp_path, saved, now):
    whole = np.random.default_rng(0).random((V, 2), np.float32)
    for rank in range(saved):
        prefix = STATE if saved == 1 else rows_of(rank, saved)
        write_tensors(tmp_path / prefix, {"weight/0001": tf.constant(whole[rank::saved])})
    for rank in range(now):
        found = read_rows(tmp_path, "weight/0001", tf.float32, saved, Shard(rank, now, V))
        np.testing.assert_array_equal(found, whole[rank::now])
        assert found.dtype == np.float32


def test_a_file_tells_who_has_written_it():
    assert rank_of("rows-00012-of-00064.data-00000-of-00001") == 12
    assert rank_of("state.index") == 0


def of_two_tables(shard: Shard | None) -> tuple[StepStatistics, list[TableSpec]]:
    """Statistics of a table of two fields, maybe in shards, and of one on all ranks."""
    specs = []
    for fields in (["a", "b"], ["c"]):
        columns = tuple(Schema([category(name, 4) for name in fields]))
        offsets = tuple(range(0, 4 * len(fields) + 1, 4))
        layer = tf.keras.layers.Layer()
        specs.append(TableSpec(fields[0], layer, lambda: tf.Variable(0.0), offsets, columns, 2))
    specs[0].access.shard = shard
    return StepStatistics(
        {spec: [True] * (len(spec.row_offsets) - 1) for spec in specs}, 2.0
    ), specs


@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("now", [1, 2])
def test_sums_of_steps_stay_what_they_were(saved, now):
    """Added up over the ranks for the table in shards, and the same on all for the other."""
    random = np.random.default_rng(1)
    of_each, _ = of_two_tables(None)
    held = [random.integers(0, 9, (saved, *v.shape)) for v in of_each.variables]
    for values in held:
        values[:, 2] = values[:1, 2]  # what all ranks have alike
        values[:, :, 0] = values[:1, :, 0]
    for rank in range(now):
        shard = None if now == 1 else Shard(rank, now, 8)
        statistics, specs = of_two_tables(shard)
        in_shards = [] if saved == 1 else specs[:1]
        for values, variable in zip(held, statistics.variables, strict=True):
            mine = statistics.share_of(variable, values, in_shards, rank)
            steps = "counts" in variable.name
            expected = values[0].copy()
            expected[:2] = values[:, :2].sum(axis=0) if rank == 0 else 0
            if steps:
                expected[:, 0] = values[0][:, 0]
            np.testing.assert_array_equal(mine, expected)
            assert mine.dtype == values.dtype


class Nothing:
    """Checkpoints that have nothing to write, or have failed."""

    def __init__(self, failure=None):
        self.failure = failure

    def told(self):
        return {"failure": self.failure, "written": None}

    def hear(self, said):
        for one in said:
            if one["failure"]:
                raise AgreedError(one["failure"])


def test_ranks_stop_where_one_was_asked_to(monkeypatch):
    from merlin_cowclip.plugins.joining import Ranks

    stopping = Stopping(several=True)
    meeting = Meeting(Ranks(0, 2, 0, 2), Nothing(), stopping)
    other = {"failure": None, "written": None, "number": None, "out_of_time": False}
    other |= {"due": True, "seconds": 0.1}
    monkeypatch.setattr(meetings, "said_by_all", lambda mine: [mine, other])
    assert not meeting.hold(), "the first rank's clock says what is due"
    assert not stopping.asked
    held = [meeting.hold(is_due=True) for _ in range(6)]
    assert held == [False] * 4 + [True, False], "about every half second of the slowest rank"
    other["number"] = 15
    assert not stopping.asked, "not before it is told"
    meeting.hold(now=True)
    assert stopping.asked
    assert stopping.number == 15
    assert meeting.hold(is_due=True), "what begins after it may take other times"
    assert not meeting.hold(is_due=True)
    other |= {"failure": "no space"}
    with pytest.raises(AgreedError, match="no space"):
        meeting.hold(now=True)


def test_the_launchers_signal_beside_a_schedulers_is_one(monkeypatch):
    """A second one ends a process at once, unsaved."""
    from merlin_cowclip.workflows.training import stopping as stoppings

    clock = [100.0]
    monkeypatch.setattr(stoppings.time, "monotonic", lambda: clock[0])
    with Stopping(several=True) as stopping:
        for _ in range(3):
            stopping._received(15, None)
        clock[0] += 3.0
        ended = []
        stopping._before[15] = lambda *given: ended.append(given)
        stopping._received(15, None)
        assert ended == [(15, None)]


def test_a_signal_here_waits_for_the_others():
    stopping = Stopping(several=True)
    with stopping:
        stopping._received(15, None)
        assert (stopping.number, stopping.asked) == (15, False)
        with stopping.anywhere():
            pass
        stopping.agree(2, False)
        assert (stopping.number, stopping.asked) == (2, True)


@pytest.mark.parametrize(
    ("second", "works", "waited", "words"),
    [
        (4, [0, 0, 0], 1.1, "rank 0, 2, behind the others, which wait for it in update 4, for 45 "),
        (4, [0, 0, 0], 0.9, None),
        (4, [1, 0, 0], 1.1, "rank 0, which stands still while it reads or writes what .* for 45 "),
        (3, [0, 0, 0], 99.0, None),
        (3, [1, 0, 1], 1.1, "rank 0, 2, which stands still"),
        (3, [1, 1, 1], 99.0, None),
    ],
)
def test_a_rank_behind_others_hangs_and_ranks_at_one_place_work(
    monkeypatch, capsys, tmp_path, second, works, waited, words
):
    from merlin_cowclip.plugins.joining import Ranks

    ended = []
    monkeypatch.setattr(heartbeats.os, "_exit", ended.append)
    monkeypatch.setattr(heartbeats, "_PASSED_ON", 0.0)
    heart = Heartbeat(Ranks(1, 3, 1, 3), lambda: (0,), tmp_path)
    heart._end_if_one_is_behind([[4, n, 0, 9] for n in (3, second, 3)], works, waited)
    said = capsys.readouterr().err
    assert ended == ([2] if words else [])
    assert re.search(words or "^$", said)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_ranks_end_at_the_same_beat(monkeypatch, capsys, tmp_path, ahead):
    """One whose clock was ahead ended first, and no rank said why: the others waited for it."""
    from merlin_cowclip.plugins.joining import Ranks

    monkeypatch.setattr(heartbeats, "_PASSED_ON", 0.0)
    monkeypatch.setenv(heartbeats.PATIENCE, "0.15")
    places = ([5, 0, 0, 7], [5, 0, 0, 7], [4, 0, 0, 6])
    hearts = [
        Heartbeat(Ranks(rank, 3, rank, 3), lambda place=place: place, tmp_path)
        for rank, place in enumerate(places)
    ]
    beating = {heart._threads[0]: heart for heart in hearts}
    all_come, all_go = (threading.Barrier(3, timeout=20.0) for _ in range(2))
    told, beats = {}, {rank: 0 for rank in range(3)}

    def gathered(mine):
        heart = beating[threading.current_thread()]
        rank = heart._ranks.rank
        told[rank] = mine
        all_come.wait()
        found = np.concatenate([told[rank] for rank in range(3)])
        all_go.wait()
        heart._ticks += 2 if (rank, beats[rank]) == (ahead, 1) else 1
        beats[rank] += 1
        return found

    def end(code):
        all_come.abort()  # the launcher ends what waits for it
        raise RuntimeError  # and the thread with it

    monkeypatch.setattr(heartbeats, "gatherer_beside", lambda name: gathered)
    monkeypatch.setattr(heartbeats.os, "_exit", end)
    for thread in beating:
        thread.start()
    for thread in beating:
        thread.join(30.0)
    assert set(beats.values()) == {17}  # one more than its patience has, after the first
    said = capsys.readouterr().err
    assert said.count("rank 2, behind the others, which wait for it in update 5") == 1


class Together:
    """Of a rank's beats: what another one tells, and an end after a while."""

    def __init__(self, others):
        self.others = others
        self.heard = []

    def __call__(self, mine):
        tick, *told = mine[0].tolist()
        self.heard.append(told)
        return np.concatenate([mine, [[tick, 0, *self.others]]])


def beat_at_work(monkeypatch, tmp_path, signs) -> Together:
    """Of a rank that works while another one waits for it, until it is ended."""
    from merlin_cowclip.plugins.joining import Ranks

    together = Together([0, 0, 5])
    monkeypatch.setattr(heartbeats, "gatherer_beside", lambda name: together)
    monkeypatch.setattr(heartbeats.Signs, "count", lambda _: next(signs))
    monkeypatch.setattr(heartbeats, "_PASSED_ON", 0.0)
    monkeypatch.setenv(heartbeats.PATIENCE, "0.15")
    ended = threading.Event()

    def end(code):
        ended.set()
        raise RuntimeError  # and the thread with it

    monkeypatch.setattr(heartbeats.os, "_exit", end)
    heart = Heartbeat(Ranks(1, 2, 1, 2), lambda: (4,), tmp_path)
    with at_work.at_work():
        for thread in heart._threads:
            thread.start()
        assert ended.wait(20.0)
    return together


@pytest.mark.parametrize(
    ("signs", "at_least", "at_most"),
    [
        # Beats are counted by one thread, and the time by another, which a busy machine parts.
        pytest.param(iter([*range(60), *[60] * 999]), 61, 150, id="stands still"),
        pytest.param(itertools.repeat(at_work.UNKNOWN), 60, 999, id="cannot be seen"),
    ],
)
def test_a_rank_that_works_alone_may_as_long_as_it_goes_on(
    monkeypatch, tmp_path, signs, at_least, at_most
):
    """While it joins a thread that writes, say: the others wait, and know. 15 beats are enough."""
    heard = beat_at_work(monkeypatch, tmp_path, signs).heard
    assert {one[1] for one in heard} == {1}
    assert at_least <= len(heard) <= at_most


def test_what_a_process_reads_writes_and_computes_are_signs(tmp_path):
    signs = at_work.Signs(0.1)
    for _ in range(3):
        time.sleep(0.02)
        assert signs.count() == 0
    path = tmp_path / "large"
    path.write_bytes(bytes(3 << 20))
    path.read_bytes()
    assert signs.count() == 1 == signs.count()
    at_work.piece_done()
    assert signs.count() == 2
    ended = threading.Event()

    def compute():
        while time.thread_time() < 0.2:
            pass
        ended.wait()

    worker = threading.Thread(target=compute)
    worker.start()
    while time.process_time() and signs.count() == 2:
        time.sleep(0.01)
    assert signs.count() == 3
    ended.set()
    worker.join()
    assert signs.count() == 3, "that thread's time is gone, which is no sign"


def test_what_comes_to_the_disk_in_pieces_is_a_sign_each(monkeypatch, tmp_path):
    monkeypatch.setattr(checkpoint_files, "_SYNCED", 4096)
    done = []
    monkeypatch.setattr(checkpoint_files, "piece_done", lambda: done.append(1))
    for size, pieces in ((0, 0), (1, 1), (3 * 4096 + 1, 4)):
        path = tmp_path / str(size)
        path.write_bytes(bytes(size))
        checkpoint_files.sync(path)
        assert len(done) == pieces
        done.clear()
    checkpoint_files.sync(tmp_path)
    path.chmod(0o400)
    checkpoint_files.sync(path)


@pytest.mark.parametrize(("number", "fails"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_a_disk_that_fails_while_it_is_synced(monkeypatch, tmp_path, number, fails):
    """Its error is told once, so it must not be passed over; a file system may not offer it."""

    class Library:
        @staticmethod
        def sync_file_range(*_):
            ctypes.set_errno(number)
            return -1

    monkeypatch.setattr(checkpoint_files.ctypes, "CDLL", lambda *_, **__: Library)
    path = tmp_path / "file"
    path.write_bytes(b"1")
    with pytest.raises(OSError, match="Input/output") if fails else contextlib.nullcontext():
        checkpoint_files.sync(path)


def test_the_beats_of_two_runs_are_two(monkeypatch, tmp_path):
    """One that ended by a refusal may still tell its end while the next one begins."""
    from merlin_cowclip.plugins.joining import Ranks

    names = []

    def all_done(name):
        names.append(name)
        return lambda mine: np.ones((2, 3), np.int64)

    monkeypatch.setattr(heartbeats, "gatherer_beside", all_done)
    for _ in range(2):
        with Heartbeat(Ranks(0, 2, 0, 2), lambda: (0,), tmp_path):
            pass
    assert len(set(names)) == 2


def test_time_in_which_a_process_does_not_run_is_none(monkeypatch, tmp_path):
    """A job that is paused as a whole goes on."""
    from merlin_cowclip.plugins.joining import Ranks

    asked = threading.Event()
    sleep, naps = time.sleep, []

    def paused(seconds):
        naps.append(seconds)
        sleep(20 * seconds)

    monkeypatch.setattr(heartbeats, "gatherer_beside", lambda name: lambda mine: asked.wait(30))
    monkeypatch.setenv(heartbeats.PATIENCE, "0.15")
    monkeypatch.setattr(heartbeats.time, "sleep", paused)
    ended = threading.Event()
    monkeypatch.setattr(Heartbeat, "_end", lambda *_: ended.set())
    heart = Heartbeat(Ranks(1, 2, 1, 2), lambda: (4,), tmp_path)
    for thread in heart._threads:
        thread.start()
    assert not ended.wait(1.0), "six times its patience"
    assert ended.wait(10.0)
    assert len(naps) > 15
    asked.set()


@pytest.mark.parametrize("work", ["wait", "settle"])
def test_the_disk_may_take_long(monkeypatch, tmp_path, work):
    checkpoints = Checkpoints(tmp_path)
    was = []

    def slowly(*_):
        time.sleep(0.2)
        was.append(at_work.is_at_work())

    monkeypatch.setattr(checkpoint_files, "write_tensors", slowly)
    checkpoints.save(1, State({"weight/0000": tf.Variable([1.0])}), {})
    getattr(checkpoints, work)()
    assert was == [True]
    assert not at_work.is_at_work()


def test_patience_is_a_time(monkeypatch, tmp_path):
    for said in ("soon", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(heartbeats.PATIENCE, said)
        with pytest.raises(UserError, match=f"positive number of seconds. Received: '{said}'"):
            Heartbeat(ALONE, lambda: (0,), tmp_path)


def test_one_rank_that_cannot_write_leaves_the_others_their_files(monkeypatch, tmp_path):
    """Its failure is the one that is said, and the first rank removes what there is."""
    from merlin_cowclip.plugins.joining import Ranks

    kept = tmp_path / "step-0000000002"
    kept.mkdir()
    state = {"weight/0000": tf.Variable([[1.0], [2.0]])}
    first, second = (Checkpoints(tmp_path, ranks=Ranks(rank, 2, rank, 2)) for rank in range(2))
    first.save(4, State(state), {})
    first.settle()
    (partial,) = tmp_path.glob(".step-*.partial")
    held = sorted(partial.iterdir())
    with monkeypatch.context() as patched:
        full = OSError(errno.ENOSPC, "No space left on device")
        patched.setattr(checkpoint_files, "write_tensors", lambda *_: (_ for _ in ()).throw(full))
        second.save(4, State(state, shards={"weight/0000": Shard(1, 2, 4)}), {})
        second.settle()
    assert sorted(partial.iterdir()) == held != []
    said = [first.told(), second.told()]
    assert said[0]["failure"] is None
    with pytest.raises(OSError, match="No space left"):
        second.hear(said)
    with pytest.raises(AgreedError, match="on rank 1: .*No space left"):
        first.hear(said)
    assert list(tmp_path.iterdir()) == [kept]


class Batches:
    """A loader of some, of two rows each."""

    element_spec = ({}, None)
    rows = 6

    def __len__(self):
        return 3

    def dataset(self):
        return [({}, tf.constant([0.0, 1.0]))] * 3


@pytest.mark.parametrize(("ranks", "in_shards", "met"), [(1, True, 0), (2, True, 1), (2, False, 2)])
def test_where_ranks_that_evaluate_wait_for_each_other(monkeypatch, ranks, in_shards, met):
    """One rank of a script evaluates by itself; and none is waited for amid lookups in shards."""
    meetings = []

    @contextlib.contextmanager
    def agreed():
        yield
        meetings.append(True)

    monkeypatch.setattr(evaluation, "agreed", agreed)
    monkeypatch.setattr(evaluation, "is_in_shards", lambda model: in_shards)
    monkeypatch.setattr(evaluation.QualityOf, "of_all_ranks", lambda found: found)
    for rank in range(ranks):
        predictor = evaluation.Predictor(None)
        monkeypatch.setattr(predictor, "probabilities", lambda *_: np.array([0.1, 0.9]))
        calls = []
        assert (
            predictor.quality(
                Batches(), rank=rank, ranks=ranks, between=lambda c=calls: c.append(True)
            ).auc
            == 1
        )
        assert len(calls) == predictor.begun == -(-3 // ranks), "as often on all ranks"
    assert len(meetings) == met * ranks


def test_a_model_of_a_checkpoint_is_whole(monkeypatch, tmp_path):
    """For one rank of a script, the others of which do nothing."""
    from merlin_cowclip.workflows.training import rebuilding
    from merlin_cowclip.workflows.training.configuration import TrainConfig

    def model(schema, **options):
        assert options["sharded"] is False
        raise InterruptedError

    config = TrainConfig(tables="sharded")
    monkeypatch.setattr(rebuilding, "MODELS", {config.model: model})
    (tmp_path / "schema.pbtxt").write_text("")
    with pytest.raises(InterruptedError):
        rebuilding.rebuilt(None, config, tmp_path / "schema.pbtxt", {})


class Shared:
    """A loader's numbers."""

    rows, batch_size = 100, 30

    def __init__(self, ranks):
        self.ranks = ranks


def test_batches_that_ranks_cannot_share_are_refused(tmp_path):
    assert not leaves_rows_out({})
    assert leaves_rows_out({"ranks": 2})
    assert leaves_rows_out({"drop_last": True}), "of a run that one process goes on with"
    refuse_last_batch({"drop_last": True}, tmp_path, Shared(2))
    refuse_last_batch({}, tmp_path, Shared(1))
    with pytest.raises(UserError, match="end with a batch of 10 of 30 rows. Go on in one process"):
        refuse_last_batch({}, tmp_path, Shared(2))
