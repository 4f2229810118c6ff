"""What a terminal shows of failures and mistakes: no control characters and no passwords of texts of other hands."""

import logging
import sys
import warnings
from contextlib import suppress

import pytest
from omni_reward import cli as reward_cli
from omni_rl.run import failures
from omni_rl.run.failures import BrokenRunError, advise
from omni_rl.run.notify import announce
from omni_rl.settings.cli import exit_with_error, silence_libraries
from omni_rl.settings.fields import change
from omni_rl.settings.printing import Parser
from omni_rl.tools import command
from omni_train.breaker import Breaker
from omni_train.terminal import printable

import train_nft

FOREIGN = "no\x1b[2J \x07\u202ego\udc80: https://me:secret@host/a and s3://me:secret@b\nnext"
ARGS = train_nft.Args()


def of_mistake(error):
    failures.report_mistake(error)


def of_failure(error):
    failures.report_failure(BrokenRunError("update", error), ARGS)


def of_command(error):
    def fail(words):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "python_args", fail)
        patch.setattr(sys, "argv", ["omni-rl", "serve"])
        command.main()


def of_warning(error):
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        patch.setattr(warnings, "showwarning", lambda *row: sys.stderr.write(warnings.formatwarning(*row[:4])))
        silence_libraries()
        warnings.warn(str(error), stacklevel=1)


def of_uncaught(error):
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(warnings, "formatwarning", warnings.formatwarning)
        silence_libraries()
        sys.excepthook(type(error), error, error.__traceback__)


LINES = {  # what prints a mistake -> the lines that it takes
    "the settings": (exit_with_error, 1),
    "a start": (of_mistake, 1),
    "omni-rl": (of_command, 1),
    "a tool": (lambda error: Parser(prog="omni-rl push").error(str(error)), 1),
    "a warning": (of_warning, 1),
    "what only shows": (lambda error: Breaker("the report").fail(str(error)), 1),
    "what shows again": (lambda error: Breaker("a tracker", keeps_going=True).fail(str(error)), 1),
    "a failure": (of_failure, 7),
    "an alarm": (lambda error: announce(str(error), ARGS, sys.stderr), 2),
    "an uncaught error": (of_uncaught, 2),
}


@pytest.mark.parametrize("place", LINES)
def test_a_text_of_other_hands_is_shown_without_control_characters_and_passwords(place, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train_nft.py"])
    show, lines = LINES[place]
    with suppress(SystemExit):
        show(ValueError(FOREIGN))
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", lines), err
    assert all(letter.isprintable() or letter == "\n" for letter in err)
    assert "secret" not in err
    assert "https://host/a and s3://b" in err


def test_only_what_stands_before_a_host_is_taken_for_a_password():
    told = "no answer: http://me:sec'ret@h:1/a?to=me@b, http://h?to=me@b, http://h#me@b, 's3://key@b/c'"
    bare = "no answer: http://h:1/a?to=me@b, http://h?to=me@b, http://h#me@b, 's3://b/c'"
    assert printable(told) == bare


def test_the_reward_server_shows_no_control_characters(capfd):
    with pytest.raises(SystemExit):
        reward_cli.build_parser().error("no\x1b[2J \x07go")
    assert capfd.readouterr().err == "omni_reward.server: error: no [2J  go\n"


def test_the_log_of_the_reward_server_shows_no_control_characters():
    record = logging.LogRecord("a", logging.ERROR, "", 1, "of %r:\x1b[2J\x07\nnext", ("x",), None)
    assert reward_cli.PrintableFormatter("%(message)s").format(record) == "of 'x': [2J \nnext"


@pytest.mark.parametrize("fault", [OSError, PermissionError, RuntimeError])
def test_a_store_that_fails_is_told_as_such_without_a_traceback(fault, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train_nft.py"])
    args, error = change(ARGS, checkpoint_url="s3://bucket/run/"), fault("s3://bucket/run/lock: Permission denied")
    failures.report_failure(BrokenRunError("save", error), args)
    told = capfd.readouterr().err.splitlines()
    assert told[0] == f"train_nft.py: rank 0, phase save: {fault.__name__}: s3://bucket/run/lock: Permission denied"
    assert told[1].startswith("The store of --checkpoint-url refused or did not answer: ")
    assert "disk" in advise(OSError("runs/run: Permission denied"), args)
    assert "disk" in advise(error, ARGS) or fault is RuntimeError
