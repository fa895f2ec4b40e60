"""Prompts: read once, checked before anything starts, and drawn as a pure function of (seed, step)."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from crossrl.errors import ConfigError, DataError
from crossrl.registry import select
from crossrl.seeds import stream_seed
from crossrl.types import Prompt

log = logging.getLogger(__name__)

MAX_CHARACTERS = 10_000  # of a prompt
SHOWN = 20  # problems named in one error

Row = tuple[int, dict[str, Any] | str]
"""(row number from 1, its columns or what is wrong with it as a whole)."""


def load_prompts(source: str, bad_rows: Literal["stop", "skip"] = "stop") -> list[Prompt]:
    """The prompts of `source`: `name:split` of a data plug-in, or a .txt, .jsonl or .parquet file.

    A text file has a prompt a line; the others a column `prompt` and optionally `id`, without which a prompt is named
    by file and row. A bad row stops with one `DataError` that lists them all, or is left out and logged ("skip");
    a file that is missing, unreadable, cut off or without the column always stops.
    """
    if re.fullmatch(r"[\w-]+:[\w-]+", source):
        name, split = source.split(":")
        try:
            prompts = select("crossrl.data", name).prompts(split)
        except ValueError as error:
            raise DataError(str(error), where=source) from error
        rows = ((i, {"prompt": p.text, "id": p.id}) for i, p in enumerate(prompts, start=1))
        _checked(source, rows, "stop")
        return list(prompts)
    path = Path(source).expanduser()
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(
            f"{source!r} is neither <data source>:<split> nor a file that ends in {', '.join(_READERS)}", where="data"
        )
    if not path.is_file():
        raise DataError("no such file" if not path.exists() else "is not a file", where=str(path))
    try:
        return _checked(str(path), reader(path), bad_rows)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error


def _checked(where: str, rows: Iterator[Row], bad_rows: str) -> list[Prompt]:
    prompts: list[Prompt] = []
    first_seen: dict[str, int] = {}
    problems: list[str] = []
    bad = 0
    for row, found in rows:
        if isinstance(found, dict) and found.get("id") is None:
            found = {**found, "id": f"{Path(where).stem}/{row}"}
        problem = found if isinstance(found, str) else _problem(found, row, first_seen)
        if problem is None:
            prompts.append(Prompt(str(found["id"]), found["prompt"]))
            continue
        bad += 1
        if bad <= SHOWN:
            problems.append(f"row {row}, {problem}")
    text = "; ".join(problems) + (f"; and {bad - SHOWN} more" if bad > SHOWN else "")
    if bad and bad_rows == "stop":
        raise DataError(f"{bad} bad rows: {text}", where=where, fix="correct them, or set data.bad_rows=skip")
    if bad:
        log.warning("%s: skipped %d of %d rows: %s", where, bad, bad + len(prompts), text)
    if not prompts:
        raise DataError(f"no usable prompt; {text or 'it is empty'}", where=where)
    return prompts


def _problem(columns: dict[str, Any], row: int, first_seen: dict[str, int]) -> str | None:
    """What is wrong with a row, led by its column; notes its id."""
    text, name = columns.get("prompt"), columns["id"]
    if text is None:
        return "column 'prompt': " + ("null" if "prompt" in columns else "missing")
    if not isinstance(text, str):
        return f"column 'prompt': {'not UTF-8' if isinstance(text, bytes) else f'a {type(text).__name__}, not text'}"
    if not text.strip():
        return "column 'prompt': empty"
    if len(text) > MAX_CHARACTERS:
        return f"column 'prompt': {len(text):,} characters, the limit is {MAX_CHARACTERS:,}"
    if re.search("[\ud800-\udfff]", text):
        return "column 'prompt': half a surrogate pair, not valid Unicode"
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        return f"column 'id': {name!r:.40} is neither text nor a whole number"
    first = first_seen.setdefault(str(name), row)
    return None if first == row else f"column 'id': {str(name)[:40]!r} is that of row {first} too"


def _decoded(value: bytes | None) -> str | bytes | None:
    """Text, or the bytes themselves where they are not UTF-8."""
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _txt(path: Path) -> Iterator[Row]:
    """A prompt a line; blank lines are no rows but count as lines."""
    with open(path, "rb") as file:
        for row, line in enumerate(file, start=1):
            text = _decoded((line.removeprefix(b"\xef\xbb\xbf") if row == 1 else line).strip())
            if text:
                yield row, {"prompt": text}


def _jsonl(path: Path) -> Iterator[Row]:
    for row, columns in _txt(path):
        text = columns["prompt"]
        if isinstance(text, bytes):
            yield row, "not UTF-8"
            continue
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            yield row, f"not JSON: {error}"
            continue
        yield row, found if isinstance(found, dict) else f"a {type(found).__name__}, not a JSON object"


def _parquet(path: Path) -> Iterator[Row]:
    """Row batches, text as bytes: Arrow does not check UTF-8 itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = _parquet_columns(path, file.schema_arrow)
            for batch in file.iter_batches(batch_size=1024, columns=columns):
                values = [_parquet_values(batch.column(name)) for name in columns]
                for cells in zip(*values, strict=True):
                    row += 1
                    yield row, dict(zip(columns, cells, strict=True))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"unreadable or cut off after row {row}: {error}", where=str(path)) from error


