"""Sources are found, read exactly, and refused in one line."""

import pytest

from k3jax.data.text import CorpusError, read_documents


def test_a_folder_is_read_recursively_by_suffix_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a/z.py", "a/b/c.md", "skip.bin", ".git/x.py", "__pycache__/y.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    documents, notes = read_documents(str(tmp_path))
    assert [document.name for document in documents] == ["a/b/c.md", "a/z.py", "b.txt"]
    assert notes == []


def test_content_is_kept_byte_for_byte(tmp_path):
    data = b"\xef\xbb\xbfa\r\nb\rc\0\xf0\x9f\x98\x80\n"
    (tmp_path / "odd.txt").write_bytes(data)
    ((document,), _) = read_documents(str(tmp_path))
    assert document.data == data
    assert document.text.encode() == data
    assert document.size == len(data)


def test_a_file_of_any_suffix_and_a_glob_are_sources(tmp_path):
    (tmp_path / "one.jsonl").write_text("{}")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.jsonl").write_text("[]")
    assert [d.name for d in read_documents(str(tmp_path / "one.jsonl"))[0]] == ["one.jsonl"]
    found, _ = read_documents(str(tmp_path / "**" / "*.jsonl"))
    assert [document.name for document in found] == ["deep/two.jsonl", "one.jsonl"]


def test_undecodable_and_short_files_are_counted_once_each(tmp_path):
    (tmp_path / "good.txt").write_text("long enough")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "short.txt").write_text("x")
    (tmp_path / "empty.txt").write_text("")
    documents, notes = read_documents(str(tmp_path), min_document_bytes=5)
    assert [document.name for document in documents] == ["good.txt"]
    assert len(notes) == 2
    assert "1 files unreadable or not UTF-8, first latin.txt" in notes[0]
    assert "2 files shorter than min_document_bytes=5" in notes[1]


@pytest.mark.parametrize(
    ("source", "word"),
    [("missing", "does not exist"), ("empty", "holds no file"), ("*.nope", "matches no file")],
)
def test_a_missing_or_empty_source_ends_in_one_line(tmp_path, source, word):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=word) as error:
        read_documents(str(tmp_path / source))
    assert str(tmp_path / source) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_of_useless_files_says_why_each_was_left_out(tmp_path):
    (tmp_path / "latin.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(CorpusError, match="not UTF-8.*shorter than"):
        read_documents(str(tmp_path))
