"""Prompts in the forms that users have them: other trainers' columns, tables, folders, and data sets of the hub."""

import csv
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import create_autospec

import huggingface_hub
import pytest
from httpx import ConnectError
from huggingface_hub.errors import LocalEntryNotFoundError
from omni_train import hub
from omni_train.files import file_digest, files_digest
from omni_train.prompts import files, splits
from omni_train.prompts.files import load_prompts
from omni_train.prompts.sampler import PromptSampler
from omni_train.prompts.splits import data_files, split_files

USER = [{"role": "user", "content": "a red cat"}]
PNG = b"\x89PNG\r\n\x1a\n\0"


class Rows:
    """What pyarrow reads, stood in for: rows that the file holds as JSON, bytes as hexadecimal digits."""

    def __init__(self, path, read_dictionary=()):
        self.rows = json.loads(path.read_text(), object_hook=lambda o: bytes.fromhex(o["hex"]) if "hex" in o else o)
        column = SimpleNamespace(
            num_values=1, total_uncompressed_size=9, path_in_schema="prompt", physical_type="INT32"
        )
        group = SimpleNamespace(num_columns=1, column=lambda i: column)
        self.metadata = SimpleNamespace(num_rows=len(self.rows), num_row_groups=1, row_group=lambda i: group)
        kinds = {key: "binary" if "b'" in repr(value) else "string" for key, value in self.rows[0].items()}
        self.schema_arrow = [SimpleNamespace(name=key, type=kind) for key, kind in kinds.items()]

    def iter_batches(self, batch_size, columns=None):
        rows = [{key: row[key] for key in (row if columns is None else columns)} for row in self.rows]
        yield SimpleNamespace(to_pylist=partial(list, rows), columns=[])


