"""Prompt files are checked before anything starts; batches are a pure function of (seed, step)."""

import itertools
import json
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crossrl import data
from crossrl.data import PromptCursor, load_prompts
from crossrl.errors import ConfigError, DataError
from crossrl.types import Prompt

LONG = "x" * 1_000_000


def jsonl(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return str(path)


def refused(source, **how):
    with pytest.raises(DataError) as caught:
        load_prompts(source, **how)
    return str(caught.value)


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("\ufeffa red circle\r\n\n  une étoile \n".encode())
    assert load_prompts(str(path)) == [Prompt("p/1", "a red circle"), Prompt("p/3", "une étoile")]


def test_ids_are_taken_from_the_file_or_made_from_file_and_row(tmp_path):
    rows = {"prompt": "a", "id": "x", "other": 3}, {"prompt": "b", "id": 7}, {"prompt": "c"}
    source = jsonl(tmp_path / "p.jsonl", *rows)
    assert [p.id for p in load_prompts(source)] == ["x", "7", "p/3"]
    source = parquet(tmp_path / "q.parquet", prompt=["a", "b"], id=pa.array([1, 2], pa.int32()))
    assert [(p.id, p.text) for p in load_prompts(source)] == [("1", "a"), ("2", "b")]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), None])
def test_every_kind_of_parquet_text_is_read(tmp_path, kind):
    values = pa.array(["a", "ü"]).cast(kind) if kind else pa.array(["a", "ü"]).dictionary_encode()
    assert [p.text for p in load_prompts(parquet(tmp_path / "p.parquet", prompt=values))] == ["a", "ü"]


def bad_jsonl(tmp_path):
    rows = [
        {"prompt": "good"}, {"prompt": None}, {"prompt": "  "}, {"prompt": 3}, {"text": "x"}, {"prompt": LONG},
        '{"prompt": "cut', "[1]", {"prompt": "a", "id": "same"}, {"prompt": "b", "id": "same"},
        {"prompt": "c", "id": [1]}, '{"prompt": "\\ud800"}', {"prompt": "c", "id": True},
    ]  # fmt: skip
    return jsonl(tmp_path / "bad.jsonl", *rows)


def test_all_problems_of_a_file_are_in_one_error_with_row_and_column(tmp_path):
    text = refused(bad_jsonl(tmp_path))
    for words in (
        "bad.jsonl: 11 bad rows",
        "row 2, column 'prompt': null",
        "row 3, column 'prompt': empty",
        "row 4, column 'prompt': a int, not text",
        "row 5, column 'prompt': missing",
        "row 6, column 'prompt': 1,000,000 characters, the limit is 10,000",
        "row 7, not JSON",
        "row 8, a list",
        "row 10, column 'id': 'same' is that of row 9 too",
        "row 11, column 'id'",
        "row 12, column 'prompt': half a surrogate",
        "row 13, column 'id': True",
        "data.bad_rows=skip",
    ):
        assert words in text
    assert len(text) < 3000


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path, caplog):
    assert [p.text for p in load_prompts(bad_jsonl(tmp_path), "skip")] == ["good", "a"]
    assert "skipped 11 of 13 rows" in caplog.text and "row 2, column 'prompt': null" in caplog.text


def test_a_parquet_row_that_is_null_long_not_utf8_or_double_is_named(tmp_path):
    values = unchecked_strings(b"fine", b"", LONG.encode(), b"\xff\xfe bad", b"x")
    text = refused(parquet(tmp_path / "p.parquet", prompt=values, id=["a", "b", "c", "d", "a"]))
    assert "row 2, column 'prompt': empty" in text and "row 3, column 'prompt': 1,000,000" in text
    assert "row 4, column 'prompt': not UTF-8" in text and "row 5, column 'id': 'a' is that of row 1" in text
    text = refused(parquet(tmp_path / "q.parquet", prompt=pa.array([None], pa.string())))
    assert "row 1, column 'prompt': null" in text


def unchecked_strings(*values):
    """A string column whose bytes nobody checked, as careless writers make them."""
    offsets = [0, *itertools.accumulate(map(len, values))]
    return pa.StringArray.from_buffers(
        len(values), pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))
    )


def test_a_text_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"fine\n\xff\n")
    assert "row 2, column 'prompt': not UTF-8" in refused(str(tmp_path / "p.txt"))
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    assert "row 2, not UTF-8" in refused(str(tmp_path / "p.jsonl"))


