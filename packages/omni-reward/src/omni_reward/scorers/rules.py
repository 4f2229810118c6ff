"""Rules of `omni_reward.rules` as a scorer of texts: `--scorer "rules:math + 0.1*format=PATTERN"`.

The rules run in a separate process with a time limit for each answer: a regular expression or a math checker may not
terminate on a model's text, and math-verify's time limits work only in a process's main thread.
"""

import faulthandler
import json
import math
import signal
import time
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from omni_reward.media import TEXT, Arrays, Meta
from omni_reward.rules import check_keys, grade, open_rules, rules_version
from omni_reward.wire import Score, Scorer

PREFIX = "rules:"
START_S = 60.0  # for the process's start and imports


def load_rules(reward: str, timeout_s: float = 20.0, request_timeout_s: float = 100.0) -> Scorer:
    """Load a scorer of texts by rules, with the rules' version; it abstains on a line that a rule cannot grade.

    Args:
        reward: as in a trainer's `--reward`.
        timeout_s: time limit per answer; beyond it, the scorer abstains.
        request_timeout_s: time limit per request; beyond it, the scorer abstains on the remaining answers. A trainer
            waits 120 s for a reply.

    Raises:
        ValueError: an argument is invalid.
    """
    for name, value in (("timeout_s", timeout_s), ("request_timeout_s", request_timeout_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be > 0 and finite, got {value}")
    try:
        version = rules_version(open_rules(reward))
    except ValueError as exc:
        raise ValueError(f"scorer {PREFIX} {exc}") from exc
    return Scorer(_Grader(reward, version, timeout_s, request_timeout_s), media=(TEXT,), version=version, timed=True)


class _Grader:
    """A grading process, which is restarted after an answer that took too long or killed the process."""

    def __init__(self, reward: str, version: str, timeout_s: float, request_timeout_s: float) -> None:
        self._reward, self._version, self._timeout_s = reward, version, timeout_s
        self._request_timeout_s = request_timeout_s
        self._process: BaseProcess | None = None
        self._pipe: Connection

    def __call__(self, media: Arrays, prompts: list[str], meta: Meta, since: float) -> list[Score]:
        end = since + self._request_timeout_s
        return [self._grade(text, line, end - time.monotonic()) for text, line in zip(media[TEXT], meta, strict=True)]

    def _grade(self, text: str, line: Mapping[str, object], left_s: float) -> Score:
        if left_s <= 0:
            return Score(None, abstained=f"other answers took all of the {self._request_timeout_s:g} s of the request")
        limit_s = min(self._timeout_s + START_S * (self._process is None), left_s)
        if self._process is None:
            context = get_context("spawn")
            self._pipe, child_pipe = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._reward, self._version, child_pipe), daemon=True)
            self._process.start()
            child_pipe.close()
        try:
            self._pipe.send_bytes(json.dumps([text, line, limit_s + 1]).encode())
            reply = json.loads(self._pipe.recv_bytes()) if self._pipe.poll(limit_s) else {}
        except (EOFError, OSError):
            reply = {}
        if "failed" in reply:
            raise RuntimeError(f"a rule fails: {reply['failed']}")
        if "abstained" in reply:
            return Score(None, abstained=reply["abstained"])
        if reply:
            return Score.of(reply["value"], parts=reply["parts"], details=reply["parts"])
        self._process.kill()
        self._process.join()
        self._process = None
        self._pipe.close()
        return Score(None, abstained=f"the rules ended, or took longer than {limit_s:g} s")


def _serve(reward: str, version: str, pipe: Connection) -> None:
    """Grade answers from the pipe until its other end is closed.

    Each answer comes with a time limit in seconds, after which the process exits: a killed server cannot end it, and a
    regular expression blocks all threads of the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server, which finishes its requests
    rules = open_rules(reward)
    current = rules_version(rules)
    while True:
        try:
            text, line, limit_s = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(limit_s, exit=True)
        reply: dict[str, object]
        try:
            if current != version:
                raise RuntimeError(f"its file must not change while the server runs: was {version}, is {current}")
            check_keys(rules, line, flag="the rule")
            [score] = grade(rules, [text], [line])
            reply = {"value": score.value, "parts": score.parts}
        except ValueError as exc:
            reply = {"abstained": str(exc) or repr(exc)}
        except (Exception, SystemExit) as exc:  # a user's function may raise anything
            reply = {"failed": f"{type(exc).__name__}: {exc}"}
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(json.dumps(reply).encode())
