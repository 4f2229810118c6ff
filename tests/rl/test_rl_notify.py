"""What a run announces reaches the terminal and the user's command, and a command that fails stops nothing."""

import pytest
from omni_rl.run import notify
from omni_rl.settings.fields import change
from omni_rl.settings.rules import check_notify
from trainer_runs import recipe, tiny

import train_flowgrpo as app

ARGS = tiny(recipe(app, "tiny-signs"), name="a run")


def told(command, capfd, **changes):
    """What the terminal shows of an announcement: standard output, and standard error."""
    notify.announce("it ends\nhere", change(ARGS, tracking_notify=command, **changes))
    return capfd.readouterr()


def test_a_command_gets_the_name_of_the_run_and_the_text_and_is_no_line_of_a_shell(tmp_path, capfd):
    out = tmp_path / "o; touch x"
    shown = told(f"tee '{out}'", capfd)
    assert (shown.out, shown.err) == ("it ends\nhere\n", "")
    assert out.read_text() == "a run: it ends\nhere\n"
    assert list(tmp_path.iterdir()) == [out]


def test_what_may_hold_a_token_is_only_printed(tmp_path, capfd):
    args = change(ARGS, tracking_notify=f"sh -c 'echo loud >&2; tee {tmp_path}/out'")
    notify.announce("it stops", args, more="; this continues: --scorer.token abc")
    assert capfd.readouterr() == ("it stops; this continues: --scorer.token abc\n", "")
    assert (tmp_path / "out").read_text() == "a run: it stops\n"


def test_a_dry_run_notifies_nobody(tmp_path, capfd):
    assert told(f"tee {tmp_path}/out", capfd, dry_run=True).out == "it ends\nhere\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("sh -c 'exit 3' token", "exit code 3"),
        ("sh -c 'sleep 9' token", "no end after 0.2 s"),
        ("/no/such/program token", "No such file or directory"),
    ],
)
def test_a_command_that_fails_is_a_line_without_its_token(command, why, monkeypatch, capfd):
    monkeypatch.setattr(notify, "WAIT_S", 0.2 if "sleep" in command else notify.WAIT_S)
    shown = told(command, capfd)
    assert shown.out == "it ends\nhere\n"
    assert shown.err == f"the command of --tracking.notify, which starts without a shell, failed: {why}\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [("'a", ": No closing quotation"), ("no-such-program token", ", got the program 'no-such-program'"), (" ", "''")],
)
def test_a_command_that_cannot_start_is_refused_without_its_arguments(command, why):
    with pytest.raises(ValueError, match=rf"^--tracking\.notify must be a program .*{why}$"):
        check_notify(command)
    check_notify("")
