"""The rules of `omni_reward.rules` as a scorer of texts: `--scorer "rules:math + 0.1*format=PATTERN"`.

They grade in a process of their own, each answer within a time limit: a regular expression or a checker of mathematics
may take for ever on what a model writes, and math-verify's own limits need the main thread of a process.
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
from omni_reward.rules import check_keys, grade, open_rules, version_of
from omni_reward.wire import Score, Scorer

PREFIX = "rules:"
START_S = 60.0  # in which the process starts and a rule imports its library


def load_rules(reward: str, timeout_s: float = 20.0, request_timeout_s: float = 100.0) -> Scorer:
    """A scorer of texts by rules, with their version; a line that a rule cannot grade is an abstention.

    Args:
        reward: as a trainer's `--reward`.
        timeout_s: longest that the rules may take for an answer, which else is an abstention.
        request_timeout_s: longest from when a request comes, those before it graded, to its reply, for which a trainer
            waits 120 s; the answers that are left are abstentions.

    Raises:
        ValueError: an argument breaks its rule.
    """
    for name, value in (("timeout_s", timeout_s), ("request_timeout_s", request_timeout_s)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name} must be > 0 and finite, got {value}")
    try:
        version = version_of(open_rules(reward))
    except ValueError as exc:
        raise ValueError(f"scorer {PREFIX} {exc}") from exc
    return Scorer(_Grader(reward, version, timeout_s, request_timeout_s), media=(TEXT,), version=version, timed=True)


class _Grader:
    """A process that grades, begun anew after an answer that took it too long or ended it."""

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
            return Score(
                None,
                abstained=f"other answers took all of the {self._request_timeout_s:g} s from when the request came",
            )
        limit_s = min(self._timeout_s + START_S * (self._process is None), left_s)
        if self._process is None:
            context = get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(self._reward, self._version, theirs), daemon=True)
            self._process.start()
            theirs.close()
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
    """Grade what comes through the pipe until its other end is closed.

    With an answer comes the number of seconds after which the process ends itself: a server that was killed cannot do
    it, and a regular expression lets nothing else of the process run.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt from the keyboard is for the server, which drains
    rules = open_rules(reward)
    now = version_of(rules)
    while True:
        try:
            text, line, limit_s = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(limit_s, exit=True)
        reply: dict[str, object]
        try:
            if now != version:
                raise RuntimeError(f"its file must be as when the server began, {version}, got {now}")
            check_keys(rules, line, flag="the rule")
            [score] = grade(rules, [text], [line])
            reply = {"value": score.value, "parts": score.parts}
        except ValueError as exc:
            reply = {"abstained": str(exc) or repr(exc)}
        except Exception as exc:  # a user's function may raise anything
            reply = {"failed": f"{type(exc).__name__}: {exc}"}
        faulthandler.cancel_dump_traceback_later()
        pipe.send_bytes(json.dumps(reply).encode())
