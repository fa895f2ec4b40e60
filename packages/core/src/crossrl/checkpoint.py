"""Checkpoints: a folder that is complete or not there, checked before it is used, and a lock for the run's folder.

    run_dir/checkpoints/step-00000010/   manifest.json (step, state, versions, size and sha256 of every file) + files
                        LATEST           the newest one's name, for people; code goes by the step number

Kill the process at any point and the last published checkpoint is still found.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from crossrl import manifest
from crossrl.errors import CheckpointError, CrossRLError

log = logging.getLogger(__name__)

_PUBLISHED = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """The checkpoints of one run. Reading is for everyone, writing for the run that holds the `RunLock`."""

    def __init__(self, run_dir: str | Path, keep: int = 2) -> None:
        self.folder, self.keep = Path(run_dir).resolve() / "checkpoints", keep

    def save(self, step: int, write: Callable[[Path], None], state: dict[str, Any], spare: Path | None = None) -> Path:
        """`begin`, `write(folder)`, `publish`; whatever fails is a `CheckpointError` and leaves the others intact."""
        tmp = self.begin(step)
        try:
            write(tmp)
        except CrossRLError:
            shutil.rmtree(tmp, ignore_errors=True)
            raise
        except Exception as error:  # writers fail in many ways (OSError, SafetensorError, RayTaskError ...)
            log.debug("writing %s failed", tmp, exc_info=True)
            raise self._failure(tmp, error) from error
        return self.publish(tmp, step, state, spare)

    def begin(self, step: int) -> Path:
        """A new folder to write into; `CheckpointError` at once if the last checkpoint's size is no longer free."""
        tmp = self.folder / f"step-{step}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            tmp.mkdir(parents=True)
        except OSError as error:
            raise self._failure(tmp, error) from error
        last = self.latest()
        needed = manifest.size(last) if last else 0
        if shutil.disk_usage(tmp).free < needed:
            raise self._failure(tmp, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), needed)
        return tmp

    def publish(self, tmp: Path, step: int, state: dict[str, Any], spare: Path | None = None) -> Path:
        """Make what was written into `tmp` the checkpoint of `step`; `state` is plain JSON.

        Then prune to the newest `keep`, and `spare`.
        """
        final = self.folder / f"step-{step:08d}"
        try:
            manifest.seal(tmp, step, state)
            self._set_aside([p for p in self.published() if p.name > final.name])  # of a future that did not happen
            if final.exists():  # a resumed run writes its step again
                final.rename(final.with_name(f"{final.name}.old-{uuid.uuid4().hex[:8]}"))
            tmp.rename(final)
            manifest.sync(self.folder)
            manifest.sync(self.folder.parent)
            manifest.write(self.folder / "LATEST.tmp", final.name + "\n")
            (self.folder / "LATEST.tmp").rename(self.folder / "LATEST")
            manifest.sync(self.folder)
        except OSError as error:
            raise self._failure(tmp, error) from error
        manifest.check(final, manifest.read(final), hashes=False)  # the hashes were just read from the same files
        self._prune(final, spare)
        return final

    def published(self) -> list[Path]:
        """All published checkpoints, oldest first, by step number."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        steps = {path: match for path in found if (match := _PUBLISHED.fullmatch(path.name))}
        return sorted(steps, key=lambda path: int(steps[path][1]))

    def latest(self) -> Path | None:
        """The published checkpoint of the highest step."""
        return next(reversed(self.published()), None)

    def state(self, path: Path) -> dict[str, Any]:
        """The state in a manifest, which is checked; the other files are not."""
        return manifest.read(path)["state"]

    def verify(self, path: Path) -> dict[str, Any]:
        """The state, once every file was found with its size and hash; `CheckpointError` names one that was not."""
        found = manifest.read(path)
        manifest.check(path, found)
        return found["state"]

    def resolve(self, resume: str | Path) -> Path | None:
        """The verified checkpoint that `resume` names, or None to start afresh; moves nothing.

        "never" is None, "auto" the newest, refused if it is damaged, "latest_valid" the newest that is intact,
        anything else a checkpoint folder.
        """
        found = self.published()
        if resume == "never" or (resume in ("auto", "latest_valid") and not found):
            return None
        if resume == "latest_valid":
            return self._newest_intact(found)
        path = found[-1] if resume == "auto" else Path(resume).resolve()
        self.verify(path)
        return path

    def continue_from(self, start: Path | None) -> None:
        """Move all that a run starting from `start` does not continue to `checkpoints-aside-N`; the lock must be held.

        Without it, "auto" would later find the checkpoints of an earlier run or of an abandoned future.
        """
        found = self.published()
        self._set_aside(found[found.index(start) + 1 :] if start in found else found)

    def _newest_intact(self, found: list[Path]) -> Path:
        problems = []
        for path in reversed(found):
            try:
                self.verify(path)
                return path
            except CheckpointError as error:
                log.warning("skipped a damaged checkpoint: %s: %s", error.where, error.what)
                problems.append(f"{error.where}: {error.what}")
        raise CheckpointError("no checkpoint is intact: " + "; ".join(problems), where=str(self.folder))

    def _set_aside(self, paths: list[Path]) -> None:
        if not paths:
            return
        taken = [int(p.name.rpartition("-")[2]) for p in self.folder.parent.glob("checkpoints-aside-[0-9]*")]
        aside = self.folder.with_name(f"checkpoints-aside-{max(taken, default=0) + 1}")
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)
        (self.folder / "LATEST").unlink(missing_ok=True)
        log.warning("moved %d checkpoints that this run does not continue to %s", len(paths), aside)

    def _prune(self, newest: Path, spare: Path | None) -> None:
        """Delete all but the newest `keep` and `spare`, each renamed first: no half-deleted one is ever found."""
        for path in [p for p in self.published() if p != newest][: -(self.keep - 1) or None]:
            if path == spare:
                continue
            path.rename(path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}"))
        clean(self.folder)

    def _failure(self, tmp: Path, error: BaseException, needed: int | None = None) -> CheckpointError:
        written = manifest.size(tmp)
        shutil.rmtree(tmp, ignore_errors=True)
        free = shutil.disk_usage(next(p for p in tmp.absolute().parents if p.exists())).free
        return CheckpointError(
            f"cannot write the checkpoint: {error}; needed at least {needed or written} bytes, {free} bytes free",
            where=str(tmp),
            fix="free some space, or change run_dir or checkpoint.keep; the previous checkpoints are intact",
        )


class RunLock:
    """Holds `run_dir` for one run; the system releases it when the process ends, however it ends."""

    def __init__(self, run_dir: str | Path) -> None:
        self.path = Path(run_dir) / "run.lock"

    def __enter__(self) -> RunLock:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a+")
        except OSError as error:
            raise CheckpointError(f"cannot be used: {error}", where=str(self.path.parent)) from error
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.seek(0)
            holder = self.file.read().strip() or "another process"
            self.file.close()
            raise CheckpointError(
                f"in use by {holder}", where=str(self.path.parent), fix="stop that run or choose another run_dir"
            ) from None
        except OSError as error:  # some cluster file systems have no locks
            log.warning("%s cannot be locked (%s): nothing stops a second run in it", self.path.parent, error)
        self.file.truncate(0)
        self.file.write(f"pid {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        self.file.flush()
        clean(self.path.parent / "checkpoints")
        return self

    def __exit__(self, *_: object) -> None:
        self.file.truncate(0)
        self.file.close()


def clean(folder: Path) -> None:
    """Remove what a killed run left half written or half deleted; the lock must be held."""
    for old in folder.glob("step-*.old-*"):
        final = old.with_name(old.name.partition(".")[0])
        if not final.exists():  # killed between the two renames of `publish`
            old.rename(final)
    for pattern in ("step-*.tmp-*", "step-*.old-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
