# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,clap]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve CLAP in a separate environment.

    uv run scripts/scorers/clap.py --port 8101

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

from omni_reward.server import main

if __name__ == "__main__":
    main(["--scorer", "clap", *sys.argv[1:]])
