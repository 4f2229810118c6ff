"""Prompts and seeds are functions of the step."""

import hashlib
import json
import os
import shutil
import sys
from functools import partial
from itertools import chain
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_train.prompts import sampler as prompt_sampler
from omni_train.prompts import table
from omni_train.prompts.chats import answer_text
from omni_train.prompts.files import PromptRecord, load_prompts
from omni_train.prompts.sampler import PromptSampler, sample_seed


def write(folder, name, *lines):
    path = folder / name
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.fixture
def prompts(tmp_path):
    """Write a file of `num` prompts and return its path."""
    return lambda num: write(tmp_path, f"{num}.txt", *(f"prompt {i}" for i in range(num)))


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("prompts")


@settings(max_examples=40, deadline=None)
@given(num=st.integers(1, 24), data=st.data(), seed=st.integers(-(2**63), 2**63 - 1))
def test_steps_repeat_nothing_and_epochs_use_everything_once(shared_folder, num, data, seed):
    per_step = data.draw(st.integers(1, num))
    path = write(shared_folder, "drawn.txt", *(f"prompt {i}" for i in range(num)))
    sampler = PromptSampler(path, prompts_per_step=per_step, seed=seed)
    steps = [[record.index for record in sampler.at(step)] for step in range(2 * num)]
    assert all(len(set(step)) == per_step for step in steps)
    flat = list(chain.from_iterable(steps))
    for start in range(0, len(flat) - num + 1, num):
        assert sorted(flat[start : start + num]) == list(range(num))


@settings(max_examples=30, deadline=None)
@given(num=st.integers(1, 24), data=st.data(), step=st.integers(0, 10**9))
def test_a_step_needs_no_earlier_step(shared_folder, num, data, step):
    per_step = data.draw(st.integers(1, num))
    path = write(shared_folder, "drawn.txt", *(f"prompt {i}" for i in range(num)))
    sampler = PromptSampler(path, prompts_per_step=per_step, seed=7)
    sampler.at(step + 1)
    assert sampler.at(step) == PromptSampler(path, prompts_per_step=per_step, seed=7).at(step)


def test_the_order_of_an_epoch_is_that_of_hashes(prompts):
    def digest(epoch, i):
        data = b"".join(number.to_bytes(8, "little", signed=True) for number in (7, epoch, i))
        return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % 2**63

    sampler = PromptSampler(prompts(50), prompts_per_step=50, seed=7)
    for epoch in range(3):
        assert [r.index for r in sampler.at(epoch)] == sorted(range(50), key=lambda i: digest(epoch, i))


