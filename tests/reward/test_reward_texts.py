"""Texts over the wire, and rules that grade in a process of their own."""

import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from omni_reward import RewardClient, RewardError, RewardHTTPError, Score, Scorer
from omni_reward.media import ScoreRequest
from omni_reward.rules import grade, open_rules
from omni_reward.scorers import load_scorer
from omni_reward.scorers.rules import _serve
from omni_reward.wire import MAX_HEADER_BYTES, decode_request, encode_reply, encode_request
from reward.reward_helpers import halves

TEXTS = ["", "7 \u221a \U0001f600\x00\n", "\\boxed{7}"]


def lengths(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
    return [float(len(text)) for text in media["text"]]


def test_texts_come_out_as_they_went_in(serve: Callable[..., str]) -> None:
    seen: list[object] = []

    def score(media: dict[str, np.ndarray], prompts: list[str], meta: list[dict[str, object]]) -> list[float]:
        seen.append((media["text"].tolist(), prompts, meta))
        return lengths(media, prompts, meta)

    url = serve(Scorer(score, media=("text",), batch_size=2, version="1"))
    meta = [{"answer": i} for i in range(3)]
    with RewardClient(url) as client:
        assert [len(scores) for scores in client.check()] == [1]
        scores = client.submit({"text": TEXTS}, ["a", "b", "c"], meta).result(10)
        assert (client.info()["protocol"], client.kinds) == (1, ("text",))
    assert [score.value for score in scores] == [len(text) for text in TEXTS]
    assert seen[1:] == [(TEXTS[:2], ["a", "b"], meta[:2]), (TEXTS[2:], ["c"], meta[2:])]


def test_texts_and_references_go_together(serve: Callable[..., str]) -> None:
    def score(media: dict, prompts: list[str], meta: list, references: list) -> list[float]:
        return [len(text) + own[0].mean() for text, own in zip(media["text"], references, strict=True)]

    picture = np.full((2, 3, 3), 10, np.uint8)
    with RewardClient(serve(Scorer(score, media=("text",), references=True))) as client:
        [only] = client.submit({"text": ["abc"]}, ["a"], references=[[picture]]).result(10)
    assert only.value == 13


def test_requests_and_replies_of_images_are_the_same_byte_for_byte() -> None:
    """Other clients and servers write and read these bytes."""
    image = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    request = ScoreRequest({"image": image}, ["a", "\u00fc"], [{}, {"k": [1.5, None]}], request_id="r")
    body = b"".join(encode_request(request))
    reply = encode_reply("r", request.ids, "ocr", [Score(0.5, parts={"x": 1.0}), Score(None, abstained="no")])
    assert (
        hashlib.sha256(body + reply).hexdigest() == "c5d2be439f970e51fd6e82caa801b030183f960b2abaf56799486a2e32685e32"
    )


def test_a_server_refuses_texts_that_it_does_not_take_and_requests_without_those_that_it_takes(
    serve: Callable[..., str],
) -> None:
    image = np.zeros((3, 2, 2, 3), np.uint8)
    for media, given, fault in (
        (("image",), {"text": TEXTS}, "['image'], got ['text']"),
        (("image",), {"image": image, "text": TEXTS}, "['image'], got ['image', 'text']"),
        (("image", "text"), {"image": image}, "['image', 'text'], got ['image']"),
    ):
        with RewardClient(serve(Scorer(halves, media=media))) as client:
            refusal = client.submit(given, ["a"] * 3).exception(10)
        assert isinstance(refusal, RewardHTTPError)
        assert refusal.fatal
        assert f"400 malformed media must be {fault}" in str(refusal)


def test_texts_beyond_a_bound_are_refused_before_they_are_sent() -> None:
    with RewardClient("http://127.0.0.1:9") as client:
        with pytest.raises(ValueError, match="text must hold strings of at most 1048576 characters"):
            client.submit({"text": ["a" * (2**20 + 1)]}, ["a"])
        with pytest.raises(ValueError, match=r"text must hold strings of .*, got 7"):
            client.submit({"text": [7]}, ["a"])
        with pytest.raises(ValueError, match=r"text must have the shape \(1,\), got \(2,\)"):
            client.submit({"text": ["a", "b"]}, ["a"])
        with pytest.raises(ValueError, match="text must be a list of strings, got 'ab'"):
            client.submit({"text": "ab"}, ["a", "b"])
        with pytest.raises(ValueError, match=f"at most {MAX_HEADER_BYTES} bytes as JSON, got 17"):
            client.submit({"text": ["a" * 2**20] * 17}, ["a"] * 17).result(10)


def test_a_request_of_texts_has_no_tensor() -> None:
    request = ScoreRequest({"text": np.array(TEXTS, object)}, ["a"] * 3, [{}] * 3, request_id="r")
    body = b"".join(encode_request(request))
    assert decode_request(body, max_batch=3).media["text"].tolist() == TEXTS
    assert b'"U8"' not in body


def test_rules_grade_over_the_wire_as_in_the_trainer(serve: Callable[..., str]) -> None:
    reward = "contains + 0.5*format=<a>.*\\+ .*"
    answers = ["7", "<a>7+ x", "x"]
    meta: list[dict[str, object]] = [{"answer": "7"}] * 3
    with RewardClient(serve(load_scorer(f"rules:{reward}"))) as client:
        scores = client.submit({"text": [*answers, "7"]}, ["p"] * 4, [*meta, {}]).result(60)
    assert scores[:3] == grade(open_rules(reward), answers, meta)
    assert scores[3] == Score(None, abstained='must have the key "answer", which the rule contains requires')


def test_a_rule_that_hangs_or_dies_costs_its_sample_alone(tmp_path) -> None:
    (tmp_path / "own.py").write_text(
        "import os, re\n"
        "def rule(answer, line):\n"
        "    if answer == 'die': os._exit(1)\n"
        "    if answer == 'fail': 1 / 0\n"
        "    if answer == 'refuse': raise ValueError\n"
        "    if answer == 'hang': re.fullmatch('(a+)+b', 'a' * 64)\n"
        "    return len(answer)\n"
    )
    scorer = load_scorer(f"rules:python:{tmp_path}/own.py:rule", options={"timeout_s": "1"})
    assert scorer.version.startswith("own.py ")
    others = set(multiprocessing.active_children())
    scorer({"text": ["ab"]}, ["p"], [{}])  # the process is there
    begin = time.perf_counter()
    two, hung, three, died, one = scorer({"text": ["ab", "hang", "abc", "die", "a"]}, ["p"] * 5, [{}] * 5)
    assert (two.value, three.value, one.value) == (2, 3, 1)
    assert hung.abstained == died.abstained.replace("61 s", "1 s") == "the rules ended, or took longer than 1 s"
    assert time.perf_counter() - begin < 60
    with pytest.raises(RuntimeError, match="a rule fails: ZeroDivisionError"):
        scorer({"text": ["fail"]}, ["p"], [{}])
    assert scorer({"text": ["refuse"]}, ["p"], [{}]) == [Score(None, abstained="ValueError()")]
    [child] = set(multiprocessing.active_children()) - others
    scorer({"text": ["die"]}, ["p"], [{}])
    assert not Path(f"/proc/{child.pid}").exists()  # nor is there a zombie


def test_answers_that_are_left_when_a_request_has_waited_long_are_abstentions(monkeypatch) -> None:
    scorer = load_scorer("rules:exact")
    clock = iter([1.0, 90.0, 100.0, 101.0])
    monkeypatch.setattr("omni_reward.scorers.rules.time", SimpleNamespace(monotonic=lambda: next(clock)))
    scores = scorer({"text": ["a"] * 4}, ["p"] * 4, [{"answer": "a"}] * 4, since=0.0)
    assert [score.value for score in scores] == [1, 1, None, None]
    assert scores[2].abstained == "other answers took all of the 100 s of the request"


def test_a_file_of_rules_that_has_changed_under_the_server_grades_nothing(tmp_path) -> None:
    """The process reads it at the first answer, and once more after each that has cost a process."""
    file = tmp_path / "own.py"
    file.write_text("def rule(answer, line):\n    return 1\n")
    scorer = load_scorer(f"rules:python:{file}:rule")
    file.write_text("def rule(answer, line):\n    return 2\n")
    with pytest.raises(
        RuntimeError, match=r"its file must not change while the server runs: was own\.py .*, is own\.py "
    ):
        scorer({"text": ["a"]}, ["p"], [{}])


def test_rules_that_hang_end_themselves_where_nobody_else_does() -> None:
    """As when the server has been killed: its process must not run on for ever."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=("regex", "", theirs), daemon=True)
    process.start()
    ours.send_bytes(json.dumps(["a" * 64, {"pattern": "(a+)+b"}, 0.1]).encode())
    process.join(30)
    assert process.exitcode == 1


def test_rules_that_are_none_are_refused_when_the_server_starts() -> None:
    with pytest.raises(ValueError, match=r"scorer rules: must be one of exact, .* got 'ocr'"):
        load_scorer("rules:ocr")
    with pytest.raises(ValueError, match="timeout_s must be > 0 and finite, got 0"):
        load_scorer("rules:exact", options={"timeout_s": "0"})
    with pytest.raises(ValueError, match="timeout_s must be > 0 and finite, got inf"):
        load_scorer("rules:exact", options={"timeout_s": "inf"})
    with pytest.raises(ValueError, match="request_timeout_s must be > 0 and finite, got -1"):
        load_scorer("rules:exact", options={"request_timeout_s": "-1"})
    with pytest.raises(ValueError, match="options of rules:exact must fit it"):
        load_scorer("rules:exact", options={"mode": "x"})
    with RewardClient("http://127.0.0.1:9", timeout_s=0.2) as client, pytest.raises(RewardError):
        client.check()
