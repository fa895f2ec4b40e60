"""A checkpoint is complete or not there; damage is noticed; a killed or full run loses nothing that was published."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from crossrl import checkpoint, manifest
from crossrl.checkpoint import Checkpoints, RunLock
from crossrl.errors import CheckpointError, WorkerError


def write(folder):
    (folder / "model").mkdir()
    (folder / "model" / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "engine.json").write_text('{"updates": 3}')


def publish(run_dir, step, keep=2, **state):
    return Checkpoints(run_dir, keep).save(step, write, {"step": step, **state})


def names(run_dir):
    return sorted(p.name for p in (Path(run_dir) / "checkpoints").iterdir())


def refused(call, *args):
    with pytest.raises(CheckpointError) as caught:
        call(*args)
    return str(caught.value)


def test_what_was_saved_comes_back_exactly(tmp_path):
    state = {"history": [{"loss": 0.1 + 0.2, "bad": float("inf")}], "before": [1, None, "ü"], "config": {"a": {"3": 1}}}
    path = publish(tmp_path, 7, **state)
    checkpoints = Checkpoints(tmp_path)
    assert path == checkpoints.latest() == checkpoints.resolve("auto") == checkpoints.resolve(path)
    assert checkpoints.verify(path) == checkpoints.state(path) == {"step": 7, **state}
    assert (path / "model" / "weights.bin").stat().st_size == 10240
    body = json.loads((path / "manifest.json").read_text())
    assert body["schema"] == 1 and body["step"] == 7 and "crossrl" in body["versions"]
    assert set(body["files"]) == {"model/weights.bin", "engine.json"}


def test_the_newest_few_are_kept_by_step_whatever_the_clock_says(tmp_path):
    for step in (5, 10, 15, 20):
        os.utime(publish(tmp_path, step), (2e9 - step * 1e6,) * 2)
    assert names(tmp_path) == ["LATEST", "step-00000015", "step-00000020"]
    assert (tmp_path / "checkpoints" / "LATEST").read_text() == "step-00000020\n"
    assert Checkpoints(tmp_path).latest().name == "step-00000020"
    publish(tmp_path, 25, keep=1)
    assert names(tmp_path) == ["LATEST", "step-00000025"]


def test_without_checkpoints_every_automatic_resume_starts_afresh(tmp_path):
    assert [Checkpoints(tmp_path).resolve(how) for how in ("never", "auto", "latest_valid")] == [None] * 3
    assert "no manifest" in refused(Checkpoints(tmp_path).resolve, str(tmp_path))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def newer(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": 2}))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("model/weights.bin", flip, "hash differs"),
        ("model/weights.bin", lambda p: os.truncate(p, 100), "100 bytes, 10240 were written"),
        ("engine.json", os.remove, "missing"),
        ("manifest.json", flip, "the manifest is damaged"),
        ("manifest.json", lambda p: os.truncate(p, 0), "the manifest is damaged"),
        ("manifest.json", lambda p: os.truncate(p, 200), "the manifest is damaged"),
        ("manifest.json", lambda p: p.write_text("[]"), "the manifest is damaged"),
        ("manifest.json", os.remove, "no manifest.json"),
        ("manifest.json", newer, "newer CrossRL: schema 2"),
    ],
)
def test_damage_is_refused_by_name_and_latest_valid_goes_back(tmp_path, caplog, name, damage, words):
    good, bad = publish(tmp_path, 5), publish(tmp_path, 10)
    damage(bad / name)
    checkpoints = Checkpoints(tmp_path)
    for call, how in ((checkpoints.resolve, "auto"), (checkpoints.verify, bad), (checkpoints.resolve, bad)):
        text = refused(call, how)
        assert words in text and str(bad) in text and (name in text or "no manifest" in text)
    assert "latest_valid" in text or "schema" in text
    assert checkpoints.resolve("latest_valid") == good
    assert "step-00000010" in caplog.text and words in caplog.text
    damage(good / name)
    assert "no checkpoint is intact" in refused(checkpoints.resolve, "latest_valid")


def test_any_flipped_bit_of_the_manifest_is_noticed(tmp_path):
    path = publish(tmp_path, 5, history=[{"reward": 0.25}])
    before, state = (path / "manifest.json").read_bytes(), Checkpoints(tmp_path).state(path)
    for place in range(0, len(before), 7):
        flipped = bytearray(before)
        flipped[place] ^= 1
        (path / "manifest.json").write_bytes(flipped)
        try:
            assert Checkpoints(tmp_path).state(path) == state, f"byte {place}"  # white space may differ
        except CheckpointError:
            continue


def test_a_run_that_starts_elsewhere_sets_the_others_aside_and_deletes_nothing(tmp_path):
    first, second = publish(tmp_path, 5), publish(tmp_path, 10)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.resolve("never") is None and checkpoints.latest() == second, "resolving moves nothing"
    checkpoints.continue_from(first)
    assert checkpoints.latest() == first
    assert (tmp_path / "checkpoints-aside-1" / "step-00000010" / "manifest.json").exists()
    checkpoints.continue_from(None)
    assert checkpoints.latest() is None
    moved = tmp_path / "checkpoints-aside-2" / "step-00000005"
    assert checkpoints.resolve(moved) == moved


def test_a_step_that_is_written_again_replaces_the_old_one_and_what_came_after(tmp_path):
    publish(tmp_path, 10, note="old")
    publish(tmp_path, 20, note="old")
    path = publish(tmp_path, 10, note="new")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == path and checkpoints.state(path)["note"] == "new"
    assert (tmp_path / "checkpoints-aside-1" / "step-00000020").is_dir()
    assert names(tmp_path) == ["LATEST", "step-00000010"]


def test_errors_of_the_writer_keep_their_kind_or_become_ours(tmp_path):
    def dies(folder):
        raise WorkerError("a worker died")

    with pytest.raises(WorkerError):
        Checkpoints(tmp_path).save(1, dies, {})

    def fails(folder):
        (folder / "part").write_bytes(bytes(5000))
        raise ValueError("tensor has no storage")

    text = refused(Checkpoints(tmp_path).save, 1, fails, {})
    assert "no storage" in text and "5000 bytes" in text and "bytes free" in text
    assert names(tmp_path) == []


def test_a_full_disk_is_foreseen_from_the_size_of_the_last_checkpoint(tmp_path, monkeypatch):
    good = publish(tmp_path, 5)
    size = manifest.size(good)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 100))
    text = refused(Checkpoints(tmp_path).begin, 10)
    assert f"needed at least {size} bytes, 100 bytes free" in text and "No space left" in text
    assert Checkpoints(tmp_path).resolve("auto") == good and "step-10.tmp" not in "".join(names(tmp_path))


CHILD = """
import json, os, resource, signal, sys
from pathlib import Path
from crossrl import manifest
from crossrl.checkpoint import Checkpoints, RunLock

