"""The table of models and algorithms: what was run is written, and what was not stays."""

from model_table import table

BLOCK = """| model | nft | srpo | run |
|---|---|---|---|
| a | yes | yes | monday |
| b | yes |  | monday |
"""


def test_rows_that_are_run_anew_replace_theirs_and_others_stay():
    found = table(["b: nft", "b: srpo", "c: nft"], "friday", BLOCK)
    assert found.splitlines()[2:] == [
        "| a | yes | yes | monday |",
        "| b | yes | yes | friday |",
        "| c | yes |  | friday |",
    ]


def test_a_column_that_is_run_alone_leaves_the_others_and_says_when():
    once = table(["a: distill", "b: distill"], "friday", BLOCK, only="distill")
    assert once.splitlines() == [
        "| model | nft | srpo | distill | run |",
        "|---|---|---|---|---|",
        "| a | yes | yes | yes | monday; distill friday |",
        "| b | yes |  | yes | monday; distill friday |",
    ]
    again = table(["a: distill"], "sunday", once, only="distill")
    assert again == once.replace(
        "| a | yes | yes | yes | monday; distill friday |", "| a | yes | yes | yes | monday; distill sunday |"
    )
