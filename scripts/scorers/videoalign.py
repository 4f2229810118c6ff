# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,videoalign]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve VideoAlign in a separate environment.

    uv run scripts/scorers/videoalign.py --port 8101 --option instruction=instruction.txt

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

from omni_reward.server import main

if __name__ == "__main__":
    main(["--scorer", "videoalign", *sys.argv[1:]])