def test_an_epoch_is_ordered_once_and_not_at_each_step(prompts, monkeypatch):
    num, calls = 1000, []
    sampler = PromptSampler(prompts(num), prompts_per_step=4, seed=2**40)
    hashed = prompt_sampler._hash
    monkeypatch.setattr(prompt_sampler, "_hash", lambda *numbers: (calls.append(numbers), hashed(*numbers))[1])
    for step in range(num // 4 + 1):  # the last one is of the next epoch
        assert len({record.index for record in sampler.at(step)}) == 4
    assert len(calls) == 2 * num


def test_text_lines(tmp_path):
    path = write(tmp_path, "a.txt", "\ufeffa red cat ", "", "  a sign that says \u201cOpen\u201d")
    assert load_prompts(path) == [
        PromptRecord(index=0, text="a red cat"),
        PromptRecord(index=1, text="a sign that says \u201cOpen\u201d"),
    ]


def test_json_lines(tmp_path):
    path = write(
        tmp_path,
        "a.jsonl",
        json.dumps({"prompt": "a cat", "negative_prompt": "blur", "word": "cat", "tags": [1]}),
        json.dumps({"prompt": "a dog"}),
    )
    assert load_prompts(path) == [
        PromptRecord(index=0, text="a cat", negative="blur", meta={"word": "cat", "tags": [1]}),
        PromptRecord(index=1, text="a dog"),
    ]


def test_references_are_files_relative_to_the_prompts(tmp_path):
    """One path or a list of them; the scorer is told the names as they stand."""
    lines = [{"prompt": "a"}, {"prompt": "b", "images": "in/b.png"}, {"prompt": "c", "images": ["1.png", "in/2.png"]}]
    path = write(tmp_path, "a.jsonl", *map(json.dumps, lines))
    files = [(), (tmp_path / "in" / "b.png",), (tmp_path / "1.png", tmp_path / "in" / "2.png")]
    sampler = PromptSampler(path, prompts_per_step=3, seed=0)
    for records in (load_prompts(path), sorted(sampler.at(0), key=lambda record: record.index)):
        assert [record.images for record in records] == files
        assert [record.meta.get("images") for record in records] == [None, "in/b.png", ["1.png", "in/2.png"]]


@pytest.mark.parametrize("line", ['"images": ["a.png", NAME]', '"images": NAME', '"audio": NAME', '"video": NAME'])
@pytest.mark.parametrize("name", ["/etc/a.png", "../a.png", "in/../../a.png", "linked/a.png", "link.png"])
def test_prompts_name_no_file_outside_their_folder_but_below_the_media_root(tmp_path, line, name):
    outside, folder = tmp_path / "outside", tmp_path / "prompts"
    for path in (outside, folder / "in"):
        path.mkdir(parents=True)
    (outside / "a.png").touch()
    (folder / "linked").symlink_to(outside)
    (folder / "link.png").symlink_to(outside / "a.png")
    path = write(folder, "a.jsonl", '{"prompt": "x", LINE}'.replace("LINE", line.replace("NAME", json.dumps(name))))
    rule = f'a.jsonl, line 1: "{line.split(chr(34))[1]}" must name files in the folder of the prompts or below it'
    with pytest.raises(ValueError, match=f"{rule}, or below media_root, got '{name}'"):
        load_prompts(path)
    [record] = load_prompts(path, media_root="/")
    assert PromptSampler(path, prompts_per_step=1, seed=0, media_root="/").at(0) == [record]


def hub_snapshot(folder):
    """A snapshot of a data set in the hub's cache, whose files are links to blobs; a.png is one of them."""
    repository = folder / "hub" / "datasets--owner--name"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    for path in (snapshot / "in", blobs):
        path.mkdir(parents=True)
    (blobs / "89ef").touch()
    (snapshot / "in" / "a.png").symlink_to("../../../blobs/89ef")
    return snapshot


def test_prompts_in_the_cache_of_the_hub_name_files_that_are_links_to_blobs(tmp_path):
    snapshot = hub_snapshot(tmp_path)
    write(snapshot, "a.jsonl", '{"prompt": "x", "images": "in/a.png"}')
    [record] = load_prompts(snapshot / "a.jsonl")
    assert record.images[0].is_file()
    (tmp_path / "mine.jsonl").write_text(f'{{"prompt": "x", "images": "{snapshot / "in" / "a.png"}"}}')
    [record] = load_prompts(tmp_path / "mine.jsonl", media_root=snapshot)


def test_a_folder_that_is_named_as_the_cache_of_the_hub_leads_nowhere_else(tmp_path):
    snapshot, outside = hub_snapshot(tmp_path), tmp_path / "outside"
    outside.mkdir()
    blobs = snapshot.parents[1] / "blobs"
    shutil.rmtree(blobs)
    blobs.symlink_to(outside)
    (outside / "89ef").touch()
    write(snapshot, "a.jsonl", '{"prompt": "x", "images": "in/a.png"}')
    with pytest.raises(ValueError, match="must name files in the folder of the prompts or below it"):
        load_prompts(snapshot / "a.jsonl")


def test_prompts_may_be_linked_to_and_so_may_files_beside_them(tmp_path):
    (tmp_path / "real").mkdir()
    write(tmp_path / "real", "a.jsonl", '{"prompt": "x", "images": ["a.png", "b.png"]}')
    (tmp_path / "real" / "b.png").symlink_to("c.png")
    (tmp_path / "linked").symlink_to("real")
    [record] = load_prompts(tmp_path / "linked" / "a.jsonl")
    assert record.images == (tmp_path / "linked" / "a.png", tmp_path / "linked" / "b.png")


def test_a_line_may_say_the_size_of_its_picture(tmp_path):
    lines = [{"prompt": "a"}, {"prompt": "b", "height": 32, "width": 96}]
    path = write(tmp_path, "a.jsonl", *map(json.dumps, lines))
    sampler = PromptSampler(path, prompts_per_step=2, seed=0)
    for records in (load_prompts(path), sorted(sampler.at(0), key=lambda record: record.index)):
        assert [record.size for record in records] == [None, (32, 96)]
        assert records[1].meta == {"height": 32, "width": 96}


@pytest.mark.parametrize(
    ("height", "width"), [(32, None), (None, 32), (0, 32), (32, 3.5), (True, 1), ("32", 32), (8, 2**20)]
)
def test_a_size_that_is_half_said_or_no_number_of_pixels_is_refused(tmp_path, height, width):
    path = write(tmp_path, "a.jsonl", '{"prompt": "a"}', json.dumps({"prompt": "b", "height": height, "width": width}))
    rule = '"height" and "width" must both be whole numbers of pixels from 1 to 16384'
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {rule}, got {height!r} and {width!r}"):
        load_prompts(path)


def test_the_line_of_a_reference_that_cannot_be_used_is_named(tmp_path):
    """Blank lines count, and prompts without references are checked too."""
    path = write(tmp_path, "a.jsonl", '{"prompt": "a"}', "", '{"prompt": "b", "images": "b.png"}')
    seen = []

    def refuse(record):
        seen.append(record.images)
        if record.images:
            raise ValueError(f"{record.images[0].name} is broken")

    for load in (load_prompts, partial(PromptSampler, prompts_per_step=1, seed=0)):
        with pytest.raises(ValueError, match=r"a\.jsonl, line 3: b\.png is broken"):
            load(path, check=refuse)
    assert seen == [(), (tmp_path / "b.png",)] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cat", "images": 3}', 'line 3: "images" must be a path or a list of paths, got 3'),
        ('{"prompt": "cat", "images": ["a.png", null]}', 'line 3: "images" must be a path or a list of paths'),
        ("{prompt: cat}", "line 3: not valid JSON"),
        ('["cat"]', "line 3: must be a JSON object, got list"),
        ('{"text": "cat"}', r"line 3: must have the key \"prompt\" or \"messages\", got the keys \['text'\]"),
        ('{"prompt": 3}', 'line 3: "prompt" must be a string, got int'),
        ('{"prompt": "cat", "negative_prompt": 3}', 'line 3: "negative_prompt" must be a string, got int'),
        ('{"prompt": "cat", "size": NaN}', "line 3: not valid JSON: NaN is no JSON number"),
        ('{"prompt": " "}', 'line 3: "prompt" must not be empty'),
        ('{"prompt": "cat"} {"prompt": "dog"}', "line 3: not valid JSON: more than one value, the second at .* 18"),
        ('{"prompt": "cat", "size": 1e999}', "line 3: not valid JSON: 1e999 is no finite number"),
        (r'{"prompt": "cat \ud83d"}', r"line 3: must be Unicode, got '\\ud83d', half of a surrogate pair"),
        (r'{"prompt": "cat", "tags": [{"\uDC00": 1}]}', "line 3: must be Unicode, .* half of a surrogate pair"),
        (f'{{"prompt": "cat", "a": {"[" * 900}{"]" * 900}}}', "line 3: not valid JSON: must be nested at most 64 deep"),
        ('{"prompt": "cat", "a": ' + "[" * 60_000, "line 3: not valid JSON: maximum recursion depth"),
        ('{"prompt": "cat", "a": "' + "x" * 70_000 + '"}', "line 3: must have at most 65536 characters, got 70026"),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path, "a.jsonl", '{"prompt": "fine"}', "", line)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_an_emoji_may_be_a_pair_of_escapes(tmp_path):
    path = write(tmp_path, "a.jsonl", r'{"prompt": "\ud83d\ude00", "a": 1e308}')
    assert load_prompts(path) == [PromptRecord(0, "\U0001f600", meta={"a": 1e308})]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_may_end_as_on_any_system_and_nowhere_else(tmp_path, end):
    path = tmp_path / "a.txt"
    path.write_bytes(f"a\u2028b{end}{end}c\x0cd{end}".encode())
    assert [record.text for record in load_prompts(path)] == ["a\u2028b", "c\x0cd"]
    path.write_bytes(f"a{end}b{end}{'x' * 70_000}".encode())
    with pytest.raises(ValueError, match=r"a\.txt, line 3: must have at most 65536 characters"):
        load_prompts(path)


