"""Files and folders are old or new, never half; what is damaged is named."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, get_native_id

import omni_train.files
import pytest
from helpers import names
from omni_train.files import (
    MAX_DEPTH,
    file_digest,
    load_metrics,
    new_folder,
    open_regular,
    parse_json,
    probe_digest,
    read_jsonl,
    read_linked,
    read_regular,
    write_atomically,
    write_folder_atomically,
)


def full_disk(*_):
    raise OSError(28, "No space left on device")


def test_a_file_is_replaced_with_nothing_left_beside_it(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, b"old")
    write_atomically(path, "n\u00ebw")
    assert path.read_text("utf-8") == "n\u00ebw"
    assert names(tmp_path) == ["a.json"]


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path, monkeypatch, call):
    write_atomically(path := tmp_path / "a.json", "old")
    monkeypatch.setattr(call, full_disk)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


def test_threads_that_write_one_file_at_once_do_not_mix(tmp_path, monkeypatch):
    write, both = omni_train.files.write_file, Barrier(2)

    def write_together(path, *parts):
        both.wait(10)
        return write(path, *parts)

    monkeypatch.setattr("omni_train.files.write_file", write_together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda data: write_atomically(tmp_path / "a.json", data), ["one", "other"]))
    assert (tmp_path / "a.json").read_text() in ("one", "other")
    assert names(tmp_path) == ["a.json"]


def test_content_reaches_the_disk_before_its_name_does(tmp_path, monkeypatch):
    events, fsync, replace, rename = [], os.fsync, type(tmp_path).replace, type(tmp_path).rename

    def note(what, path):
        events.append((what, os.path.basename(path)))

    monkeypatch.setattr("os.fsync", lambda n: (note("sync", os.readlink(f"/proc/self/fd/{n}")), fsync(n)))
    monkeypatch.setattr("pathlib.Path.replace", lambda a, b: (note("name", b), replace(a, b)))
    monkeypatch.setattr("pathlib.Path.rename", lambda a, b: (note("name", b), rename(a, b)))
    write_atomically(tmp_path / "a", "x")
    assert events == [("sync", f".a.{get_native_id()}"), ("name", "a"), ("sync", tmp_path.name)]
    events.clear()
    with new_folder(tmp_path / "f") as folder:
        (folder / "b").write_text("x")
    assert events == [("sync", "b"), ("sync", "f.tmp"), ("name", "f"), ("sync", tmp_path.name)]


def test_a_folder_is_replaced_whole_and_its_files_have_the_rights_of_the_umask(tmp_path):
    folder = tmp_path / "made" / "f"
    write_folder_atomically(folder, {"a": b"1", "b": "2"})
    assert (folder / "b").read_text() == "2"
    before = os.umask(0o027)
    try:
        with new_folder(folder) as temporary:
            (temporary / "weights").touch(mode=0o600)
    finally:
        os.umask(before)
    assert names(folder) == ["weights"]
    assert stat.S_IMODE((folder / "weights").stat().st_mode) == 0o640
    assert names(folder.parent) == ["f"]


@pytest.mark.parametrize("fail_at", [1, 2])
def test_a_folder_that_cannot_be_replaced_stays_as_it_was(tmp_path, monkeypatch, fail_at):
    folder, calls, rename = tmp_path / "f", [], type(tmp_path).rename
    write_folder_atomically(folder, {"a": "old"})

    def fails(path, target):
        calls.append(target)
        return full_disk() if len(calls) == fail_at else rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.rename", fails)
        with pytest.raises(OSError, match="No space"):
            write_folder_atomically(folder, {"a": "new"})
    assert (folder / "a").read_text() == "old"
    assert names(tmp_path) == ["f"]


def test_a_crash_between_the_two_renames_loses_nothing(tmp_path):
    write_folder_atomically(tmp_path / "f.old", {"a": "old"})
    with pytest.raises(OSError, match="No space"), new_folder(tmp_path / "f"):
        full_disk()
    assert (tmp_path / "f" / "a").read_text() == "old"


def test_a_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": "\xc3\xbc"}\n{"a": 3')
    assert read_jsonl(path) == [{"a": 1}, {"a": "\u00fc"}]
    path.write_bytes(b'{"a": 1}\n\0\0\0\0')  # as some file systems leave it after a power cut
    assert read_jsonl(path) == [{"a": 1}]
    path.write_bytes(b"")
    assert read_jsonl(path) == []


@pytest.mark.parametrize("line", [b"", b"{", b"\0\0", b"\xff", b"[]", b"[" * 100_000, b"1" * 5000])
def test_a_damaged_line_is_named_with_the_file_and_the_remedy(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + line + b'\n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*Delete the line, or move the file away$"):
        read_jsonl(path)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_is_nested_only_so_deep(opening):
    closing = {"[": "]", '{"a":': "}"}[opening]
    for inner, most in (("1", MAX_DEPTH), ("[]", MAX_DEPTH - 1)):
        parse_json(opening * most + inner + closing * most)
        for depth in (most + 1, 900, 100_000):
            with pytest.raises(ValueError, match=f"must be nested at most {MAX_DEPTH} deep"):
                parse_json(opening * depth + inner + closing * depth)
    assert len(parse_json(b"[" + b",".join([b"[]"] * 10 * MAX_DEPTH) + b"]")) == 10 * MAX_DEPTH


def test_a_file_behind_a_link_is_read_where_links_may_be_and_no_pipe_is(tmp_path):
    (tmp_path / "blob").write_bytes(b"abc")
    (tmp_path / "name").symlink_to("blob")
    assert read_linked(tmp_path / "name", 3) == b"abc"
    with pytest.raises(ValueError, match="must have at most 2 bytes, got 3"):
        read_linked(tmp_path / "name", 2)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ValueError, match="must be a regular file"):
            read_linked(tmp_path / name, 3)


def test_a_pipe_is_no_pointer_of_git_lfs_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    omni_train.files.check_fetched(tmp_path / "pipe")


def test_digests_change_with_the_content(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    assert file_digest(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # FIPS 180-2, B.1
    large = bytearray(300_000)
    path.write_bytes(large)
    seen = {probe_digest([path])}
    for start in (0, 1000, 150_000, 299_000):  # a run of bytes longer than the gaps between blocks
        path.write_bytes(large[:start] + b"\1" * 1000 + large[start + 1000 :])
        seen.add(probe_digest([path]))
    path.write_bytes(large + b"\0")
    seen.add(probe_digest([path]))
    assert len(seen) == 6
    assert probe_digest([path, path]) != probe_digest([path]) == probe_digest([path])


def make(path, kind):
    """What may lie where a file is looked for."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "huge":
        path.touch()
        os.truncate(path, 2**40)  # with nothing in it
    elif kind == "link":
        path.with_name("other").write_text("{}\n")
        path.symlink_to(path.with_name("other"))
    else:
        path.mkdir()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("pipe", "a regular file and no link, hard or symbolic"),
        ("device", "a regular file and no link, hard or symbolic"),
        ("link", "a regular file and no link, hard or symbolic"),
        ("folder", "a regular file and no link, hard or symbolic"),
        ("huge", f"at most {2**30} bytes, got {2**40}"),
    ],
)
@pytest.mark.parametrize("read", [read_regular, read_jsonl, load_metrics])
def test_what_is_no_file_of_a_fair_size_is_refused_and_not_read(tmp_path, kind, told, read):
    make(tmp_path / "metrics.jsonl", kind)
    with pytest.raises(ValueError, match=rf"{tmp_path}/metrics\.jsonl must (be|have) {told}: move it away"):
        read(tmp_path / "metrics.jsonl")


def test_a_file_of_two_names_is_read_but_not_written_to(tmp_path):
    (tmp_path / "a").write_text("text")
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert read_regular(tmp_path / "b") == b"text"
    with pytest.raises(ValueError, match=r"/b must be a regular file and no link, hard or symbolic: move it away"):
        open_regular(tmp_path / "b", os.O_RDWR | os.O_APPEND)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "1" + "0" * 5000, "-9223372036854775809"])
def test_an_integer_of_more_than_64_bits_is_damage(tmp_path, number):
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"step": 2, "loss": {number}}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: not valid JSON \(.*\)\. Delete the line, or move"):
        load_metrics(tmp_path / "metrics.jsonl")
