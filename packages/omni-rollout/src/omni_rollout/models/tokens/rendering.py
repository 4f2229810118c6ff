"""Program that renders a chat with a checkpoint's untrusted template, within 10 s and 2 GB.

Its input is a JSON object: the arguments of transformers' `render_jinja_template`, with special tokens separate.
"""

import json
import resource
import sys

from transformers.utils.chat_template_utils import render_jinja_template

if __name__ == "__main__":
    asked = json.load(sys.stdin)
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 10
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31))
    render_jinja_template(**asked.pop("special"), **asked, add_generation_prompt=True)
