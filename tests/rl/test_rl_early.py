"""Mistakes that a model's files tell before torch is imported: of any content, they end in one line or in none."""

import os

import pytest
from omni_rl.settings import early

ODD = [b"", b"[]", b"{", b"3", b"[" * 100_000, b'{"architectures": []}', b'{"a_tokenizer": []}', b"\xff", b'"x"']


@pytest.mark.parametrize("content", ODD)
def test_a_damaged_index_is_left_to_what_opens_the_model(tmp_path, content):
    for name in ("model_index.json", "config.json"):
        (tmp_path / name).write_bytes(content)
    early.check_model(str(tmp_path))
    early.check_sides(str(tmp_path), 31, 31)


def test_a_pipe_or_a_huge_file_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    with (tmp_path / "model_index.json").open("wb") as file:
        file.truncate(2**40)
    early.check_model(str(tmp_path))
    assert early.read_model_class(tmp_path) == ""
