"""Prompts and seeds are functions of the step."""

import json
from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omni_train.data import PromptRecord, PromptSampler, load_prompts, sample_seed


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


@settings(max_examples=60, deadline=None)
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


def test_seeds_and_epochs_have_their_own_order(prompts):
    first = PromptSampler(prompts(50), prompts_per_step=50, seed=0)
    other = PromptSampler(prompts(50), prompts_per_step=50, seed=1)
    orders = [[r.index for r in s.at(step)] for s in (first, other) for step in range(3)]
    assert len({tuple(order) for order in orders}) == 6


def test_every_prompt_is_as_likely_at_every_place(prompts):
    path = prompts(4)
    counts = Counter(PromptSampler(path, prompts_per_step=1, seed=seed).at(1)[0].index for seed in range(2000))
    assert all(400 < counts[i] < 600 for i in range(4))


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{prompt: cat}", "line 3: not valid JSON"),
        ('["cat"]', "line 3: must be a JSON object, got list"),
        ('{"text": "cat"}', r"line 3: must have the key \"prompt\", got the keys \['text'\]"),
        ('{"prompt": 3}', 'line 3: "prompt" must be a string, got int'),
        ('{"prompt": "cat", "negative_prompt": null}', 'line 3: "negative_prompt" must be a string, got NoneType'),
        ('{"prompt": "cat", "size": NaN}', "line 3: not valid JSON: NaN is no JSON number"),
        ('{"prompt": " "}', 'line 3: "prompt" must not be empty'),
    ],
)
def test_a_malformed_line_is_named(tmp_path, line, message):
    path = write(tmp_path, "a.jsonl", '{"prompt": "fine"}', "", line)
    with pytest.raises(ValueError, match=message):
        load_prompts(path)


def test_files_that_cannot_serve_are_errors(tmp_path, prompts):
    with pytest.raises(ValueError, match="is empty"):
        load_prompts(write(tmp_path, "none.txt", "", " "))
    with pytest.raises(ValueError, match=r"path must be a file that can be read, got .*gone\.txt: No such file"):
        load_prompts(tmp_path / "gone.txt")
    (tmp_path / "latin.txt").write_bytes(b"a cat\na caf\xe9\n")
    with pytest.raises(ValueError, match=r"latin\.txt, line 2: must be UTF-8, got the byte 0xe9"):
        load_prompts(tmp_path / "latin.txt")
    with pytest.raises(ValueError, match=r"must end in \.txt or \.jsonl"):
        load_prompts(write(tmp_path, "a.csv", "cat"))
    for per_step in (0, 4):
        with pytest.raises(ValueError, match=rf"prompts_per_step must be between 1 and .* \(3\), got {per_step}"):
            PromptSampler(prompts(3), prompts_per_step=per_step, seed=0)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        PromptSampler(prompts(3), prompts_per_step=1, seed=0).at(-1)


def test_the_length_is_the_number_of_prompts(prompts):
    assert len(PromptSampler(prompts(3), prompts_per_step=1, seed=0)) == 3


def test_sample_seeds_differ_in_every_number():
    seeds = {sample_seed(a, b, c, d) for a in range(3) for b in range(10) for c in range(10) for d in range(10)}
    assert len(seeds) == 3000


def test_a_sample_seed_follows_its_written_definition():
    """The digest of 0, 1, 2, 3 as 8 little-endian bytes each, worked out with another program (b2sum -l 64)."""
    digest = bytes.fromhex("e1ee3e32a0cd57eb")
    assert sample_seed(0, 1, 2, 3) == int.from_bytes(digest, "little") % 2**63


@given(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 4))
def test_sample_seeds_fit_in_63_bits(numbers):
    assert 0 <= sample_seed(*numbers) < 2**63
