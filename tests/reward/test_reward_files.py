"""Files that a user names: a link is followed; what may have no end is not read."""

import os
from pathlib import Path

import pytest
from omni_reward.files import MAX_TOKEN_BYTES, read_file, read_token


def test_a_token_may_stand_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    (tmp_path / "token").symlink_to(tmp_path / "secret")
    assert read_token(tmp_path / "token") == "s3cret"
    assert read_token(None) is read_token("") is None


def test_a_token_may_come_from_a_pipe_which_is_not_awaited(tmp_path: Path) -> None:
    read, write = os.pipe()  # as the shell makes one for <(command)
    os.write(write, b"s3cret\n")
    os.close(write)
    assert read_token(f"/dev/fd/{read}") == "s3cret"
    os.close(read)
    os.mkfifo(tmp_path / "pipe")  # without a writer
    with pytest.raises(ValueError, match=r"^token must be printable ASCII .*, at least one character"):
        read_token(tmp_path / "pipe")


def test_pipes_devices_and_large_files_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "link", tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match=r"must be a regular file$"):
            read_token(path)
    with pytest.raises(ValueError, match=r"pipe must be a regular file$"):
        read_file(tmp_path / "pipe", 3)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=f"large must have at most {MAX_TOKEN_BYTES} bytes"):
        read_token(tmp_path / "large")
    (tmp_path / "just").write_bytes(b"abc")
    assert read_file(tmp_path / "just", 3) == b"abc"
    with pytest.raises(OSError, match="No such file"):
        read_token(tmp_path / "none")


@pytest.mark.parametrize("data", [b"", b"two words", b"\xff\xfe"])
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "token").write_bytes(data)
    with pytest.raises(ValueError, match=r"^token must be printable ASCII .*; its value is not shown$"):
        read_token(tmp_path / "token")
