"""The scorer that asks a vision-language model: what it sends, what it makes of answers, and how it fails."""

import base64
import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omni_reward import RewardConnectError, RewardHTTPError, RewardTimeoutError, Score, Scorer
from omni_reward.scorers import chat
from omni_reward.scorers.tasks import MAX_TEXT, QUESTIONS, TASKS, Message
from omni_reward.scorers.vlm import load_vlm
from PIL import Image

IMAGES = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), np.uint8)
GOOD = {
    "ocr": "K7QX",
    "alignment": '{"reason": "all there", "score": 7.5}',
    "unifiedreward": "Alignment Score (1-5): 5\nCoherence Score (1-5): 4.0\nStyle Score (1-5): 1.5\n",
    "unifiedreward_v1": "cube (object): 1\nred (color): 0\nFinal Score: 3.5",
    "edit_rating": '{"following": 4, "quality": 2.5}',
}


class FakeEndpoint:
    """An OpenAI-compatible server whose answers a test chooses.

    Args:
        answer: from a chat request to the text of the answer, or to (status, body of the reply).
        models: names of what it serves.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], str | tuple[int, bytes]], models: list[str]) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.reply(200, json.dumps({"object": "list", "data": [{"id": name} for name in models]}).encode())

            def do_POST(self) -> None:
                assert self.path == "/v1/chat/completions"
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.headers.append(dict(self.headers))
                fake.requests.append(request)
                answered = answer(request)
                self.reply(*(answered if isinstance(answered, tuple) else (200, completion(answered))))

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


def completion(text: str | None, reason: str = "stop") -> bytes:
    """A chat completion with this text."""
    message = {"role": "assistant", "content": text}
    return json.dumps(
        {"object": "chat.completion", "choices": [{"message": message, "finish_reason": reason}]}
    ).encode()


@pytest.fixture
def endpoint() -> Iterator[Callable[..., FakeEndpoint]]:
    """Function of an answer, or a function of the request, that starts a fake endpoint."""
    started: list[FakeEndpoint] = []

    def start(answer: Any, models: tuple[str, ...] = ("judge-7b",)) -> FakeEndpoint:
        started.append(FakeEndpoint(answer if callable(answer) else lambda request: answer, list(models)))
        return started[-1]

    yield start
    for fake in started:
        fake.server.shutdown()
        fake.server.server_close()


def score(scorer: Scorer, *prompts: str) -> list[Score]:
    before = ([(IMAGES[-1],)] * len(prompts),) if scorer.references else ()
    return list(scorer({"image": IMAGES[: len(prompts)]}, list(prompts), [{}] * len(prompts), *before))


def seen(message: dict[str, Any]) -> list[np.ndarray]:
    """The images of a message, which come before its text."""
    *images, text = message["content"]
    assert text["type"] == "text"
    data = [image["image_url"]["url"].removeprefix("data:image/png;base64,") for image in images]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each)))) for each in data]


def test_the_request_holds_the_exact_image_and_asks_for_json_without_chance(
    endpoint: Callable[..., FakeEndpoint],
) -> None:
    fake = endpoint(GOOD["alignment"])
    score(load_vlm(fake.url + "/", task="alignment", seed=11), 'a "red" cube\n}')
    [request] = fake.requests
    assert request["model"] == "judge-7b"
    assert request["temperature"] == 0
    assert request["seed"] == 11
    [message] = request["messages"]
    np.testing.assert_array_equal(seen(message), IMAGES[:1])
    assert '"a \\"red\\" cube\\n}"' in message["content"][-1]["text"]
    form = request["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["strict"] is True
    assert form["json_schema"]["schema"] == {
        "type": "object",
        "properties": {"reason": {"type": "string"}, "score": {"type": "number", "minimum": 0, "maximum": 10}},
        "required": ["reason", "score"],
        "additionalProperties": False,
    }
    assert fake.headers[0]["Content-Type"] == "application/json"
    assert "Authorization" not in fake.headers[0]


def test_a_transcription_is_compared_like_that_of_the_ocr_scorer(endpoint: Callable[..., FakeEndpoint]) -> None:
    fake = endpoint(GOOD["ocr"])
    scores = score(load_vlm(fake.url, task="ocr"), 'says "k7 qx"', 'says "K7QA"', "says nothing")
    assert [result.value for result in scores] == [1.0, 0.75, None]
    assert scores[1].details == {"read": "K7QX", "target": "K7QA"}
    assert [part["role"] for part in fake.requests[0]["messages"]] == ["system", "user"]
    assert "response_format" not in fake.requests[0]
    assert scores[2].abstained == "the prompt has no text between double quotes"
    assert len(fake.requests) == 2  # what needs no answer is not asked
    assert "K7QA" not in json.dumps(fake.requests)  # nor is the target told
    [part] = score(load_vlm(fake.url, task="ocr"), 'says "k7"')
    assert part.value == 1.0  # verl-omni's formula


def test_scores_are_brought_to_0_to_1(endpoint: Callable[..., FakeEndpoint]) -> None:
    [aligned] = score(load_vlm(endpoint(GOOD["alignment"]).url, task="alignment"), "a cube")
    assert aligned == Score(0.75, details={"reason": "all there"})
    [rated] = score(load_vlm(endpoint(GOOD["unifiedreward"]).url, task="unifiedreward"), "a cube")
    assert rated.value == pytest.approx(((5 + 4 + 1.5) / 3 - 1) / 4)
    assert rated.parts == {"alignment": 5.0, "coherence": 4.0, "style": 1.5}
    [first] = score(load_vlm(endpoint(GOOD["unifiedreward_v1"]).url, task="unifiedreward_v1"), "a cube")
    assert first.value == 0.7
    [edited] = score(load_vlm(endpoint(GOOD["edit_rating"]).url, task="edit_rating"), "a cube")
    assert edited.value == pytest.approx((4 + 2.5 - 2) / 6)
    for number, value in ((1, 0.0), (5, 1.0)):
        answer = "".join(f"{axis} Score: {number}\n" for axis in ("Alignment", "Coherence", "Style"))
        assert score(load_vlm(endpoint(answer).url, task="unifiedreward"), "a cube")[0].value == value


PUBLISHED = {  # SHA-256 of the words at the places that questions.toml names
    "ocr": "d233c642a829efc98a07a680100aca6e9594264d2d9005854220d43aa61f3ada",
    "unifiedreward": "75d52d3ae771f89b682db3b74cdaca1c7bde373a39162bc1c9dabd63cdc9b851",
    "unifiedreward_edit": "b9c27cd063664e5f363a5039623cf27a0358e7900dcd8b4cfdb48569d843fc7c",
    "unifiedreward_pair": "828e9ab2f81c3b6d42fb68dd5b8ea1b7647063c4b5d79a98d003ff25de5c5ca8",
    "unifiedreward_quality": "ddb40baa511dbf2fd619474e5a0fcd043c6325f976bfc8fd1f8b9fbf4c521113",
    "unifiedreward_v1": "f56f919ce3bc6aab3c173a5f836defe195e17e9614753e8b4c3dc2405bd4975b",
}


def test_the_words_of_others_are_exact(endpoint: Callable[..., FakeEndpoint]) -> None:
    digests = {name: hashlib.sha256(QUESTIONS[name].encode()).hexdigest() for name in PUBLISHED}
    assert digests == PUBLISHED
    fake = endpoint(GOOD["unifiedreward"])
    score(load_vlm(fake.url, task="unifiedreward"), 'a "red" cube')
    [message] = fake.requests[0]["messages"]
    assert message["content"][-1]["text"].endswith('\nText Caption: [a "red" cube]')  # not as a JSON string


def about_the_edit(request: dict[str, Any]) -> bool:
    """True if a request shows the image before the edit too."""
    return len(request["messages"][-1]["content"]) == 3


@pytest.mark.parametrize(("task", "most"), [("edit", 10), ("unifiedreward_edit", 25)])
def test_an_edit_is_judged_beside_its_reference_and_its_looks_by_itself(
    endpoint: Callable[..., FakeEndpoint], task: str, most: int
) -> None:
    def answer(request: dict[str, Any]) -> str:
        first, second = (0.9 * most, 0.4 * most) if about_the_edit(request) else (0.5 * most, most)
        if task == "unifiedreward_edit":
            return f'{{\n"reasoning" : "nearly",\n"score" : [{first}, {second}],\n}}'
        if about_the_edit(request):
            return json.dumps({"reason": "nearly", "success": first, "preservation": second})
        return json.dumps({"flaws": "dark", "naturalness": first, "artifacts": second})

    fake = endpoint(answer)
    scorer = load_vlm(fake.url, task=task)
    assert scorer.references
    [result] = score(scorer, "make it red")
    assert result.value == pytest.approx((0.4 * 0.5) ** 0.5)  # VIEScore: the root of the smaller ones' product
    wanted = {"success": 0.9, "preservation": 0.4, "naturalness": 0.5, "artifacts": 1.0}
    assert result.parts == pytest.approx(wanted)
    both, looks = (seen(request["messages"][-1]) for request in fake.requests)
    np.testing.assert_array_equal(both, IMAGES[[2, 0]])
    np.testing.assert_array_equal(looks, IMAGES[:1])
    assert [about_the_edit(request) for request in fake.requests] == [True, False]
    assert "make it red" in json.dumps(fake.requests[0])
    [alone] = scorer({"image": IMAGES[:1]}, ["make it red"], [{}], [()])
    assert alone == Score(None, abstained="the sample has no reference")
    assert len(fake.requests) == 2


def test_an_edit_with_one_bad_answer_of_two_abstains(endpoint: Callable[..., FakeEndpoint]) -> None:
    good = '{"reason": "r", "success": 9, "preservation": 9}'
    fake = endpoint(lambda request: good if about_the_edit(request) else "pretty")
    [result] = score(load_vlm(fake.url, task="edit"), "make it red")
    assert result.value is None
    assert result.details == {"answer": "pretty"}


@pytest.mark.parametrize(
    "question", [own for task in TASKS.values() for own in task.questions], ids=lambda own: own.text[:20]
)
@pytest.mark.parametrize(
    "answer",
    [
        *("", "7", "null", "[]", "{}", "score: 7", '"text"', "{'score': 7}", "[" * 100_000),
        *('{"text": 3}', '{"text": null}', '{"text": ["K7QX"]}', '{"text": "K7QX", "score": 1}', '{"Text": "K7QX"}'),
        '{"text": "' + "a" * 4001 + '"}',
        "```json\n" + GOOD["edit_rating"] + "\n```",
        *(f'{{"reason": "r", "score": {number}}}' for number in ("-0.1", "10.01", "NaN", "Infinity", "1e999", "true")),
        *(f'{{"reason": "r", "score": {number}}}' for number in ('"7"', "null", "[7]", "1" + "0" * 4999)),
        *('{"reason": 1, "score": 7}', '{"score": 7}', '{"reason": "r", "score": 7, "sure": true}'),
        *(f'{{"following": 3, "quality": {number}}}' for number in ("0.99", "4.01", "NaN", "false")),
        *("Alignment Score: 3\nCoherence Score: 3", "Alignment Score: 3\nCoherence Score: 3\nStyle Score: 5.01"),
        *(
            "Final Score: x",
            "Final Score: 0.9",
            "Final Score: -3",
            '"score": [3]',
            '"score": [3, 26]',
            '"score": [-1, 3]',
        ),
        GOOD["edit_rating"] + GOOD["edit_rating"],
    ],
)
def test_an_answer_in_another_form_abstains(question: Message, answer: str) -> None:
    if question.text == QUESTIONS["ocr"] and len(answer) <= MAX_TEXT:
        assert question.read(answer) == {"text": answer}  # whatever was read
        return
    with pytest.raises(ValueError):
        question.read(answer)


def test_an_abstention_says_what_was_wrong_and_shows_the_answer(endpoint: Callable[..., FakeEndpoint]) -> None:
    [result] = score(load_vlm(endpoint('{"reason": "r", "score": 11}').url, task="alignment"), "a cube")
    assert result.abstained == "the answer has another form: score must be a number from 0 to 10, got 11"
    assert result.details == {"answer": '{"reason": "r", "score": 11}'}
    long = "x" * 100_000
    [result] = score(load_vlm(endpoint(long).url, task="alignment"), "a cube")
    assert result.value is None
    assert len(result.abstained or "") <= 500
    assert result.details == {"answer": long[:1000]}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (completion(GOOD["alignment"], "length"), "the answer ended early: 'length'"),
        (completion(GOOD["alignment"], "content_filter"), "the answer ended early: 'content_filter'"),
        (completion(None), "the model refused to answer"),
    ],
)
def test_a_cut_or_refused_answer_abstains(endpoint: Callable[..., FakeEndpoint], reply: bytes, reason: str) -> None:
    [result] = score(load_vlm(endpoint(lambda request: (200, reply)).url, task="alignment"), "a cube")
    assert result == Score(None, abstained=reason)


@pytest.mark.parametrize(
    "bad", [(500, b"boom"), (400, b"{}"), (200, b"{}"), (200, b"<html>"), (200, b'{"choices": []}')]
)
def test_one_failure_abstains_and_the_rest_is_scored(
    endpoint: Callable[..., FakeEndpoint], bad: tuple[int, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    fake = endpoint(lambda request: bad if "bad cube" in json.dumps(request) else GOOD["alignment"])
    scores = score(load_vlm(fake.url, task="alignment"), "a cube", "a bad cube", "a cube")
    assert [result.value for result in scores] == [0.75, None, 0.75]
    kind = "RewardFormatError" if bad[0] == 200 else "RewardHTTPError"
    assert scores[1].abstained == f"the endpoint did not answer: {kind}"  # without its address
    assert caplog.messages[0].startswith("no answer for a sample: ")


def test_when_nothing_is_answered_the_scorer_fails(endpoint: Callable[..., FakeEndpoint]) -> None:
    scorer = load_vlm(endpoint(lambda request: (401, b"no")).url, task="ocr")
    with pytest.raises(RewardHTTPError, match="401"):
        score(scorer, 'says "A"', "says nothing", 'says "B"')
    assert score(scorer, "says nothing")[0].abstained == "the prompt has no text between double quotes"


def test_a_busy_endpoint_is_asked_again(endpoint: Callable[..., FakeEndpoint]) -> None:
    replies: list[str | tuple[int, bytes]] = [(503, b""), (429, b""), GOOD["alignment"]]
    fake = endpoint(lambda request: replies.pop(0))
    assert score(load_vlm(fake.url, task="alignment"), "a cube")[0].value == 0.75
    assert fake.requests[0] == fake.requests[1] == fake.requests[2]


def test_a_server_error_is_not_asked_again(endpoint: Callable[..., FakeEndpoint]) -> None:
    fake = endpoint(lambda request: (500, b""))
    with pytest.raises(RewardHTTPError):
        score(load_vlm(fake.url, task="alignment"), "a cube")
    assert len(fake.requests) == 1


def test_a_question_ends_at_its_deadline(endpoint: Callable[..., FakeEndpoint]) -> None:
    release = threading.Event()

    def hang(request: dict[str, Any]) -> str:
        release.wait(20)
        return GOOD["alignment"]

    scorer = load_vlm(endpoint(hang).url, task="alignment", timeout_s=0.3)
    start = time.monotonic()
    with pytest.raises(RewardTimeoutError):
        score(scorer, "a cube", "a ball")
    assert time.monotonic() - start < 10
    release.set()


def test_an_endless_503_ends_at_the_deadline(endpoint: Callable[..., FakeEndpoint]) -> None:
    scorer = load_vlm(endpoint(lambda request: (503, b"")).url, task="alignment", timeout_s=0.3)
    with pytest.raises(RewardHTTPError, match="503"):
        score(scorer, "a cube")


def test_an_endpoint_that_went_away_is_a_connect_error(endpoint: Callable[..., FakeEndpoint]) -> None:
    fake = endpoint(GOOD["alignment"])
    fake.server.RequestHandlerClass.protocol_version = "HTTP/1.0"  # no connection outlives its reply
    scorer = load_vlm(fake.url, task="alignment", timeout_s=0.3)
    fake.server.shutdown()
    fake.server.server_close()
    with pytest.raises(RewardConnectError):
        score(scorer, "a cube")


def test_so_many_questions_are_asked_at_a_time(endpoint: Callable[..., FakeEndpoint]) -> None:
    together = threading.Barrier(3, timeout=20)

    def meet(request: dict[str, Any]) -> str:
        together.wait()
        return GOOD["alignment"]

    assert [result.value for result in score(load_vlm(endpoint(meet).url, task="alignment", max_in_flight=3), *"abc")]


def test_answers_stay_with_their_samples(endpoint: Callable[..., FakeEndpoint]) -> None:
    def count(request: dict[str, Any]) -> str:
        number = int(request["messages"][0]["content"][1]["text"].partition("cube ")[2][0])
        time.sleep(0.02 * (3 - number))
        return f'{{"reason": "", "score": {number}}}'

    scorer = load_vlm(endpoint(count).url, task="alignment")
    assert [result.value for result in score(scorer, "cube 1", "cube 2", "cube 3")] == [0.1, 0.2, 0.3]


def test_an_image_too_large_abstains(endpoint: Callable[..., FakeEndpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MAX_IMAGE_BYTES", 100)
    fake = endpoint(GOOD["alignment"])
    assert score(load_vlm(fake.url, task="alignment"), "a")[0].abstained == "the image takes more than 100 bytes as PNG"
    assert fake.requests == []


def test_the_token_comes_from_a_file_and_goes_into_the_header(
    endpoint: Callable[..., FakeEndpoint], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    fake = endpoint(GOOD["alignment"])
    score(load_vlm(fake.url, task="alignment", token_file=tmp_path / "token"), "a cube")
    assert fake.headers[0]["Authorization"] == "Bearer s3cret"


def test_the_version_names_the_model_and_exactly_this_question(endpoint: Callable[..., FakeEndpoint]) -> None:
    url = endpoint(GOOD["ocr"]).url
    versions = [load_vlm(url, task=task).version for task in TASKS]
    assert all(version.startswith("judge-7b ") for version in versions)
    assert len(set(versions)) == len(TASKS)


def test_one_of_several_models_must_be_named(endpoint: Callable[..., FakeEndpoint]) -> None:
    fake = endpoint(GOOD["alignment"], ("a", "b"))
    score(load_vlm(fake.url, task="alignment", model="b"), "a cube")
    assert fake.requests[0]["model"] == "b"
    for model in (None, "c"):
        with pytest.raises(ValueError, match=rf"model must be one of \['a', 'b'\], got {model!r}"):
            load_vlm(fake.url, task="alignment", model=model)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"data": 3}', b'{"data": [3]}', b'{"data": [{}]}', b"[" * 100_000]
)
def test_something_else_than_an_endpoint_is_refused(misbehave: Callable[..., str], body: bytes) -> None:
    head = f"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    url = misbehave(lambda conn, request: conn.sendall(head + body))
    with pytest.raises(ValueError, match="url must be that of an OpenAI-compatible endpoint"):
        load_vlm(url, task="ocr", timeout_s=5)


def test_no_endpoint_and_no_token_file_are_told_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"url must be that of an OpenAI-compatible endpoint: .*refused"):
        load_vlm("http://127.0.0.1:1/v1", task="ocr")
    with pytest.raises(FileNotFoundError):
        load_vlm("http://127.0.0.1:1/v1", task="ocr", token_file=tmp_path / "none")
