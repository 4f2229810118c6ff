"""Questions in the metadata: how they are read, what the model is asked, and the score, against the published loops."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from omni_reward import Score
from omni_reward.scorers.checklist import MAX_QUESTIONS, Question, checklist, read_questions
from omni_reward.scorers.vlm import load_vlm
from reward.test_reward_scorer_vlm import IMAGES, FakeEndpoint
from reward.test_reward_scorer_vlm import endpoint as endpoint

OWN: dict[str, object] = {
    "questions": [
        "Is there a dog?",
        {"question": "Is the dog white?", "parents": [0]},
        {"question": "How many cats are there?", "answer": 3},
        {"question": "Is there a cow?", "answer": "No"},
    ]
}
VQA: dict[str, object] = {"vqa_list": [["How many pigs are in the image?", "one"], ["Is the pig green?", "Yes"]]}


def test_both_forms_are_read() -> None:
    assert read_questions(OWN) == [
        Question("Is there a dog?"),
        Question("Is the dog white?", "yes", (0,)),
        Question("How many cats are there?", 3),
        Question("Is there a cow?", "no"),
    ]
    assert read_questions(VQA) == [Question("How many pigs are in the image?", 1), Question("Is the pig green?")]


def test_the_model_gets_all_questions_and_neither_the_prompt_nor_an_answer(
    endpoint: Callable[..., FakeEndpoint],
) -> None:
    fake = endpoint('{"1": "yes", "2": "no", "3": 3, "4": "no"}')
    scorer = load_vlm(fake.url, task="questions")
    [score] = scorer({"image": IMAGES[:1]}, ["a secret prompt"], [OWN])
    assert score == Score(0.75, parts={"all": 0.0}, details={"missed": ["Is the dog white?"]})
    [request] = fake.requests
    [message] = request["messages"]
    text = message["content"][1]["text"]
    named = {"1": "Is there a dog?", "2": "Is the dog white?", "3": "How many cats are there?", "4": "Is there a cow?"}
    assert json.dumps(named) in text
    assert "secret" not in text
    form = request["response_format"]["json_schema"]["schema"]
    assert form["properties"]["1"] == {"type": "string", "enum": ["yes", "no"]}
    assert form["properties"]["3"]["type"] == "number"
    assert form["required"] == ["1", "2", "3", "4"]
    assert scorer.version.startswith("judge-7b questions ")


def released(questions: list[tuple[str, list[int]]], answers: dict[int, str]) -> float:
    """DPG-Bench's loop, from its description: numbers from 1, and a parent 0 is none."""
    points = {number: float(answers[number] == "yes") for number in answers}
    for number, (_, parents) in enumerate(questions, start=1):
        for parent in parents:
            if parent and points[parent] == 0:
                points[number] = 0
    return sum(points.values()) / len(points)


def test_two_hundred_random_lists_with_parents_score_as_dpg_bench_s_loop() -> None:
    rng = random.Random(0)
    scores = set()
    for _ in range(200):
        count = rng.randint(1, 9)
        rows = [(f"q{i}", rng.sample(range(1, i), min(i - 1, rng.randint(0, 2))) or [0]) for i in range(1, count + 1)]
        answers = {i: rng.choice(("yes", "yes", "no")) for i in range(1, count + 1)}
        own = [{"question": text, "parents": [each - 1 for each in parents if each]} for text, parents in rows]
        task = checklist({"questions": own})
        items = [(str(i), word) for i, word in answers.items()]
        rng.shuffle(items)  # a model may answer in another order
        score = task.score(task.questions[0].read(json.dumps(dict(items))), "")
        assert score.value == pytest.approx(released(rows, answers))
        assert score.parts == {"all": float(score.value == 1)}
        scores.add(score.value)
    assert len(scores) > 10


@pytest.mark.parametrize(
    "answer",
    [
        '{"1": "yes", "2": "Yes", "3": 3, "4": "no"}',
        '{"1": "yes", "2": "yes", "3": "3", "4": "no"}',
        '{"1": "yes", "2": "yes", "3": -1, "4": "no"}',
        '{"1": "yes", "2": true, "3": 3, "4": "no"}',
        '{"1": "yes", "2": "yes", "3": 3}',
        '{"1": "yes", "2": "yes", "3": 3, "4": "no", "5": "no"}',
        "yes",
    ],
)
def test_an_answer_of_another_form_is_an_abstention(answer: str, endpoint: Callable[..., FakeEndpoint]) -> None:
    [score] = load_vlm(endpoint(answer).url, task="questions")({"image": IMAGES[:1]}, ["a"], [OWN])
    assert score.value is None
    assert (score.abstained or "").startswith("the answer has another form: ")


def test_prompts_without_questions_abstain_and_are_not_asked(endpoint: Callable[..., FakeEndpoint]) -> None:
    fake = endpoint('{"1": 1, "2": "yes"}')
    scores = load_vlm(fake.url, task="questions")({"image": IMAGES}, ["a", "b", "c"], [{}, VQA, {"questions": []}])
    assert [score.value for score in scores] == [None, 1.0, None]
    rule = "the prompt's metadata must have questions: questions must be a list of 1 to 64 questions, got "
    assert [score.abstained for score in (scores[0], scores[2])] == [f"{rule}None", f"{rule}[]"]
    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ("Is it?", "questions must be a list of 1 to 64 questions, got 'Is it?'"),
        (["a?"] * (MAX_QUESTIONS + 1), "questions must be a list of 1 to 64 questions"),
        ([3], "questions[0] must be a question, got 3"),
        ([" "], "questions[0].question must be a text, got ' '"),
        ([{"answer": "yes"}], "questions[0].question must be a text, got None"),
        (
            ["a?", {"question": "b?", "parents": [1]}],
            r"questions[1].parents must be indices of earlier questions, got [1]",
        ),
        ([{"question": "b?", "parents": 0}], "questions[0].parents must be indices of earlier questions, got 0"),
        ([["a?", "perhaps"]], "questions[0].answer must be yes, no or a number, got 'perhaps'"),
        ([["a?", "9999999"]], "questions[0].answer must be yes, no or a number, got '9999999'"),
        ([["a?", True]], "questions[0].answer must be yes, no or a number, got True"),
    ],
)
def test_lists_that_break_a_rule_are_refused(questions: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        read_questions({"questions": questions})