def _parquet_columns(path: Path, schema: Any) -> list[str]:
    import pyarrow.types as kinds

    for name in ("prompt", "id"):
        places = schema.get_all_field_indices(name)
        if len(places) > 1 or (not places and name == "prompt"):
            text = f"column {name!r} is there twice" if places else f"no column 'prompt' among {schema.names}"
            raise DataError(text, where=str(path))
        kind = schema.field(places[0]).type if places else None
        kind = kind.value_type if kind is not None and kinds.is_dictionary(kind) else kind
        text = (kinds.is_string, kinds.is_large_string, kinds.is_string_view, kinds.is_binary, kinds.is_large_binary)
        fits = kind is None or any(is_text(kind) for is_text in text) or (name == "id" and kinds.is_integer(kind))
        if not fits:
            raise DataError(f"column {name!r} has type {kind}, not text", where=str(path))
    return [name for name in ("prompt", "id") if name in schema.names]


def _parquet_values(column: Any) -> list[Any]:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_integer(column.type):
        return column.to_pylist()
    return [_decoded(value) for value in column.cast(pa.large_binary()).to_pylist()]


_READERS = {".txt": _txt, ".jsonl": _jsonl, ".parquet": _parquet}


class PromptCursor:
    """Shuffled epochs without replacement; the batch of a step depends on (seed, step) alone.

    An epoch has len(prompts) // batch steps. The prompts left over are others in every epoch.
    """

    def __init__(self, prompts: Sequence[Prompt], batch: int, seed: int) -> None:
        if len(prompts) < batch:
            raise ConfigError(
                f"{len(prompts)} prompts cannot fill a batch of {batch} different ones",
                where="batch.prompts",
                fix=f"set batch.prompts to {len(prompts)} or less, or give more prompts",
            )
        self.prompts, self.batch, self.seed = tuple(prompts), batch, seed

    def batch_at(self, step: int) -> tuple[Prompt, ...]:
        """The prompts of a step, all different."""
        epoch, place = divmod(step, len(self.prompts) // self.batch)
        digest = hashlib.blake2b(f"prompts/{self.seed}/{epoch}".encode(), digest_size=16).digest()
        bits = np.random.Philox(key=int.from_bytes(digest, "big")).random_raw(len(self.prompts))
        # not Generator.permutation: its stream may change between numpy versions, the raw bits do not
        order = np.argsort(bits, kind="stable")
        return tuple(self.prompts[i] for i in order[place * self.batch : (place + 1) * self.batch])

    def further(self, step: int, taken: Sequence[Prompt], count: int, multiple: int) -> tuple[Prompt, ...]:
        """At least `count` prompts that are not among `taken`, or as many as there are, a `multiple` in number.

        A function of (seed, step, taken).
        """
        left = [p for p in self.prompts if p not in set(taken)]
        rng = np.random.default_rng(stream_seed(self.seed, step, "further", *sorted(p.id for p in taken)))
        count = min(-(-count // multiple), len(left) // multiple) * multiple
        return tuple(left[i] for i in rng.permutation(len(left))[:count])
