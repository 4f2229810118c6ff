# /// script
# requires-python = ">=3.11"
# dependencies = ["omni-reward[server,imagebind]"]
#
# [tool.uv.sources]
# omni-reward = { path = "../../packages/omni-reward", editable = true }
# ///
"""Serve ImageBind in a separate environment, to which --with adds Meta's code (CC BY-NC-SA 4.0).

    uv run --with git+https://github.com/facebookresearch/ImageBind scripts/scorers/imagebind.py --port 8104 \\
        --option weights=imagebind_huge.pth

The other options are those of `python -m omni_reward.server`; docs/scorers.md describes this scorer.
"""

import sys

del sys.path[0]  # this folder, in which this file has the same name as the code that it serves

from omni_reward.server import main  # noqa: E402

if __name__ == "__main__":
    main(["--scorer", "imagebind", *sys.argv[1:]])