@pytest.mark.parametrize("bad_rows", ["stop", "skip"])
def test_a_file_that_is_no_good_as_a_whole_always_stops(tmp_path, bad_rows):
    whole = parquet(tmp_path / "p.parquet", prompt=["a"] * 5000)
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "p.parquet").read_bytes()[:-40])
    (tmp_path / "noise.parquet").write_bytes(b"not parquet at all")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder.txt").mkdir()
    cases = {
        "cut.parquet": "unreadable or cut off",
        "noise.parquet": "unreadable or cut off",
        "absent.txt": "no such file",
        "folder.txt": "not a file",
        "empty.txt": "no usable prompt",
        "p.csv": "neither",
    }
    for name, words in cases.items():
        text = refused(str(tmp_path / name), bad_rows=bad_rows)
        assert words in text and name in text
    text = refused(parquet(tmp_path / "text.parquet", text=["a"]), bad_rows=bad_rows)
    assert "no column 'prompt' among ['text']" in text
    text = refused(parquet(tmp_path / "list.parquet", prompt=[[{"role": "user"}]]), bad_rows=bad_rows)
    assert "column 'prompt' has type list" in text and "not text" in text
    text = refused(parquet(tmp_path / "id.parquet", prompt=["a"], id=[1.5]), bad_rows=bad_rows)
    assert "column 'id' has type double" in text
    assert len(load_prompts(whole, bad_rows)) == 5000


def test_a_parquet_page_that_is_damaged_stops(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": [f"prompt {i}" for i in range(3000)]}), path, compression="zstd")
    content = bytearray(path.read_bytes())
    content[200:400] = bytes(200)
    path.write_bytes(content)
    assert "p.parquet" in refused(str(path), bad_rows="skip")


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "wide.parquet"
    with pq.ParquetWriter(path, pa.schema({"prompt": pa.string(), "junk": pa.binary()})) as writer:
        for _ in range(40):
            columns = {"prompt": pa.array([None] * 1000, pa.string()), "junk": pa.array([b"j" * 5000] * 1000)}
            writer.write_table(pa.table(columns))
    code = (
        "import sys, resource; from crossrl.data import load_prompts; import pyarrow.parquet\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try: load_prompts(sys.argv[1])\n"
        "except ValueError as error: assert '40000 bad rows' in str(error), error\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "MiB for 200 MB of rows"


def test_a_data_source_is_asked_for_its_split_and_checked(monkeypatch):
    class Source:
        def prompts(self, split):
            return [Prompt(f"s/{split}/{i}", "text", {"colour": "red"}) for i in range(3)]

    monkeypatch.setattr(data, "select", lambda *asked: {("crossrl.data", "some"): Source()}[asked])
    assert [p.id for p in load_prompts("some:train")] == ["s/train/0", "s/train/1", "s/train/2"]
    assert load_prompts("some:train")[0].meta == {"colour": "red"}
    monkeypatch.setattr(Source, "prompts", lambda self, split: [Prompt("a", "x"), Prompt("a", "y")])
    assert "'a' is that of row 1 too" in refused("some:heldout")
    monkeypatch.setattr(Source, "prompts", lambda self, split: ["train"].index(split))
    assert "some:trian: 'trian' is not in list" in refused("some:trian")


def prompts(n):
    return [Prompt(f"p/{i}", f"text {i}") for i in range(n)]


def test_a_batch_depends_on_seed_and_step_alone():
    a, b = PromptCursor(prompts(20), 6, seed=1), PromptCursor(prompts(20), 6, seed=1)
    wanted = [a.batch_at(step) for step in range(9)]
    assert [b.batch_at(step) for step in reversed(range(9))] == wanted[::-1]
    assert PromptCursor(prompts(20), 6, seed=2).batch_at(0) != wanted[0]


def test_the_order_never_changes_between_versions():
    ids = [p.id for p in PromptCursor(prompts(10), 5, seed=0).batch_at(3)]
    assert ids == ["p/8", "p/1", "p/9", "p/3", "p/7"]


def test_no_prompt_comes_twice_in_a_batch_or_in_an_epoch():
    cursor = PromptCursor(prompts(22), 5, seed=3)
    seen = set()
    for epoch in range(10):
        epoch_ids = [p.id for step in range(4) for p in cursor.batch_at(epoch * 4 + step)]
        assert max(Counter(epoch_ids).values()) == 1
        seen |= set(epoch_ids)
    assert len(seen) == 22, "the two left over are not always the same"


def test_too_few_prompts_for_a_batch_are_refused():
    with pytest.raises(ConfigError, match="3 prompts cannot fill a batch of 4"):
        PromptCursor(prompts(3), 4, seed=0)
    assert {p.id for p in PromptCursor(prompts(4), 4, seed=0).batch_at(17)} == {"p/0", "p/1", "p/2", "p/3"}