@pytest.fixture(autouse=True)
def parquet(monkeypatch, tmp_path):
    """Write rows as a parquet file: with pyarrow where it is installed, else for its stand-in, with all keys in all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        package = ModuleType("pyarrow")
        package.parquet, package.ArrowException = (
            SimpleNamespace(ParquetFile=Rows),
            type("ArrowError", (Exception,), {}),
        )
        monkeypatch.setitem(sys.modules, "pyarrow", package)

        def write(path, rows):
            keys = {key for row in rows for key in row}
            path.write_text(
                json.dumps(
                    [{key: row.get(key) for key in keys} for row in rows], default=lambda data: {"hex": data.hex()}
                )
            )
    else:

        def write(path, rows):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)

    return write


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def table(path, rows, **form):
    keys = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, keys, **form)
        writer.writeheader()
        writer.writerows(rows)


def write_all(path, rows, parquet):
    path.parent.mkdir(parents=True, exist_ok=True)
    tsv, csv_form = partial(table, delimiter="\t"), table
    {".parquet": parquet, ".jsonl": jsonl, ".csv": csv_form, ".tsv": tsv}[path.suffix](path, rows)
    return path


VERL = {
    "data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "a red cat"}], "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"}, "extra_info": {"index": 0, "split": "train"},
}  # fmt: skip
FORMS = {  # what a row is, the key that is named, and what meta has of it
    "verl": (VERL, "", {"reward_model": {"style": "rule", "ground_truth": "72"}, "data_source": "openai/gsm8k"}),
    "verl-omni": (VERL | {"negative_prompt": [{"role": "user", "content": "blur"}]}, "", {"ability": "math"}),
    "a chat of TRL": ({"prompt": USER, "solution": "72"}, "", {"solution": "72"}),
    "a text of TRL": ({"prompt": "a red cat", "ground_truth": "72"}, "", {"ground_truth": "72"}),
    "preferences of TRL": ({"prompt": USER, "chosen": [{"role": "assistant", "content": "a"}]}, "", {}),
    "messages": ({"messages": USER}, "", {}),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a red cat"}]}]}, "", {}),
    "parts of datasets": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a red cat", "image": None}]}]}, "", {},
    ),
    "another key": ({"caption": "a red cat", "prompt": "no"}, "caption", {"prompt": "no"}),
    "a chat of another key": ({"conversation": USER, "id": 3}, "conversation", {"id": 3}),
    "another key beside messages": ({"question": "a red cat", "messages": [{"role": "user", "content": "no"}]},
                                    "question", {"messages": None}),
    "nulls": ({"prompt": "a red cat", "negative_prompt": None, "images": None, "height": None, "width": None}, "", {}),
}  # fmt: skip


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_of_other_trainers_are_prompts_with_their_columns_as_meta(tmp_path, parquet, form, suffix):
    row, key, meta = FORMS[form]
    path = write_all(tmp_path / f"a{suffix}", [row], parquet)
    [record] = load_prompts(path, key=key)
    assert (record.text, record.index, record.images, record.size) == ("a red cat", 0, (), None)
    assert record.negative == ("blur" if form == "verl-omni" else "")
    assert {name: record.meta.get(name) for name in meta} == meta
    assert PromptSampler(path, prompts_per_step=1, seed=0, key=key).at(0) == [record]


def test_the_images_of_a_verl_row_are_bytes_and_its_parts_name_them(tmp_path, parquet):
    content = [{"type": "image"}, {"type": "text", "text": "make it night"}]
    row = {"prompt": [{"role": "user", "content": content}], "images": [{"bytes": PNG, "path": None}]}
    [record] = load_prompts(write_all(tmp_path / "a.parquet", [row], parquet))
    assert (record.text, record.images[0].read_bytes()) == ("make it night", PNG)


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_cells_are_texts_and_sizes_numbers(tmp_path, suffix, parquet):
    rows = [
        {"prompt": 'a sign "Open,\tnow"\nbelow', "images": "in/a.png", "height": "32", "width": "96", "answer": "007"},
        {"prompt": "b", "images": "", "height": "", "width": "", "answer": ""},
    ]
    first, second = load_prompts(write_all(tmp_path / f"a{suffix}", rows, parquet))
    assert (first.text, first.images, first.size) == (rows[0]["prompt"], (tmp_path / "in" / "a.png",), (32, 96))
    assert (first.meta["answer"], second.meta, second.size) == ("007", {}, None)


def test_a_table_of_a_spreadsheet_or_of_pandas_is_read(tmp_path):
    """A byte order mark, other ends of lines, blank lines, spaces in the header, and pandas' index without a name."""
    path = tmp_path / "a.csv"
    path.write_bytes('\ufeff, prompt,answer\r\n0,"a ""b""",1\r\n\r\n1,c,2\r\n'.encode())
    assert [(record.text, record.meta) for record in load_prompts(path)] == [
        ('a "b"', {"answer": "1"}),
        ("c", {"answer": "2"}),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a cat\na dog\n", r"row 2: must have the key .*, got the keys \['a cat'\]: --prompt-key names"),
        ("prompt;answer\na;b\n", r"row 2: must have the key .* got the keys \['prompt;answer'\]"),
        ("prompt,prompt\na,b\n", r"row 1: must name each column once, got \['prompt'\]"),
        ("prompt,answer\na\n", r"row 2: must have 2 cells, as the header .* has, got 1: \['a'\]"),
        ("prompt,answer\na,b,c\n", "row 2: must have 2 cells, .* got 3"),
        ('prompt\n"a\n', "line 2: no table of cells .*: unexpected end of data"),
        ('prompt\n"a"b\n', "line 2: no table of cells .*: ',' expected after '\"'"),
        ("prompt,height,width\na,32.0,64\n", "row 2: \"height\" and .* whole numbers .* got '32.0'"),
        ("prompt\n\"[{'role': 'user', 'content': 'a'}]\"\n", "row 2: \"prompt\" must be a chat or a text, got"),
        ("prompt\n", "path must hold at least one prompt, .* is empty"),
        ("", "path must hold at least one prompt, .* is empty"),
    ],
)  # fmt: skip
def test_a_malformed_table_is_named(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path / "a.csv")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r'must have the key "caption", as --prompt-key says, got the keys \[\'prompt\'\]$'),
        ({"caption": 3}, '"caption" must be a string, got int'),
        ({"caption": " "}, '"caption" must not be empty'),
        ({"caption": [{"role": "assistant", "content": "a"}]}, "the prompt must end with a message of the user"),
        ({"caption": "a", "negative_prompt": [*USER, *USER]}, '"negative_prompt" must be a string, or a chat of one'),
    ],
)
def test_the_key_that_was_named_is_told(tmp_path, row, message):
    jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(ValueError, match=f"a.jsonl, line 1: {message}"):
        load_prompts(tmp_path / "a.jsonl", key="caption")


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: data/*.csv}
  - {split: test, path: [held/a.csv]}
- config_name: more
  data_dir: more
---
"""
FOLDERS = {  # files, and the texts of the first prompts of each place
    "of shards": (["p-1.parquet", "p-0.parquet", "_SUCCESS", ".crc"], {"": ["p-0", "p-1"]}),
    "of datasets": (["data/train-00000-of-00002.csv", "data/train-00001-of-00002.csv", "data/b_2-00000-of-00001.csv"],
                    {"/train": ["train-00000-of-00002", "train-00001-of-00002"], "/data/b_2": ["b_2-00000-of-00001"]}),
    "of a conversion": (["default/train/0000.parquet", "default/test/0000.parquet"],
                        {"/train": ["0000"], "/default/test": ["0000"]}),
    "of two files": (["train.csv", "my-val_1.csv", "notes.csv"], {"/train": ["train"], "/val": ["my-val_1"]}),
    "of folders": (["en/a.jsonl", "de/a.jsonl"], {"/en": ["a"], "/de": ["a"]}),
    "of a card": (["README.md", "data/x.csv", "data/y.csv", "held/a.csv", "more/train.csv", "stray.csv"],
                  {"/main/train": ["x", "y"], "/test": ["a"], "/more": ["train"]}),
}  # fmt: skip


def build(folder, names, parquet):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in (".parquet", ".csv", ".jsonl"):
            write_all(path, [{"prompt": path.stem}], parquet)
        else:
            path.write_text(CARD)
    return folder


@pytest.fixture
def on_hub(tmp_path, monkeypatch):
    """A data set of the hub whose files are those of a folder, and its downloads; signatures are the library's."""
    monkeypatch.setattr(hub, "FETCHED", {})
    root = tmp_path / "hub" / "datasets--owner--name" / "snapshots" / "abc123"
    api, fetched = create_autospec(huggingface_hub.HfApi, instance=True), []

    def info(repo, revision, timeout):
        assert repo == "owner/name"
        names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file()]
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names], sha=root.name)

    def download(repo, filename, *, repo_type, revision, local_files_only=False):
        assert (repo, repo_type) == ("owner/name", "dataset")
        fetched.append((filename, revision, local_files_only))
        return str(root / filename)

    api.dataset_info.side_effect = info
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: api)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", create_autospec(huggingface_hub.hf_hub_download, side_effect=download)
    )
    snapshot = create_autospec(huggingface_hub.snapshot_download, side_effect=LocalEntryNotFoundError("not cached"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    return SimpleNamespace(root=root, api=api, fetched=fetched, snapshot=snapshot)


@pytest.mark.parametrize("where", ["disk", "hub"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_place_is_the_only_split_or_a_named_one(tmp_path, parquet, on_hub, kind, where):
    names, places = FOLDERS[kind]
    folder = build(on_hub.root if where == "hub" else tmp_path / "mine", names, parquet)
    base = "hf://datasets/owner/name" if where == "hub" else str(folder)
    for place, stems in places.items():
        assert [record.text for record in load_prompts(base + place)] == stems
    if len(places) > 1:
        with pytest.raises(ValueError, match=r"path must name one of the splits .*, got") as told:
            load_prompts(base)
        listed = str(told.value).split("splits ")[1].rpartition(", got")[0].split(", ")
        for place in listed:  # each is a place to give
            assert load_prompts(place)
        with pytest.raises(ValueError, match=f"path must (name one of the splits|end in) .* got {base}/nothing"):
            load_prompts(f"{base}/nothing")


def test_prompts_of_a_folder_name_files_beside_them_and_a_changed_file_changes_its_digest(tmp_path, parquet):
    folder = build(tmp_path / "mine", ["p-0.csv", "p-1.csv"], parquet)
    table(folder / "p-1.csv", [{"prompt": "b", "images": "b.png"}])
    assert load_prompts(folder)[1].images == (folder / "b.png",)
    first = files_digest(data_files(folder))
    table(folder / "p-1.csv", [{"prompt": "c", "images": "b.png"}])
    assert files_digest(data_files(folder)) != first
    (folder / "p-1.csv").unlink()
    assert files_digest(data_files(folder)) == file_digest(folder / "p-0.csv")


@pytest.mark.parametrize(
    ("names", "place", "message"),
    [
        (["train-00000-of-00002.parquet"], "", "a split must have all of its files, got 1 in .*/mine, as train-00000"),
        (["a.csv", "b.jsonl"], "", r"the files of a split must be of one kind, got \.csv, \.jsonl in"),
        (["x/train/a.csv", "x/b/train_2.csv"], "/train", "one of the splits .*/mine/x/b/train, .*/mine/x/train"),
        (["data-00000-of-00001.arrow"], "", "found none in .*/mine; Dataset.to_parquet writes one of the .arrow files"),
        (["a.bin"], "", r"files of \.parquet, \.jsonl, \.csv or \.tsv, found none in .*/mine$"),
        (["a.csv"], "/nothing", r"path must end in .*, or be a folder or a data set of such files, got .*/mine/nothing|"
                                "path must name one of the splits"),
        (["a.csv"], "/gone.csv", "path must be a file that can be read, got .*gone.csv: No such file"),
        (["a.csv"], "/gone.json", r"path must end in \.txt, .* got .*gone\.json"),
    ],
)  # fmt: skip
def test_a_folder_that_is_no_split_says_why(tmp_path, parquet, names, place, message):
    build(tmp_path / "mine", names, parquet)
    with pytest.raises(ValueError, match=message):
        load_prompts(f"{tmp_path / 'mine'}{place}")


