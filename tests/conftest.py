"""For all tests: a home folder of their own, and CUDA tests that say why they do not run."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shell's background job ignores Ctrl-C, and so would every server that a test starts there.
signal.signal(signal.SIGINT, signal.default_int_handler)

# More examples, and new ones each time, than the ordinary run has: pytest tests/fuzz --hypothesis-profile fuzz
settings.register_profile("fuzz", max_examples=4_000, deadline=None)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the home of the person who runs it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / ".config"))
    for name in ("CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("nvidia-smi"):
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA driver here (nvidia-smi is not found)"))
