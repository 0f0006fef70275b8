"""Documents that are made from the program are up to date, and the check of that notices when they are not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import flags_page  # noqa: E402


def test_flags_in_the_documents_are_those_of_the_command() -> None:
    done = subprocess.run([sys.executable, "scripts/flags_page.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_changed_help_text_is_noticed(monkeypatch) -> None:  # noqa: ANN001
    original = flags_page.page()
    option = next(p for p in flags_page.command.params if p.name == "spark_ram")
    monkeypatch.setattr(option, "help", "something else")
    assert flags_page.page() != original and "something else" in flags_page.page()
    text = flags_page.README.read_text(encoding="utf-8")
    assert flags_page.readme(text) != text


def test_the_first_screen_of_the_readme_has_the_two_commands() -> None:
    first_screen = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:25]
    commands = [line.strip() for line in first_screen if line.strip().startswith("make ")]
    assert [c.split("#")[0].strip() for c in commands] == ["make demo", "make test"]