def test_files_that_cannot_serve_are_errors(tmp_path, prompts):
    with pytest.raises(ValueError, match="is empty"):
        load_prompts(write(tmp_path, "none.txt", "", " "))
    with pytest.raises(ValueError, match=r"path must be a file that can be read, got .*gone\.txt: No such file"):
        load_prompts(tmp_path / "gone.txt")
    (tmp_path / "latin.txt").write_bytes(b"a cat\na caf\xe9\n")
    with pytest.raises(ValueError, match=r"latin\.txt, line 2: must be UTF-8, got the byte 0xe9"):
        load_prompts(tmp_path / "latin.txt")
    with pytest.raises(ValueError, match=r"must end in \.txt, \.parquet, \.jsonl, \.csv or \.tsv, or be a folder or a"):
        load_prompts(write(tmp_path, "a.json", "cat"))
    for per_step in (0, 4):
        with pytest.raises(ValueError, match=rf"prompts_per_step must be between 1 and .* \(3\), got {per_step}"):
            PromptSampler(prompts(3), prompts_per_step=per_step, seed=0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        PromptSampler(prompts(3), prompts_per_step=1, seed=0).at(-1)


def test_a_sample_seed_follows_its_written_definition():
    """The digest of 0, 1, 2, 3 as 8 little-endian bytes each, worked out with another program (b2sum -l 64)."""
    digest = bytes.fromhex("e1ee3e32a0cd57eb")
    assert sample_seed(0, 1, 2, 3) == int.from_bytes(digest, "little") % 2**63


def test_sound_and_video_are_files_beside_the_prompts(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "audio": "b/c.wav", "video": "d.webp"}\n{"prompt": "y"}\n')
    first, second = load_prompts(tmp_path / "a.jsonl")
    assert (first.audio, first.video) == (tmp_path / "b/c.wav", tmp_path / "d.webp")
    assert second.audio is second.video is None
    (tmp_path / "a.jsonl").write_text('{"prompt": "x", "audio": 3}\n')
    with pytest.raises(ValueError, match='line 1: "audio" must be a path, got 3'):
        load_prompts(tmp_path / "a.jsonl")


ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "A cat"}, {"type": "text", "text": "."}]},
    {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image", "path": "in/b.png"},
                                 {"type": "text", "text": "this?"}, {"type": "audio", "audio": "c.wav"}]},
]  # fmt: skip


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_a_chat_keeps_the_order_of_its_parts_and_names_its_files_where_other_lines_do(tmp_path, key):
    path = write(tmp_path, "a.jsonl", json.dumps({key: ASKED, "answer": "B"}))
    [record] = load_prompts(path)
    assert (record.text, record.meta["answer"], record.audio) == ("And this?", "B", tmp_path / "c.wav")
    assert record.images == (tmp_path / "a.png", tmp_path / "in" / "b.png")
    assert record.meta["messages"] == [
        ASKED[0],
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What"}]},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": [{"type": "text", "text": "And "}, {"type": "image"},
                                     {"type": "text", "text": "this?"}, {"type": "audio"}]},
    ]  # fmt: skip


