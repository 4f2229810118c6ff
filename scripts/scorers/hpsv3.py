# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,hpsv3]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve HPSv3 in a separate environment.

    uv run scripts/scorers/hpsv3.py --port 8101 --option instruction=instruction.txt

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

from omni_reward.server import main

if __name__ == "__main__":
    main(["--scorer", "hpsv3", *sys.argv[1:]])
