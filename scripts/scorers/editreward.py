# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,editreward]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve EditReward in a separate environment.

    uv run scripts/scorers/editreward.py --port 8101 --option following=following.txt --option quality=quality.txt

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

from omni_reward.server import main

if __name__ == "__main__":
    main(["--scorer", "editreward", *sys.argv[1:]])
