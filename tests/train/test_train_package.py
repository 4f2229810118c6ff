"""The package is cheap to import."""

import subprocess
import sys


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, omni_train; print(sorted({'torch', 'peft', 'safetensors', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_prompts_need_no_torch():
    code = "import sys, omni_train.prompts.sampler; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