def write(folder):
    (folder / "model").mkdir()
    for name in ("model/a.bin", "b.bin"):
        with open(folder / name, "wb") as file:
            file.write(bytes(100_000))
            os.fsync(file.fileno())
"""


def child(code, *args, **how):
    return subprocess.run([sys.executable, "-c", CHILD + textwrap.dedent(code), *map(str, args)], text=True, **how)


@pytest.mark.parametrize(("limit", "words"), [(50_000, "b.bin"), (150, "manifest")])
def test_a_write_that_hits_a_limit_names_path_and_bytes_and_leaves_the_last_one(tmp_path, limit, words):
    good = publish(tmp_path, 5)
    code = """
        def small(folder):
            (folder / "small.bin").write_bytes(bytes(10))
        limit = int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        Checkpoints(sys.argv[1]).save(10, small if limit < 1000 else write, {"step": 10})
    """
    done = child(code, tmp_path, limit, capture_output=True, check=False)
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("crossrl.errors.CheckpointError") :]
    assert "step-10.tmp-" in last and "File too large" in last and "bytes free" in last and "needed at least" in last
    assert Checkpoints(tmp_path).resolve("auto") == good
    assert names(tmp_path) == ["LATEST", "step-00000005"]


KILL = """
    # run n dies before the n-th change to the disk of a save, and says which that would have been
    places = [(os, name) for name in ("mkdir", "open", "fsync", "rename", "rmdir", "unlink")]
    places.append((manifest, "write"))
    left = 0

    def watched(real):
        def call(*args, **how):
            global left
            left -= 1
            if left == 0:
                print(real.__name__, *map(repr, args), flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **how)
        return call

    def run(n, step):
        global left
        with RunLock(f"{sys.argv[1]}/{n}"):
            checkpoints, left = Checkpoints(f"{sys.argv[1]}/{n}", keep=1), n
            for module, name in places:
                setattr(module, name, watched(getattr(module, name)))
            tmp = checkpoints.begin(step)
            write(tmp)
            checkpoints.publish(tmp, step, {"step": step, "note": "new"})

    for n in range(1, 100):
        Checkpoints(f"{sys.argv[1]}/{n}").save(5, write, {"step": 5, "note": "old"})
        pid = os.fork()
        if pid == 0:
            run(n, int(sys.argv[2]))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != -signal.SIGKILL:
            sys.exit(code)
    sys.exit("never finished")