def test_the_line_may_name_the_files_of_a_chat_and_a_message_may_be_a_sound_alone(tmp_path):
    said = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "audio", "audio": None}]}]
    line = {"messages": said, "images": ["a.png", "b.png"], "audio": "c.wav", "video": None}
    [record] = load_prompts(write(tmp_path, "a.jsonl", json.dumps(line)))
    assert [file.name for file in (*record.images, record.audio)] == ["a.png", "b.png", "c.wav"]
    assert record.text == ""


def test_what_an_assistant_says_last_is_the_completion(tmp_path):
    """The prompt is the chat before it."""
    said = {"role": "assistant", "content": [{"type": "text", "text": "A "}, {"type": "text", "text": "cat."}]}
    asked = [{"role": "user", "content": "What is this?"}, said, {"role": "user", "content": "And its name?"}]
    chat = [*asked, {"role": "assistant", "content": "Tom."}]
    [record] = load_prompts(write(tmp_path, "a.jsonl", json.dumps({"messages": chat})))
    assert (record.text, record.meta["completion"]) == ("And its name?", "Tom.")
    assert record.meta["messages"] == [asked[0], {"role": "assistant", "content": "A cat."}, asked[2]]


SAID = {"role": "assistant", "content": "Tom."}


@pytest.mark.parametrize(
    "value",
    [
        "Tom.",
        [SAID],
        [{"role": "user", "content": "Its name?"}, SAID],
        [{"role": "assistant", "content": [{"type": "text", "text": "To"}, {"type": "text", "text": "m."}]}],
    ],
)
def test_an_answer_is_a_text_or_a_message_of_the_assistant(value):
    assert answer_text(value, "chosen", "Its name?") == "Tom."


