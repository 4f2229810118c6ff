# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,clip]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve CLIP in a separate environment.

    uv run scripts/scorers/clip.py --port 8101

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

from omni_reward.server import main

if __name__ == "__main__":
    main(["--scorer", "clip", *sys.argv[1:]])