"""


@pytest.mark.parametrize("step", [10, 5], ids=["next step", "same step again"])
def test_killed_at_any_point_the_last_published_is_found_and_the_rest_cleaned(tmp_path, step):
    done = child(KILL, tmp_path, step, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    points, found = [*done.stdout.splitlines(), "none: it finished"], []
    for n, point in enumerate(points, start=1):
        run_dir = tmp_path / str(n)
        with RunLock(run_dir):
            checkpoints = Checkpoints(run_dir, keep=1)
            state = checkpoints.verify(checkpoints.resolve("auto"))
            assert state in ({"step": 5, "note": "old"}, {"step": step, "note": "new"}), point
            assert not [name for name in names(run_dir) if "tmp-" in name or ".old" in name], point
            checkpoints.save(15, write, {})
            assert names(run_dir) == ["LATEST", "step-00000015"], point
        found.append(state["note"])
    text = "\n".join(points)
    for named in ("mkdir", "manifest.json", "LATEST.tmp", "step-00000010" if step == 10 else ".old-"):
        assert named in text, text
    assert found == sorted(found, reverse=True) and {"old", "new"} == set(found), "published once, for good"


def test_a_second_run_in_the_folder_is_refused_with_the_holder(tmp_path):
    with RunLock(tmp_path):
        text = refused(RunLock(tmp_path).__enter__)
        assert f"pid {os.getpid()} on {os.uname().nodename}" in text and str(tmp_path) in text
    with RunLock(tmp_path):
        pass


def test_the_lock_of_a_killed_run_is_free(tmp_path):
    code = "lock = RunLock(sys.argv[1]); lock.__enter__(); print('held', flush=True); signal.pause()"
    holder = subprocess.Popen([sys.executable, "-c", CHILD + code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    assert f"pid {holder.pid}" in refused(RunLock(tmp_path).__enter__)
    holder.kill()
    holder.wait()
    with RunLock(tmp_path):
        pass


def test_cleaning_happens_only_under_the_lock(tmp_path):
    tmp = Checkpoints(tmp_path).begin(3)
    Checkpoints(tmp_path).resolve("auto")
    assert tmp.exists(), "another tool that reads must not delete what a live run writes"
    with RunLock(tmp_path):
        assert not tmp.exists()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be used" in refused(RunLock(tmp_path / "file").__enter__)
    assert "cannot write" in refused(Checkpoints(tmp_path / "file").begin, 1)


def test_a_file_system_without_locks_warns_and_goes_on(tmp_path, monkeypatch, caplog):
    def unsupported(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(checkpoint.fcntl, "flock", unsupported)
    with RunLock(tmp_path):
        assert "cannot be locked" in caplog.text