def test_a_split_of_the_hub_is_fetched_once_at_its_revision_and_pinned(on_hub, parquet):
    build(on_hub.root, ["README.md", "data/x.csv", "data/y.csv", "held/a.csv"], parquet)
    place = "hf://datasets/owner/name@v1/train"
    load_prompts(place)
    load_prompts(place)
    assert on_hub.fetched == [(name, "v1", False) for name in ("README.md", "data/x.csv", "data/y.csv")]
    assert hub.pin_revision(place, data_files(place)[0]) == "hf://datasets/owner/name@abc123/train"
    assert hub.pin_revision("hf://datasets/owner/name", data_files(place)[0]) == "hf://datasets/owner/name@abc123"
    load_prompts("hf://datasets/owner/name@~parquet/test")
    assert on_hub.fetched[-1] == ("held/a.csv", "refs/convert/parquet", False)


def test_all_files_of_a_split_are_of_the_commit_that_was_listed(tmp_path, on_hub, parquet):
    build(on_hub.root, ["train-00000-of-00002.csv", "train-00001-of-00002.csv"], parquet)
    moved = tmp_path / "hub" / "datasets--owner--name" / "snapshots" / "def456"
    build(moved, ["train-00001-of-00002.csv"], parquet)

    def download(repo, filename, *, repo_type, revision, local_files_only=False):
        is_moved = revision is None and filename.startswith("train-00001")
        return str((moved if is_moved else on_hub.root) / filename)

    huggingface_hub.hf_hub_download.side_effect = download
    assert {path.parent for path in data_files("hf://datasets/owner/name")} == {on_hub.root}


