"""The package is cheap to import, and its README's example runs."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "packages" / "omni-train" / "README.md"


def test_importing_the_package_imports_nothing_heavy():
    code = "import sys, omni_train; print(sorted({'torch', 'peft', 'safetensors', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_prompts_need_no_torch():
    code = "import sys, omni_train.data; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_the_readme_example_runs(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\na green sign\n")
    exec(compile(code, str(README), "exec"), {})
    assert capsys.readouterr().out.count("loss=") == 3
    assert (tmp_path / "run" / "metrics.jsonl").exists()
    assert (tmp_path / "run" / "adapter" / "pytorch_lora_weights.safetensors").exists()
