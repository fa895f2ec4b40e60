"""The manifest of a folder: what it holds, flushed to disk and hashed, so that damage is noticed before use."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from crossrl.errors import CheckpointError
from crossrl.registry import versions

SCHEMA = 1
NAME = "manifest.json"
ADVICE = "resume=latest_valid goes back to the newest checkpoint that is intact"


def seal(tmp: Path, step: int, state: dict[str, Any]) -> None:
    """Flush all files to the disk and write the manifest last."""
    paths = sorted(p for p in tmp.rglob("*") if p.is_file())
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, paths))
        sums = list(pool.map(_sha256, paths))
    files = {
        path.relative_to(tmp).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, sums, strict=True)
    }
    body = {"schema": SCHEMA, "step": step, "versions": versions(), "files": files, "state": state}
    body = json.loads(json.dumps(body))  # what a reader will see, for the manifest's own hash
    write(tmp / NAME, json.dumps({"sha256": _self_hash(body), **body}, indent=1))
    for folder in [*(p for p in tmp.rglob("*") if p.is_dir()), tmp]:
        sync(folder)


def sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def size(folder: Path) -> int:
    """Bytes of all files in it."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def write(path: Path, text: str) -> None:
    """Write text and flush it to the disk."""
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _self_hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, found intact and of a schema that is known here."""
    where = str(path / NAME)
    try:
        body = json.loads((path / NAME).read_text())
        digest = body.pop("sha256")
        schema = body["schema"]
    except FileNotFoundError:
        raise CheckpointError("it has no manifest.json", where=str(path), fix=ADVICE) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the manifest is damaged: {error!r}", where=where, fix=ADVICE) from error
    if isinstance(schema, int) and schema > SCHEMA:
        raise CheckpointError(
            f"written by a newer CrossRL: schema {schema}, known up to {SCHEMA}", where=where, fix="update crossrl-core"
        )
    if digest != _self_hash(body):
        raise CheckpointError("the manifest is damaged: its hash differs", where=where, fix=ADVICE)
    return body


def check(path: Path, manifest: dict[str, Any], hashes: bool = True) -> None:
    """Raise `CheckpointError` naming a file that is missing or differs in size or hash."""
    files = {path / name: about for name, about in manifest["files"].items()}
    for file, about in files.items():
        if not file.is_file():
            raise CheckpointError("the file is missing", where=str(file), fix=ADVICE)
        if file.stat().st_size != about["size"]:
            sizes = f"{file.stat().st_size} bytes, {about['size']} were written"
            raise CheckpointError(f"the file is damaged: {sizes}", where=str(file), fix=ADVICE)
    with ThreadPoolExecutor(8) as pool:
        for (file, about), digest in zip(files.items(), pool.map(_sha256, files if hashes else ()), strict=False):
            if digest != about["sha256"]:
                raise CheckpointError("the file is damaged: its hash differs", where=str(file), fix=ADVICE)
