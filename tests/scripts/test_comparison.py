"""README's comparison is what its facts give, each of which has a source, and our numbers are those of the tables."""

import comparison


def test_names_are_counted_and_words_stay():
    rows = [
        {
            "title": "t",
            "omni-rl": "{models}",
            "a": {"names": ["x", "y"], "source": "#1"},
            "b": {"says": "no", "source": "."},
        }
    ]
    peers = {name: {"url": f"https://git.com/{name}", "commit": name * 40, "date": "May 2026"} for name in "ab"}
    facts = {"peers": peers, "rows": rows}
    assert f"| t | {comparison.counts()['models']} | 2 | no |\n" in comparison.table(facts)
    page = comparison.sources(facts)
    assert "| a | 2: x, y | [#1](https://git.com/a/issues/1) |\n" in page
    assert f"| b | no | [.](https://git.com/b/tree/{'b' * 40}) |\n" in page
