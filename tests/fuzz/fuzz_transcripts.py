#!/usr/bin/env python3
"""Coverage-guided fuzzing of the readers of transcripts and corpora, with Atheris (libFuzzer for Python).

    python tests/fuzz/fuzz_transcripts.py --seconds 60

Starts from what the agents write (tests/transcripts.py), replaces values inside the JSON as well as bytes, and checks what
tests/transcript_checks.py promises for any content. The input that breaks it is kept in build/fuzz/ and the exit code is not
0; give that file as an argument to see the failure again. Needs `pip install atheris` (the extra `fuzz`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import atheris  # noqa: E402

with atheris.instrument_imports(include=["pyspark_moe.history"]):
    import pyspark_moe.history.corpus  # noqa: F401

import transcript_checks  # noqa: E402
import transcripts  # noqa: E402

TARGETS = ("claude-code", "codex", "corpus")  # chosen by an input's first byte
ODD: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 10**30, "", "x", "\ud800", "\0", [], {}, [[]], [None], {"type": "text"}, {"type": "text", "text": 1}, {"content": {}},
    "<system-reminder>", "</system-reminder>", "<environment_context>", "</environment_context>", "data:image/png;base64,AAAA", "QUJD" * 300,
    {"type": "image", "source": {"type": "base64"}}, "isMeta", "x" * 3000,
)


def seeds(folder: Path) -> None:
    """One input for each file that the agents write, and for a corpus of them, short enough to be changed often."""
    with tempfile.TemporaryDirectory() as home:
        written = transcripts.write_history(Path(home), n_projects=1, n_sessions=2, n_turns=1, lines=1)
        for first, files in enumerate((written.claude_code, written.codex)):
            for n, path in enumerate(files):
                (folder / f"{TARGETS[first]}-{n}").write_bytes(bytes([first]) + path.read_bytes())
        from pyspark_moe.history import History, default_folders

        corpus = Path(home) / "corpus"
        pyspark_moe.history.corpus.write_corpus(corpus, History.find(default_folders({}, Path(home))).conversations())
        for n, line in enumerate(corpus.read_bytes().splitlines(keepends=True)):
            (folder / f"corpus-{n}").write_bytes(bytes([2]) + line)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        container = stack.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container)) if isinstance(container, list) else ()
        found += [(container, key) for key in keys]
        stack += [container[key] for key in keys]
    return found


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time a value of one line is replaced by an odd one or by another line's, else bytes change as usual."""
    rng = random.Random(seed)
    lines = data[1:].split(b"\n")
    if rng.random() < 0.5 and len(data) > 2:
        at = rng.randrange(len(lines))
        try:
            value = json.loads(lines[at])
            found = places(value)
            if found:
                container, key = rng.choice(found)
                container[key] = rng.choice(ODD) if rng.random() < 0.7 else json.loads(rng.choice(lines))
                lines[at] = json.dumps(value).encode()
                return (data[:1] + b"\n".join(lines))[:max_size]
        except (ValueError, RecursionError):
            pass  # no JSON any more: bytes it is
    return bytes(atheris.Mutate(data, max_size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="how long, default 60")
    parser.add_argument("inputs", nargs="*", help="inputs to run once instead")
    options = parser.parse_args()
    kept = ROOT / "build/fuzz"
    kept.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(prefix="fuzz-")
    folder = Path(work.name)
    (folder / "seeds").mkdir()
    seeds(folder / "seeds")
    (folder / "files").mkdir()

    def one_input(data: bytes) -> None:
        target = TARGETS[data[0] % len(TARGETS)] if data else TARGETS[0]
        if target == "corpus":
            transcript_checks.check_corpus(data[1:], folder / "files")
        else:
            here = folder / target
            here.mkdir(exist_ok=True)
            for old in (here / "p").glob("*"):
                old.unlink()
            transcript_checks.check_transcript(data[1:], target, here)

    flags = [f"-max_total_time={options.seconds}", "-max_len=65536", "-timeout=20", "-rss_limit_mb=2048", f"-artifact_prefix={kept}/", "-print_final_stats=1"]
    atheris.Setup([sys.argv[0], *flags, *(options.inputs or [str(folder / "seeds")])], one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