def test_a_part_of_a_split_in_the_cache_is_refused(on_hub, parquet):
    on_hub.api.dataset_info.side_effect = ConnectError("no connection")
    on_hub.snapshot.side_effect, on_hub.snapshot.return_value = None, str(on_hub.root)
    build(on_hub.root, ["README.md", "data/x.csv"], parquet)
    with pytest.raises(ValueError, match=r"a split must have all of its files.* has no held/a\.csv, which README.md"):
        load_prompts("hf://datasets/owner/name/test")
    assert load_prompts("hf://datasets/owner/name/train")[0].text == "x"


def test_without_a_network_the_files_of_the_cache_are_taken_and_told(on_hub, parquet, capfd):
    build(on_hub.root, ["data/train-00000-of-00001.parquet"], parquet)
    on_hub.api.dataset_info.side_effect = ConnectError("no connection")
    with pytest.raises(ValueError, match=r"no connection. Fetch it .*`hf download owner/name --repo-type dataset`"):
        load_prompts("hf://datasets/owner/name")
    on_hub.snapshot.side_effect = None
    on_hub.snapshot.return_value = str(on_hub.root)
    assert len(load_prompts("hf://datasets/owner/name")) == 1
    assert on_hub.fetched == [("data/train-00000-of-00001.parquet", None, True)]
    assert capfd.readouterr().out == (
        "hf://datasets/owner/name: the hub did not answer, no connection; taken from its cache at abc123: "
        "data/train-00000-of-00001.parquet\n"
    )


