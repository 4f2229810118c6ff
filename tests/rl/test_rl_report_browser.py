"""The report in a real browser: it draws itself without an error or a request, moves, reads, and fits every screen.

`scripts/chromium` finds or installs the browser.
"""

import json
import os
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
from helpers import REPO
from omni_rl.report import (
    Sample,
    write_comparison,
    write_eval,
    write_report,
    write_samples,
    write_versions,
)
from omni_rl.report.serve import LiveServer
from playwright.sync_api import Page, sync_playwright
from rl.report_runs import RATES, clips, images, metrics, tone, write_metrics, write_run

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
HOSTILE = '</script><img src=x onerror="window.hacked = 1"><script>window.hacked = 1</script>{{data}} \' & \u2028'


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    found = subprocess.run([REPO / "scripts" / "chromium", "--find"], capture_output=True, text=True)
    assert found.returncode == 0, "no Chromium to draw the report in: run scripts/chromium, which installs one"
    with sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("profile"), executable_path=found.stdout.strip(), args=FLAGS.split()
        )
        yield context
        context.close()


@contextmanager
def watched(browser):
    """A page; whatever it logs or throws fails the test."""
    page: Page = browser.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_viewport_size({"width": 1280, "height": 900})
    yield page
    page.close()
    assert wrong == []


@pytest.fixture
def show(browser):
    """`show(path)` opens a page, which may request only itself."""
    opened, requested = {"data:"}, []
    with watched(browser) as page:
        page.on("request", lambda request: requested.append(request.url))

        def show(path, *, width=1280, scheme="light") -> Page:
            opened.add(path.as_uri())
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.goto(path.as_uri())
            page.wait_for_function("[...document.images].every((image) => image.complete)")
            return page

        yield show
    assert [url for url in requested if not url.startswith(tuple(opened))] == []


def headings(page: Page) -> list[str]:
    return page.locator("h2").all_inner_texts()


def legend(page: Page, title: str) -> str:
    return (
        page.locator(".chart", has=page.locator("h3", has_text=title))
        .locator(".legend")
        .inner_text()
        .replace("\n", " ")
    )


