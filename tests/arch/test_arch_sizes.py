"""How lines are counted."""

import count_lines


def test_only_lines_of_code_count():
    function = '@cache\ndef f(\n    x,\n):\n    """A."""\n    # why\n    return x + (  # what\n        1\n    )\n'
    assert count_lines.code_lines(function) == {1, 2, 3, 4, 7, 8, 9}
    text = '"""M.\n\nN."""\n\nTEXT = """\na\n\nb"""\n"loose"\n\nclass C:\n    """C."""\n'
    assert count_lines.code_lines(text) == {5, 6, 7, 8, 9, 11}