def test_a_data_set_with_a_script_is_refused_and_its_script_not_fetched(on_hub, parquet):
    build(on_hub.root, ["name.py", "train.csv"], parquet)
    with pytest.raises(ValueError, match=r"whose name\.py is a script, never run: give one of its files by name, or"):
        load_prompts("hf://datasets/owner/name")
    assert on_hub.fetched == []
    assert load_prompts("hf://datasets/owner/name/train.csv")[0].text == "train"


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ("[1]", "configs must be a list of objects, got 1"),
        ("[{data_files: 3}]", "data_files must be a path, a list, or a list of splits with paths, got 3"),
        ("[{data_files: [{split: train, path: [1]}]}]", "data_files must be a path"),
        ("[{config_name: 1}]", "config_name must be a text, got 1"),
        ("[{data_dir: [a]}]", r"data_dir must be a text, got \['a'\]"),
        ("{", "README.md must have YAML at its head that can be read"),
        (
            "[&a {data_files: a.csv}, *a]",
            "README.md must have YAML .* has the alias .a, which must be written out",
        ),
    ],
)
def test_a_damaged_card_is_told(tmp_path, parquet, configs, message):
    folder = build(tmp_path / "mine", ["a.csv"], parquet)
    (folder / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
    with pytest.raises(ValueError, match=message):
        load_prompts(folder)


class Unshown:
    """A part of a card that is never shown whole."""

    def __str__(self):
        raise AssertionError

    __repr__ = __str__


@pytest.mark.parametrize(
    "config",
    [[0] * 9 + [Unshown()], {"config_name": [0] * 9 + [Unshown()]}, {"data_files": {"a": [0] * 9 + [Unshown()]}}],
)
def test_the_message_on_a_card_shows_only_the_beginning_of_a_large_value(config):
    with pytest.raises(ValueError, match=r"README\.md: .* must be .*, got .*0, 0"):
        split_files(["a.csv"], {"configs": [config]}, "", "mine")


def test_only_tables_of_a_folder_are_counted_and_looked_at(tmp_path, parquet, monkeypatch):
    monkeypatch.setattr(splits, "MAX_NAMES", 2)
    folder = build(tmp_path / "mine", ["a.csv"], parquet)
    for i in range(9):
        (folder / f"{i}.png").touch()
    looked, is_file = [], Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: looked.append(path.name) or is_file(path))
    assert [record.text for record in load_prompts(folder)] == ["a"]
    assert {*looked} == {"README.md", "a.csv"}
    build(folder, ["b.csv", "c.csv"], parquet)
    with pytest.raises(ValueError, match=r"path must be a folder with at most 2 files of prompts, got .*/mine$"):
        load_prompts(folder)


