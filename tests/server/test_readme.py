"""The README's Python lines work when pasted, and the demo does what README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_lines_of_python_work_when_pasted(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 1
    done = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+% of \d+ expert uses were in a fast slot", done.stdout)


def test_the_demo_answers_and_shows_its_figures() -> None:
    done = subprocess.run([sys.executable, "-m", "pyspark_moe.demo", "-t", "2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("Chat:", "Code completion", "tokens/s)", "hit rate", "fast slots", "misses", "promotions"):
        assert what in done.stdout, what


def test_a_demo_that_fails_says_why_and_is_not_0() -> None:
    done = subprocess.run([sys.executable, "-m", "pyspark_moe.demo", "--no-such-flag"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "invalid argument: --no-such-flag" in done.stderr and "before it was ready" in done.stderr
    without = subprocess.run([sys.executable, "-m", "pyspark_moe.demo", "--no-spark"], capture_output=True, text=True, timeout=120)
    assert without.returncode == 1 and "runs without residency" in without.stderr
