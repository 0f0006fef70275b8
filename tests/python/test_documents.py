"""What the guide shows works when it is pasted (README has its own test), and the examples run."""
from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


GUIDE = (ROOT / "docs" / "guide" / "python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", GUIDE, re.M | re.S)


def run(*args: str, stdin: str = "") -> str:
    done = subprocess.run([sys.executable, *args], input=stdin, capture_output=True, text=True, timeout=300, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("number", range(3))
def test_block_of_the_guide(number: int) -> None:
    assert len(BLOCKS) == 3
    assert run("-c", BLOCKS[number]).strip()


def test_residency_example() -> None:
    out = run(str(ROOT / "examples" / "residency.py"), "--slots", "6", "--tokens", "8")
    rows = [line.split() for line in out.splitlines() if re.match(r"\s+\d+\s+\d+\s+\d+\s", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 8)) and "--spark-slots 6" in out
    assert all(int(row[2]) > 0 for row in rows) and "*" in out


def test_chat_example() -> None:
    out = run(str(ROOT / "examples" / "chat.py"), "--ram", "0.012", stdin="hello\n")
    assert re.search(r"\[\d+% hits\]", out)
    refused = subprocess.run([sys.executable, str(ROOT / "examples" / "chat.py"), "--ram", "0.0001"], input="", capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1 and "smallest budget" in refused.stderr and "Traceback" not in refused.stderr


def test_speculation_example() -> None:
    out = run(str(ROOT / "examples" / "speculation.py"), "--draft-tokens", "3")
    steps = re.findall(r"^([0-3]) of [0-3] in +[\d.]+ ms: b['\"]", out, re.M)
    assert len(steps) > 10 and "3" in steps and "def fibonacci(n):" in out
    assert re.search(r"tokens a step over \d+ steps; ms a step: draft [\d.]+ \(its heads [\d.]+\), verify [\d.]+, .*accepted by depth: \d+% \d+% \d+%", out)
