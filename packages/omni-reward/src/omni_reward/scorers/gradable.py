"""Detection of prompts that a reward cannot score, by text and line. Loads no scorer and executes no user file."""

from collections.abc import Callable, Mapping
from contextlib import suppress

from omni_reward.scorers.frames import PREFIX as FRAMES
from omni_reward.scorers.rules import PREFIX as RULES
from omni_reward.terms import parse
from omni_reward.wire import Score

Line = Mapping[str, object]
Fault = Callable[[str, Line], str]  # why a prompt's samples get no score, "" if they may get one


def find_fault(name: str, options: Mapping[str, str]) -> Fault:
    """Return a function that says why a prompt gets no score from a reward. name, options: as for `load_scorer`.

    Scorers whose libraries are not installed here, and users' functions, accept any prompt.
    """
    if name.startswith(RULES):
        with suppress(ValueError, ImportError):  # such as a library that only the server has
            return _rules_fault(name.removeprefix(RULES))
        return lambda text, line: ""
    faults: list[tuple[str, Fault]] = []
    reward = parse(name)
    for key, spec in reward.specs.items():
        prefix = "" if reward.is_plain else f"{key}."
        with suppress(ImportError):
            if fault := _scorer_fault(spec.removeprefix(FRAMES), options.get(f"{prefix}task", "")):
                faults.append((spec, fault))
    return lambda text, line: next((f"{spec}: {why}" for spec, fault in faults if (why := fault(text, line))), "")


def _scorer_fault(spec: str, task: str) -> Fault | None:
    """Return the function of `find_fault` for one scorer, or None if it accepts any prompt. task: `vlm`'s."""
    match spec:
        case "ocr":
            from omni_reward.scorers.text import require_target_text

            return lambda text, line: _reason(require_target_text(text))
        case "geneval":
            from omni_reward.scorers.geneval_rules import read_requirements

            return lambda text, line: _error_text(lambda: read_requirements(line))
        case "pitch":
            from omni_reward.scorers.sound import named_pitch

            rule = "the prompt must name one pitch, such as 440 Hz or A4"
            return lambda text, line: rule if named_pitch(text) is None else ""
        case "color":
            from omni_reward.scorers.color import COLORS, named_colors

            rule = f"the prompt must name one color of {list(COLORS)}"
            return lambda text, line: "" if len(named_colors(text)) == 1 else rule
        case "vlm":
            from omni_reward.scorers.checklist import TASK, read_questions
            from omni_reward.scorers.tasks import TASKS

            if task == TASK:
                return lambda text, line: _error_text(lambda: read_questions(line))
            return (lambda text, line: _reason(TASKS[task].decline(text))) if task in TASKS else None
    return None


def _rules_fault(reward: str) -> Fault:
    from omni_reward.rules import check_keys, open_rules

    if "python:" in reward:  # only the server executes the file
        return lambda text, line: ""
    rules = open_rules(reward)
    return lambda text, line: _error_text(lambda: check_keys(rules, line, flag="--scorer"))


def _reason(result: object) -> str:
    return result.abstained or "" if isinstance(result, Score) else ""


def _error_text(check: Callable[[], object]) -> str:
    try:
        check()
    except ValueError as exc:
        return str(exc)
    return ""