@pytest.mark.parametrize(
    "value",
    [
        *(None, "", " ", 3, [], ["a"]),
        [{"role": "user", "content": "Its name?"}],
        [{"role": "user", "content": "b"}, SAID],
        [{"role": "assistant", "content": [{"type": "image"}]}],
        [SAID, {"role": "user", "content": "a"}, SAID],
    ],
)
def test_what_is_no_answer_is_named(value):
    with pytest.raises(ValueError, match='"chosen" must be a text that is not empty, or a chat of one message of'):
        answer_text(value, "chosen", "Its name?")


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"messages": []}, r'"messages" must be a list with at least one, got \[\]'),
        ({"messages": ASKED, "prompt": "a"}, "\"prompt\" must be left out beside messages, got 'a'"),
        ({"messages": ASKED, "system": "a"}, '"system" must be left out beside messages'),
        ({"messages": ASKED[2:3]}, "the prompt must end with a message of the user, got none"),
        ({"messages": [*ASKED[:3], ASKED[2]]}, "the prompt must end with a message of the user, got 'assistant'"),
        (
            {"messages": ASKED[:3], "completion": "a"},
            '"completion" must be left out beside messages that end with the assistant',
        ),
        ({"messages": ["a"]}, 'message 1 must have "content" and a "role" of system, user, assistant, .* got \'a\''),
        ({"messages": [ASKED[0], {"role": "bot", "content": "a"}]}, "message 2 must have .* \"role\" .* 'bot'"),
        ({"messages": [{"role": "user", "content": 3}]}, 'message 1: "content" must be a string or a list .* got 3'),
        ({"messages": [{"role": "user", "content": " "}]}, "message 1 must not be empty"),
        (user(), "message 1 must not be empty"),
        (user({"type": "smell", "smell": "a"}), "message 1: a part must be .* got .*smell"),
        (user({"type": "image", "url": "http://a/b.png"}), "message 1: a part must be .*, got .*url"),
        (user({"type": "image", "image": "a.png", "path": "b.png"}), "message 1: a part must be"),
        (user({"type": "image", "image": 3}), "message 1: a part must be"),
        (user({"type": ["image"]}), "message 1: a part must be"),
        (user({"type": "text"}), "message 1: a part must be"),
        (user({"type": "image"}), 'messages must have a part for each file of "images", .* got parts .* and files'),
        ({"messages": ASKED[:1] + ASKED[3:], "images": "a.png"}, "messages must have a part for each file"),
        (
            {"messages": [{"role": "user", "content": "a"}], "images": "a.png"},
            "messages must have a part for each file",
        ),
        (
            user({"type": "audio", "audio": "a"}, {"type": "audio", "audio": "b"}),
            'messages must have a part .* "audio", at most one',
        ),
    ],
)
def test_a_malformed_chat_is_named(tmp_path, line, message):
    path = write(tmp_path, "a.jsonl", '{"prompt": "fine"}', json.dumps(line))
    with pytest.raises(ValueError, match=f"a.jsonl, line 2: {message}"):
        load_prompts(path)


