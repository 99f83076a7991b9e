"""Each engine gives the files that one process gives, whatever ends its workers."""

import functools
import json
import os
import signal
import sys
import time
import types

import psutil
import pytest

from mmdecode.errors import InputError, MMDecodeError, OptionError
from mmdecode.runs import processes
from mmdecode.runs.engines import Engine, Job
from mmdecode.runs.memory import share_gpu
from mmdecode.runs.units import Prepared
from mmdecode.runs.work import run
from tests.runs.faults import reported, started, workers_of
from tests.runs.stand_in import decoded, folder_of, load, names
from tests.support.files import contents, json_lines

PROCESSES = pytest.param("processes", marks=[])
RAY = pytest.param("ray", marks=[pytest.mark.slow, pytest.mark.timeout(600)])
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray")
ENGINES = pytest.mark.parametrize("engine", [PROCESSES, RAY])
SLOWLY = pytest.mark.parametrize(
    "engine", [pytest.param("processes", marks=[pytest.mark.slow, pytest.mark.timeout(600)]), RAY]
)


@pytest.fixture(autouse=True)
def _installed(request):
    if request.node.name.endswith("ray]"):
        pytest.importorskip("ray.data")


@pytest.fixture
def two_gpus():
    """A Ray cluster with GPUs that do not exist."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        how = {"num_cpus": 4, "num_gpus": 2, "object_store_memory": 150e6}
        ray.init(address="local", include_dashboard=False, log_to_driver=False, **how)
    yield
    ray.shutdown()


@pytest.fixture
def whole(tmp_path):
    """Files of a run by one process, by clips."""

    def call(clips, load=load):
        out = tmp_path / "whole"
        run(folder_of(out, clips), load)
        return contents(out)

    return call


@pytest.mark.slow
@ENGINES
def test_workers_write_the_files_of_one_process(engine, whole, tmp_path):
    out, clips = tmp_path / "out", names(50, **{"raise": 7, "kill": 20})
    (tmp_path / "once").mkdir()
    once = functools.partial(load, once=tmp_path / "once")
    tally = decoded(folder_of(out, clips), engine, once)
    expected = whole(clips, once)
    assert contents(out) == expected and (tmp_path / "once" / "kill-20").exists()
    assert (tally.done, tally.done_before, list(tally.failures)) == (49, 0, [7])
    assert engine == "ray" or tally.audio_s == sum(range(50)) - 7
    again = decoded(folder_of(out, clips, resume=True), engine, workers=1)
    assert (again.done, again.done_before, list(again.failures)) == (0, 49, [7])
    assert contents(out) == expected


@SLOWLY
def test_what_ends_or_stops_workers_fails_alone(engine, tmp_path):
    special = {"kill": 3, "crash": 8, "memory": 14, "hang": 21, "raise": 30}
    clips, out = names(40, **special), tmp_path / "out"
    tally = decoded(folder_of(out, clips), engine, time_limit_s=4)
    lines = json_lines(out / "results.jsonl")
    assert [line["id"] for line in lines] == clips  # none is lost, none is there twice
    failed = {line["id"]: line["kind"] for line in lines if "error" in line}
    crashed = dict.fromkeys(["kill-3", "crash-8", "memory-14", "hang-21"], "CrashError")
    assert failed == crashed | {"raise-30": "ValueError"}
    assert tally.done == 35 and list(tally.failures) == [3, 8, 14, 21, 30]
    assert all("2 times while it decoded this input alone" in lines[i]["error"] for i in (3, 21))
    run(folder_of(tmp_path / "one", names(40)), load)
    good = json_lines(tmp_path / "one" / "results.jsonl")
    for mine, theirs in zip(lines, good, strict=True):
        assert "error" in mine or mine == theirs
    assert not [path for path in out.iterdir() if path.name.startswith(".deco")]


@SLOWLY
def test_what_happens_once_leaves_no_trace(engine, whole, tmp_path):
    special = {"kill": 3, "torn": 9, "crash": 20, "device": 30}
    clips, out = names(40, **special), tmp_path / "out"
    (tmp_path / "once").mkdir()
    once = functools.partial(load, once=tmp_path / "once")
    tally = decoded(folder_of(out, clips), engine, once)
    assert tally.done == 40 and not tally.failures
    happened = {path.name for path in (tmp_path / "once").iterdir()}
    assert happened == {"kill-3", "torn-9", "crash-20", "device-30"}
    plain = functools.partial(load, once=tmp_path / "once")
    run(folder_of(tmp_path / "whole", clips), plain)
    assert contents(out) == contents(tmp_path / "whole")


ERRORS = {
    "full": r"No space left on device.*continue with --resume",
    "limited": r"File too large.*continue with --resume",
    "wrong": "the model answered for other-1, which it was not given",
}


@SLOWLY
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_of_all_ends_the_job_and_resume_goes_on(engine, kind, tmp_path):
    clips, out = names(40, **{kind: 25}), tmp_path / "out"
    (tmp_path / "once").mkdir()
    once = functools.partial(load, once=tmp_path / "once")
    with pytest.raises(MMDecodeError, match=ERRORS[kind]):
        decoded(folder_of(out, clips), engine, once)
    decoded(folder_of(out, clips, resume=True), engine, once)
    run(folder_of(tmp_path / "whole", clips), once)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_loader_that_workers_cannot_import_is_refused(tmp_path):
    of_script = types.FunctionType(load.__code__, {"__name__": "__main__"})
    for loader in (lambda: load(), of_script):
        with pytest.raises(InputError, match="expected a function of a module"):
            decoded(folder_of(tmp_path / "out", names(4)), load=loader)


@pytest.mark.slow
def test_a_job_that_no_worker_can_begin_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "FUTILE", 2)
    with pytest.raises(MMDecodeError, match="no such thing"):
        decoded(folder_of(tmp_path / "out", names(4)), load=refusing, workers=1)
    with pytest.raises(MMDecodeError, match=r"2 workers in a row .* exit code 9"):
        decoded(folder_of(tmp_path / "out", names(4)), load=ending, workers=1)


@pytest.mark.parametrize("engine", [RAY])
def test_ray_ends_where_no_worker_can_begin(engine, tmp_path):
    with pytest.raises(MMDecodeError, match="no such thing"):
        decoded(folder_of(tmp_path / "out", names(4)), engine, refusing)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_grows_and_its_gpus_are_shared(two_gpus, whole, tmp_path):
    with pytest.raises(OptionError, match=r"needs 3 GPUs and 1 CPUs, and no machine .* 2 and 4"):
        run(folder_of(tmp_path / "no", names(2)), load, engine=Engine("ray", 1, gpus=3.0))
    clips, out = names(64), tmp_path / "out"
    how = Engine("ray", "1:3", gpus=0.5)
    run(folder_of(out, clips), functools.partial(load, 0.2), engine=how)
    assert contents(out) == whole(clips)


def refusing():
    raise OptionError("no such thing")


def ending():
    os._exit(9)


@SLOWLY
def test_older_results_are_replaced_whole(engine, whole, tmp_path):
    out, clips = tmp_path / "out", names(40)
    run(folder_of(out, names(30), formats=("txt", "srt")), load)
    decoded(folder_of(out, clips, overwrite=True), engine)
    units = json.loads((out / "run.json").read_text())["work"]["units"]
    assert [name for _, ids in units for name in ids] == clips
    expected = whole(clips)
    assert {name: text for name, text in contents(out).items() if ".srt" not in name} == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_to_all_processes_is_no_crash(number, tmp_path):
    out = tmp_path / "out"
    going = started(out, 600, "processes", seconds=0.4)
    while not reported(out):
        assert going.poll() is None
        time.sleep(0.05)
    processes = [*workers_of(going), going]
    for process in processes:
        process.send_signal(number)
    going.wait(10)
    psutil.wait_procs(processes[:-1], timeout=10)
    assert not list(out.rglob(".decoding-*")) and 0 < len(reported(out)) < 600


def test_a_new_worker_has_the_gpu_of_the_one_that_ended(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    begun = []

    class Ended:
        returncode = 9

        def __init__(self, command, env, **how):
            begun.append(env["CUDA_VISIBLE_DEVICES"])

        def wait(self, timeout=None):
            return 9

    monkeypatch.setattr(processes.subprocess, "Popen", Ended)
    job = Job(folder_of(tmp_path, names(2)), load, Prepared(set(), set(), {}, []), [])
    job.folder.open(job.prepared)
    workers = processes.Workers(Engine("processes", 3), job)
    workers._file = 0
    for _ in range(3):
        workers._start()
    one = [*workers._workers.values()][1]
    workers._remove(one)
    workers._start()
    assert begun == ["0", "1", "2", "1"]
    workers.close()
    job.folder.close()


@SLOWLY
def test_a_run_that_is_stopped_ends_its_workers_within_ten_seconds(engine, whole, tmp_path):
    clips, out = names(600), tmp_path / "out"
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        going = started(out, 600, engine, seconds=0.4)
        before = len(reported(out))
        while len(reported(out)) == before:
            assert going.poll() is None
            time.sleep(0.05)
        workers = workers_of(going)
        going.send_signal(number)
        began = time.monotonic()
        going.wait(10)
        psutil.wait_procs(workers, timeout=10 - (time.monotonic() - began))
        assert not [worker for worker in workers if worker.is_running()], "workers go on"
        assert 0 < len(reported(out)) < 600
    tally = decoded(folder_of(out, clips, resume=True), engine)
    assert tally.done_before > 0 and contents(out) == whole(clips)


def test_results_that_are_printed_take_no_workers(tmp_path):
    with pytest.raises(OptionError, match="give --out"):
        decoded(folder_of(tmp_path, names(2)), temporary=True)


REFUSED = {
    "workers": ({"workers": "0"}, "expected a number from 1 on, or with"),
    "bounds": ({"workers": "3:2", "name": "ray"}, "expected a number from 1 on, or with"),
    "bounds of processes": ({"workers": "1:2"}, "need --engine ray"),
    "local workers": ({"name": "local"}, "--workers does nothing with --engine local"),
    "shares of a GPU": ({"gpus": 0.5}, "--gpus-per-worker does nothing with --engine processes"),
    "unknown": ({"name": "threads"}, "processes"),
    "no time": ({"time_limit_s": 0}, "positive"),
    "local time": ({"name": "local", "workers": None, "time_limit_s": 5}, "--time-limit does"),
}


@pytest.mark.parametrize(("how", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_an_engine_does_not_take_is_refused(how, problem):
    with pytest.raises(MMDecodeError, match=problem):
        Engine(**{"name": "processes", "workers": 2, **how})


def test_without_ray_one_line_says_the_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MMDecodeError, match=r"pip install 'mmdecode\[scale\]'"):
        decoded(folder_of(tmp_path, names(2)), "ray")


def test_workers_that_share_a_gpu_share_its_memory(monkeypatch):
    limits = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.set_per_process_memory_fraction", limits.append)
    for share in (0, 0.25, 1, 2):
        share_gpu(share)
    assert limits == [0.25]
