"""Sources are found, read exactly, and refused in one line."""

import sys

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
    (tmp_path / "one.cfg").write_text("{}")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "two.cfg").write_text("[]")
    assert [d.name for d in read_documents(str(tmp_path / "one.cfg"))[0]] == ["one.cfg"]
    found, _ = read_documents(str(tmp_path / "**" / "*.cfg"))
    assert [document.name for document in found] == ["deep/two.cfg", "one.cfg"]


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


@pytest.fixture
def tree(tmp_path):
    for name in ("a/x.txt", "a/deep/y.txt", "b/x.txt", "b/z.md", "c/one,two.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("**/x.txt", ["a/x.txt", "b/x.txt"]),
        ("{a,b}/*.txt", ["a/x.txt", "b/x.txt"]),
        ("{a/{deep,no},b}/*.{txt,md}", ["a/deep/y.txt", "b/x.txt", "b/z.md"]),
        ("a/**/*.txt", ["deep/y.txt", "x.txt"]),
        ("c/one,two.txt", ["one,two.txt"]),
    ],
)
def test_globs_with_braces_find_what_they_say(tree, pattern, names):
    # A comma that parts no patterns and no choices is %2C in a URL.
    url = pattern if "{" in pattern else pattern.replace(",", "%2C")
    for source in (f"{tree}/{pattern}", f"file://{tree}/{url}"):
        documents, _ = read_documents(source)
        assert [document.name for document in documents] == names


def test_several_patterns_give_their_union_once_each(tree):
    documents, _ = read_documents(f"{tree}/a/**/*.txt, {tree}/a/x.txt,{tree}/b/{{x.txt,z.md}}")
    assert [d.name for d in documents] == ["a/deep/y.txt", "a/x.txt", "b/x.txt", "b/z.md"]
    with pytest.raises(CorpusError, match=r"no/such.txt' does not exist") as error:
        read_documents(f"{tree}/a/x.txt,{tree}/no/such.txt")
    assert "data.source=" in str(error.value)


def test_a_url_is_opened_by_fsspec_or_refused_in_one_line(tree, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name in ("one.txt", "deep/two.txt"):
        memory.pipe(f"/bucket/{name}", name.encode())
    documents, _ = read_documents("memory://bucket/**/*.txt")
    assert [(d.name, d.data) for d in documents] == [
        ("deep/two.txt", b"deep/two.txt"),
        ("one.txt", b"one.txt"),
    ]
    assert [d.name for d in read_documents("memory://bucket/one.txt")[0]] == ["one.txt"]
    for url, word in (
        ("memory://bucket/*.nope", "matches no file"),
        ("nosuch://bucket/x.txt", "cannot be opened"),
        ("file://elsewhere/x.txt", "another machine"),
    ):
        with pytest.raises(CorpusError, match=word) as error:
            read_documents(url)
        assert url in str(error.value) and "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    for scheme in ("gs", "s3", "https"):
        with pytest.raises(CorpusError, match=f"{scheme}:// needs the package fsspec"):
            read_documents(f"{scheme}://bucket/x.txt")