class Table:
    """What pyarrow reads, stood in for: rows as its `to_pylist` gives them, with every key of every row."""

    def __init__(self, rows, columns=(), **facts):
        self.rows, self.columns = rows, columns
        chunk = {"num_values": len(rows), "total_uncompressed_size": 0, "path_in_schema": "prompt"}
        chunk |= {"physical_type": "BYTE_ARRAY"} | facts
        group = SimpleNamespace(num_columns=1, column=[SimpleNamespace(**chunk)].__getitem__)
        num_rows = facts.get("num_rows", len(rows))
        self.metadata = SimpleNamespace(num_rows=num_rows, num_row_groups=1, row_group=[group].__getitem__)

    def open(self, path, read_dictionary=("prompt",)):
        assert list(read_dictionary) == ["prompt"]
        if not path.exists():
            raise FileNotFoundError(path)
        if path.name == "strange.parquet":
            raise NotImplementedArrowError("Unhandled type")
        return self

    def iter_batches(self, batch_size, columns):
        assert columns is None
        starts = range(0, len(self.rows), 2)
        return [SimpleNamespace(to_pylist=partial(list, self.rows[i : i + 2]), columns=self.columns) for i in starts]


class ArrowError(Exception):
    """The root of pyarrow's own."""


class NotImplementedArrowError(NotImplementedError, ArrowError):
    """As pyarrow raises it, which is no ValueError."""


def parquet_of(rows, folder, monkeypatch, **facts):
    (folder / "a.parquet").touch()
    package = ModuleType("pyarrow")
    package.parquet, package.ArrowException = SimpleNamespace(ParquetFile=Table(rows, **facts).open), ArrowError
    monkeypatch.setitem(sys.modules, "pyarrow", package)
    return folder / "a.parquet"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_a_pipe_is_refused_unread(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"path must be a regular file, got {tmp_path / name}"):
        load_prompts(tmp_path / name)


def test_a_row_of_parquet_is_what_a_line_is(tmp_path, monkeypatch):
    part = {"type": "text", "text": "a\u2028b\n", "image": None}
    messages = [{"role": "user", "content": [part, {"type": "image", "text": None, "image": "a.png"}]}]
    rows = [
        {"messages": messages, "prompt": None, "n": None, "tags": None},
        {"messages": None, "prompt": "c", "n": 1.5, "tags": [1, None]},
    ]
    path = parquet_of(rows, tmp_path, monkeypatch)
    chat, plain = load_prompts(path)
    assert (chat.text, chat.images) == ("a\u2028b\n", (tmp_path / "a.png",))
    assert plain == PromptRecord(1, "c", meta={"n": 1.5, "tags": [1, None]})
    sampler = PromptSampler(path, prompts_per_step=2, seed=0)
    assert sorted(sampler.at(0), key=lambda record: record.index) == [chat, plain]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ""}, 'row 2: "prompt" must not be empty'),
        ({"prompt": "b", "image": b"\x89PNG"}, 'row 2: "image" must hold text, .* files only as images, .*, got .*PNG'),
        ({"prompt": "b", "images": [b"MZ\x90"]}, r'row 2: "images" must .* of the kinds .png, .* got 3: .*MZ'),
        ({"prompt": "b", "video": {"bytes": b"GIF89a" + bytes(2**10), "path": None}}, "row 2: .* at most 1024 bytes"),
        ({"prompt": "b", "images": [{"bytes": None, "path": "/etc/a.png"}]}, 'row 2: "images" must name files in the'),
        ({"prompt": "b", "n": float("nan")}, 'row 2: "n" must hold text, finite numbers, .* got nan'),
    ],
)
def test_a_malformed_row_is_named(tmp_path, monkeypatch, row, message):
    monkeypatch.setattr(table, "MAX_MEDIA_BYTES", 2**10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = parquet_of([{"prompt": "a"}, row], tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=f"a.parquet, {message}"):
        load_prompts(path)
    assert not (tmp_path / "cache").exists()


class Texts:
    """A text of 64 MiB that a column repeats by its index, or lists and structs of it, as Arrow keeps them."""

    def __init__(self, count):
        self.dictionary = [SimpleNamespace(as_buffer=lambda: SimpleNamespace(size=2**26))]
        self.indices = SimpleNamespace(to_pylist=lambda: [0] * count + [None])


@pytest.mark.parametrize("nest", [lambda t: t, lambda t: SimpleNamespace(flatten=lambda: [t])], ids=["text", "struct"])
def test_texts_of_parquet_are_measured_before_they_take_memory(tmp_path, monkeypatch, nest):
    monkeypatch.setattr(table, "_row_line", lambda row, keys, place: json.dumps(row))
    assert load_prompts(parquet_of([{"prompt": "a"}], tmp_path, monkeypatch, columns=[nest(Texts(1))]))
    monkeypatch.setattr(table, "_row_line", lambda row, keys, place: pytest.fail("a row was read"))
    path = parquet_of([{"prompt": "a"}], tmp_path, monkeypatch, columns=[nest(Texts(2))])
    with pytest.raises(ValueError, match=rf"a\.parquet, row 1: must have at most {2**26} bytes .* got {2**27}"):
        load_prompts(path)


def test_texts_that_many_rows_of_parquet_repeat_are_measured_together(tmp_path, monkeypatch):
    """65,536 rows of 60 kB would be 4 GB, in a file of some kB."""
    monkeypatch.setattr(table, "_row_line", lambda row, keys, place: json.dumps(row))
    assert len(load_prompts(parquet_of([{"prompt": "a"}] * 32, tmp_path, monkeypatch, columns=[Texts(1)]))) == 32
    path = parquet_of([{"prompt": "a"}] * 34, tmp_path, monkeypatch, columns=[Texts(1)])  # 17 batches of 64 MiB
    with pytest.raises(ValueError, match=rf"row 33: must have at most {2**30} bytes with the rows before it, got"):
        load_prompts(path)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"num_rows": 2**16 + 1}, "at most 65536 rows in a file of 0 bytes, got 65537"),
        ({"num_values": 2**22 + 1}, "at most 4194304 values in a file of 0 bytes, got 4194305"),
        ({"total_uncompressed_size": 2**26 + 1}, "at most 67108864 bytes in a file of 0 bytes, got 67108865"),
    ],
)
def test_a_small_parquet_that_says_it_is_huge_is_refused_unread(tmp_path, monkeypatch, facts, message):
    monkeypatch.setattr(Table, "iter_batches", lambda *given, **told: pytest.fail("rows were read"))
    with pytest.raises(ValueError, match=rf"a\.parquet must have {message}"):
        load_prompts(parquet_of([{"prompt": "a"}], tmp_path, monkeypatch, **facts))