def test_the_report_shows_all_that_a_run_has(show, tmp_path):
    page = show(write_report(write_run(tmp_path / "run")))
    assert page.title() == page.locator("h1").inner_text() == "run"
    assert headings(page) == ["Alarms", "Images", "Recent groups", "Policy", "Time and memory", "Settings"]
    assert page.locator(".status").inner_text().split()[:6] == ["finished", "12", "steps", "in", "26", "s"]
    assert "0.00 \u2192 0.24" in page.locator(".tiles").inner_text()
    assert page.evaluate("[...document.images].every((image) => image.naturalWidth === 96)")
    assert page.locator(".chart svg path").count() >= 3
    assert page.locator(".alarms").inner_text().split("\n")[0] == "Updates were skipped"
    assert "python apps/train.py --lr 1e-4" in page.locator("pre").inner_text()
    assert "flowgrpo" in page.locator(".settings").first.inner_text()
    page = show(tmp_path / "run" / "report.html", width=375, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 375


def test_what_a_run_lacks_is_left_out(show, tmp_path):
    write_metrics(tmp_path / "run", [{"step": 1, "loss": 0.5, "time/step_s": 1.0}])
    page = show(write_report(tmp_path / "run"))
    assert headings(page) == ["Time and memory"]
    page.locator("summary").click()
    assert legend(page, "loss") == "value 0.5"
    write_metrics(tmp_path / "new", [])
    assert "No step is logged yet" in show(write_report(tmp_path / "new")).locator("main").inner_text()


def test_the_slider_moves_the_images_and_stays_where_it_was(show, tmp_path):
    page = show(write_report(write_run(tmp_path / "run")))
    slider, card = page.get_by_role("slider", name="Evaluation"), page.locator(".card").first
    assert card.locator(".label").all_inner_texts() == ["step 0", "step 12"]
    last = card.locator("img").nth(1).get_attribute("src")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert slider.get_attribute("aria-valuetext") == "after 8 steps held-out 0.16"
    assert card.locator(".label").all_inner_texts() == ["step 0", "step 8"]
    assert "read AT8" in card.inner_text()
    assert card.locator("img").nth(1).get_attribute("src") != last
    assert legend(page, "Reward") == "held-out 0.16 training 0.08"  # the charts follow
    page.reload()
    assert page.locator("output").inner_text().startswith("after 8 steps")


def test_a_going_run_offers_to_reload_and_others_do_not(show, tmp_path):
    folder = write_run(tmp_path / "run", total=40)
    page = show(write_report(folder))
    assert "running step 12 of 40, about 56 s left" in " ".join(page.locator(".status").inner_text().split())
    assert page.get_by_label("reload every 30 s").is_checked()
    page.get_by_label("reload every 30 s").uncheck()
    page.reload()
    assert not page.get_by_label("reload every 30 s").is_checked()
    long_ago = time.time() - 3600
    os.utime(folder / "metrics.jsonl", (long_ago, long_ago))
    page = show(write_report(folder))
    assert page.locator(".status").inner_text().startswith("stopped")
    assert page.get_by_label("reload every 30 s").count() == 0


def test_runs_are_compared_on_one_page(show, tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", num_steps=8, lr=1e-3)]
    page = show(write_comparison(folders, tmp_path / "both.html"))
    assert page.locator("h1").inner_text() == "2 runs"
    assert legend(page, "Reward: held-out") == "a 0.24 b 0.16 at 8"
    table = page.get_by_role("region", name="Table of settings").inner_text().split()
    assert table == ["Setting", "a", "b", "name", "a", "b", "train_steps", "12", "8", "lr", "0.0001", "0.001"]
    card = page.locator(".card").first
    assert card.locator(".label").all_inner_texts() == ["a, step 12", "b, step 8"]
    page.get_by_role("slider", name="Evaluation").press("Home")
    assert card.locator(".label").all_inner_texts() == ["a, step 0", "b, step 0"]


def test_a_comparison_says_where_runs_are_not_scored_alike(show, tmp_path):
    folders = [write_run(tmp_path / name) for name in "ab"]
    given = {"a": ("ocr", "test.txt"), "b": ("jpeg", "other.txt")}
    assert show(write_comparison(folders, tmp_path / "alike.html")).locator(".unlike").count() == 0
    for folder in folders:
        scorer, prompts = given[folder.name]
        with (folder / "config.toml").open("a") as file:
            file.write(f'[scorer]\nname = "{scorer}"\n[eval]\nprompts = "{prompts}"\nevery = 2\n')
    told = show(write_comparison(folders, tmp_path / "both.html")).locator(".unlike").inner_text().split("\n")
    assert told[0].startswith("The scores of these runs are not comparable.")
    assert told[1:] == ["scorer.name: a ocr, b jpeg", "eval.prompts: a test.txt, b other.txt"]


BAND = """chart => {
    const one = chart.querySelector(".band").parentNode;
    const numbers = (kind) => one.querySelector(kind).getAttribute("d").match(/[\\d.]+/g).map(Number);
    const [line, band] = [numbers(".line"), numbers(".band")];
    return [line[1], band[1], band[band.length - 1]];
}"""  # of the first point, in pixels from above: the line, and the upper and the lower end of its band


def test_a_held_out_score_stands_in_a_band_of_its_standard_error_also_in_a_comparison(show, tmp_path):
    for name, count in (("a", 12), ("b", 8)):
        lines = metrics(count)
        for line in lines:
            line |= {"eval/reward_stderr": 0.02} if "eval/reward" in line else {}
        write_metrics(tmp_path / name, lines)
    page = show(write_report(tmp_path / "a"))
    assert legend(page, "Reward") == "held-out 0.24 \u00b1 0.02 training 0.12"
    chart = page.locator(".chart", has=page.locator("h3", has_text="Reward"))
    assert chart.locator(".note").inner_text().endswith("The shade is one standard error over the prompts.")
    line, upper, lower = chart.evaluate(BAND)
    assert upper < line < lower
    assert line - upper == pytest.approx(lower - line, abs=0.2)
    assert page.locator("summary").count() == 0  # it is no metric of its own
    page = show(write_comparison([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html"))
    assert legend(page, "Reward: held-out") == "a 0.24 \u00b1 0.02 b 0.16 \u00b1 0.02 at 8"
    assert page.locator(".chart", has=page.locator("h3", has_text="Reward")).locator(".band").count() == 2


@pytest.fixture
def live(browser, tmp_path):
    """`live(path)` opens a page of the server of `tmp_path`."""
    server = LiveServer(tmp_path)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [server.socket]})
    thread.start()
    with watched(browser) as page:

        def open_page(path="") -> Page:
            page.goto(server.url + path)
            return page

        yield open_page
    server.should_exit = server.force_exit = True
    thread.join()


def test_the_list_follows_runs_and_leads_to_their_comparison(live, tmp_path):
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", num_steps=8, total=40, lr=1e-3)]
    (tmp_path / HOSTILE.replace("/", "")[:60]).mkdir()
    (tmp_path / HOSTILE.replace("/", "")[:60] / "metrics.jsonl").write_text("[]\n[]\n")
    page = live()
    row = page.locator("tr", has=page.get_by_role("link", name="b", exact=True))
    row.wait_for()
    assert "running" in row.inner_text()
    assert "step 8 of 40, about" in row.inner_text()
    assert "0.00 \u2192 0.16" in row.inner_text()
    page.get_by_label("Compare a", exact=True).check()
    page.get_by_label("Compare b", exact=True).check()
    with (folders[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "eval/reward": 0.5}\n')
    row.get_by_text("step 9 of 40").wait_for()
    assert "0.0 \u2192 0.5" in row.inner_text()
    assert page.get_by_label("Compare b", exact=True).is_checked()  # what was chosen stays
    assert page.evaluate("window.hacked") is None
    page.get_by_role("link", name="Compare 2 runs").click()
    page.locator(".card img").nth(5).scroll_into_view_if_needed()
    page.wait_for_function("() => [...document.images].every((image) => image.complete && image.naturalWidth === 96)")
    assert page.locator(".card").first.locator(".label").all_inner_texts() == ["a, step 12", "b, step 8"]
    assert legend(page, "Reward: held-out") == "a 0.24 b 0.50 at 9"
    page.get_by_role("link", name="all runs").click()
    row.wait_for()


def test_samples_are_chosen_by_prompt_and_score_and_stay_so(live, tmp_path):
    folder = write_run(tmp_path / "a")
    words = [Sample(f"a {color} sign", i / 10, i, i) for i, color in enumerate(["red", "green", "blue"] * 3 + ["red"])]
    for step in (0, 12):
        write_eval(folder, step, images(10, seed=step), words)
    page = live("report?run=a")
    cards, bar = page.locator("section[aria-labelledby=images] .card:visible"), page.get_by_role("search").first
    assert cards.count() == 8
    bar.get_by_placeholder("Prompt contains").fill("RED")
    assert cards.locator("figcaption").all_inner_texts() == ["a red sign"] * 4
    bar.get_by_label("Lowest score").fill("0.3")
    bar.get_by_label("Highest score").fill("0.8")
    assert cards.locator(".pane:nth-child(2) .pane-head strong").all_inner_texts() == ["0.30", "0.60"]
    assert bar.locator("output").inner_text() == "2 of 10"
    page.reload()
    assert cards.count() == 2
    bar.get_by_placeholder("Prompt contains").fill("nothing like it")
    assert cards.count() == 0


def test_text_from_files_stays_text(show, tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "").replace("\0", "")[:60]
    lines = [step | {HOSTILE: 1.0 + step["step"]} for step in metrics(4)]
    write_metrics(folder, [*lines[:-1], lines[-1] | {HOSTILE: None}])  # raises an alarm of its name
    (folder / "config.toml").write_text(f"train_steps = 4\nevil = {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)} = 1\n")
    row = Sample(HOSTILE, 0.5, 0, 0, {"read": HOSTILE, HOSTILE: HOSTILE})
    for step in (0, 4):
        write_eval(folder, step, images(2), [row, Sample(HOSTILE, None, 1, 1, {}, HOSTILE)])
    write_samples(folder, 4, images(1), [row])
    (folder / "versions.jsonl").write_text(json.dumps({"command": HOSTILE, "commit": HOSTILE, HOSTILE: HOSTILE}) + "\n")
    other = write_run(tmp_path / "other")
    for path in (write_report(folder), write_comparison([folder, other], tmp_path / "both.html")):
        page = show(path)
        for summary in page.locator("summary").all():
            summary.click()
        page.wait_for_timeout(50)
        assert page.evaluate("window.hacked") is None
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("script").count() == 2
        assert HOSTILE.strip() in page.locator(".card figcaption").first.text_content()
        assert page.locator(".alarms strong").first.text_content() == f"{HOSTILE} is not finite"


def test_a_script_that_got_in_all_the_same_would_not_run(browser, tmp_path):
    page = browser.new_page()
    page.goto(write_report(write_run(tmp_path / "run")).as_uri())
    page.evaluate("""() => {
      document.body.insertAdjacentHTML("beforeend", '<img src="x" onerror="window.hacked = 1">');
      const script = document.createElement("script");
      script.textContent = "window.hacked = 1";
      document.body.append(script);
    }""")
    page.wait_for_timeout(50)
    assert page.evaluate("window.hacked") is None
    page.close()


def test_an_edit_shows_its_references_beside_it_and_they_have_no_score(show, tmp_path):
    folder = write_run(tmp_path / "run")
    first, second = images(2, 32, 96, seed=5)
    rows = [
        Sample("a red sign", 0.3, 0, 0, {"read": "AB"}, references=(first,)),
        Sample("a blue sign", 0.9, 1, 1, {"read": "CD"}, references=(first, second)),
    ]
    for step in (0, 12):
        write_eval(folder, step, images(2, seed=step), rows)
    write_samples(folder, 12, images(2), rows)
    page = show(write_report(folder))
    one, two = page.locator(".card").nth(0), page.locator(".card").nth(1)
    assert one.locator(".label").all_inner_texts() == ["reference", "step 0", "step 12"]
    assert two.locator(".label").all_inner_texts() == ["reference 1", "reference 2", "step 0", "step 12"]
    assert one.locator(".pane").first.inner_text().strip() == "reference"
    group = page.locator("section", has=page.locator("h2", has_text="Recent groups")).locator(".card").nth(1)
    assert group.locator(".label").all_inner_texts() == ["reference 1", "reference 2", "the only score"]


def test_videos_and_sounds_play_in_the_page_and_from_the_server(show, live, tmp_path):
    folder = write_run(tmp_path / "a")
    write_eval(folder, 12, clips(1, height=96, width=160), [Sample("a sign", 0.5, rates=RATES)])
    write_samples(folder, 12, [{"audio": tone()}] * 2, [Sample("a tone", i / 2, 0, i, rates=RATES) for i in range(2)])
    for page in (show(write_report(folder)), live("report?run=a")):
        pane = page.locator(".card .pane", has=page.locator("video")).first
        pane.scroll_into_view_if_needed()  # before that it waits
        page.wait_for_function("(v) => v.currentTime > 0", arg=pane.locator("video").element_handle())
        groups = page.locator("section", has=page.locator("h2", has_text="Recent groups"))
        for sound in (pane.locator("audio"), groups.locator("audio").first):
            sound.scroll_into_view_if_needed()
            sound.evaluate("(a) => { a.muted = true; return a.play(); }")
            page.wait_for_function("(a) => a.currentTime > 0", arg=sound.element_handle())


def test_changed_settings_come_first(show, tmp_path):
    folder = write_run(tmp_path / "run")
    write_versions(folder, argv=["apps/train.py"], changed=["name", "lr"])
    page = show(write_report(folder))
    assert page.locator(".settings").first.locator("dt").all_inner_texts() == ["name", "lr"]
    page.get_by_text("2 settings at the default").click()
    assert page.get_by_text("algo", exact=True).is_visible()