def test_a_mistyped_path_walks_only_the_folder_above_up_to_its_first_table(tmp_path, parquet, monkeypatch):
    build(tmp_path, ["other/a.csv"], parquet)
    (tmp_path / "me").mkdir()
    walked, walk = [], os.walk
    monkeypatch.setattr(os, "walk", lambda folder: walked.append(folder) or walk(folder))
    with pytest.raises(ValueError, match=r"path must end in .* got .*/me/typo$"):
        load_prompts(tmp_path / "me" / "typo")
    assert walked == [tmp_path / "me"]


def test_a_pattern_of_a_card_names_no_file_outside(tmp_path, parquet):
    build(tmp_path, ["secret.csv"], parquet)
    folder = build(tmp_path / "mine", ["a.csv"], parquet)
    (folder / "README.md").write_text("---\nconfigs: [{config_name: a, data_files: ['../*.csv', '**/a.csv']}]\n---\n")
    assert [record.text for record in load_prompts(folder)] == ["a"]


def test_many_small_files_that_unpack_to_large_ones_are_bounded(tmp_path, monkeypatch, parquet):
    monkeypatch.setattr(files, "MIN_TOTAL_BYTES", 100)
    monkeypatch.setattr(files, "MAX_UNPACKED", 0)
    for i in range(2):
        write_all(tmp_path / "mine" / f"{i}.parquet", [{"prompt": "a" * 40}], parquet)
    with pytest.raises(ValueError, match=r"1\.parquet, row 1: must have at most 100 characters with all before it"):
        load_prompts(tmp_path / "mine")


@pytest.mark.parametrize(
    ("key", "right"),
    [
        ("image", "images"), ("image_path", "images"), ("source_img", "images"), ("edit_image", "images"),
        ("audio_path", "audio"), ("audios", "audio"), ("videos", "video"), ("video_path", "video"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("value", ["a.bin", ["a.bin"], [{"image": "a.bin"}]])
def test_a_medium_under_another_projects_key_is_an_error_that_names_the_right_one(tmp_path, key, right, value):
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "a", key: value}])
    with pytest.raises(
        ValueError, match=f'a.jsonl, line 2: "{key}" must be called "{right}", as nothing reads it, got'
    ):
        load_prompts(tmp_path / "a.jsonl")
    jsonl(tmp_path / "a.jsonl", [{"prompt": "a", key: value, right: "b.bin"}, {"prompt": "a", key: None}])
    assert load_prompts(tmp_path / "a.jsonl")[0].meta[key] == value  # of a scorer, beside the one that is read


@pytest.mark.parametrize(
    "place", ["<image>", "<IMAGE>", "<image1>", "<|image_1|>", "<|image_pad|>", "<img>", "<audio>", "<video>"]
)
def test_a_placeholder_as_text_beside_a_medium_is_an_error(tmp_path, place):
    text = f"{place}\nWhat is this?"
    part = {"type": "image", "image": "a.png"}
    lines = [
        {"prompt": text, "images": "a.png"},
        {"prompt": text, "audio": "a.wav"},
        {"prompt": [{"role": "user", "content": text}], "images": ["a.png"]},  # as verl has it
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": text}]}]},
    ]
    for line in lines:
        jsonl(tmp_path / "a.jsonl", [line])
        with pytest.raises(
            ValueError, match=rf"line 1: the text must not hold {re.escape(place)}, which no model here"
        ):
            load_prompts(tmp_path / "a.jsonl")
    jsonl(tmp_path / "a.jsonl", [{"prompt": f"an HTML page with {place}"}])
    assert load_prompts(tmp_path / "a.jsonl")


def test_other_angles_beside_a_medium_are_text(tmp_path):
    jsonl(tmp_path / "a.jsonl", [{"prompt": "answer in <answer></answer>, 1 < 2 > images", "images": "a.png"}])
    assert load_prompts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".csv"])
def test_a_pointer_of_git_lfs_in_place_of_prompts_is_told_as_one(tmp_path, suffix):
    path = tmp_path / f"train{suffix}"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(
        ValueError, match=rf"{path} must be the file itself, got its pointer of Git LFS: `git lfs pull`"
    ):
        load_prompts(path)