def test_bytes_in_parquet_are_files_named_by_what_they_hold(tmp_path, monkeypatch):
    """As the datasets library has them: structs of bytes and a path, of which the path is not trusted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    picture, sound = b"\x89PNG\r\n\x1a\n\0", b"RIFF\n\0\0\0WAVEfmt "
    struct = {"bytes": picture, "path": "/etc/../evil.sh"}
    chat = [{"role": "user", "content": [{"type": "audio", "audio": {"bytes": sound, "path": None}}]}]
    rows = [
        {"prompt": "a", "images": [struct, {"bytes": None, "path": "b.png"}]},
        {"prompt": "b", "images": picture, "video": None},
        {"messages": chat},
    ]
    both, one, said = load_prompts(parquet_of(rows, tmp_path, monkeypatch))
    kept = tmp_path / "cache/omni-rl/media"
    path = kept / f"{hashlib.sha256(picture).hexdigest()}.png"
    assert both.images == (path, tmp_path / "b.png")
    assert one.images == (path,)
    assert path.read_bytes() == picture
    assert said.audio.read_bytes() == sound
    assert sorted(file.suffix for file in kept.iterdir()) == [".png", ".wav"]


def test_parquet_says_what_to_install_and_which_file_cannot_be_read(tmp_path, monkeypatch):
    path = parquet_of([], tmp_path, monkeypatch)
    with pytest.raises(ValueError, match=r"path must be a parquet file that can be read, got .*gone\.parquet"):
        load_prompts(tmp_path / "gone.parquet")
    (tmp_path / "strange.parquet").touch()
    with pytest.raises(ValueError, match=r"path must be a parquet file .*strange\.parquet: Unhandled type"):
        load_prompts(tmp_path / "strange.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"a\.parquet needs pyarrow, which is not installed: pip install 'pyarrow>=14"):
        load_prompts(path)
