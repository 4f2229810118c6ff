# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,aesthetic]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve LAION's aesthetic score in a separate environment.

    uv run scripts/scorers/aesthetic.py --port 8101 --option head=sac+logos+ava1-l14-linearMSE.pth

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

from omni_reward.server import main

if __name__ == "__main__":
    main(["--scorer", "aesthetic", *sys.argv[1:]])
