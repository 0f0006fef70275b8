#!/usr/bin/env python3
"""Builds llama-server's web UI with npm, once per version of its sources, and copies it where llama.cpp embeds it.

The result is kept in the cache (webui/<hash of the sources>), so that other checkouts and offline builds find it. When
npm fails, one line says why, and the server is built without the UI; that build folder does not try again. --strict tries
always, and makes a failure an error.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from upstream_source import default_cache, locked

INSTALL_LIMIT_S = 900
BUILD_LIMIT_S = 900


class WebUIError(Exception):
    """The UI could not be built; the text is npm's last words."""


def hash_sources(source: Path) -> str:
    """Hash of every file below `source` but the build's own output."""
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source).as_posix()
        if path.is_file() and not relative.startswith(("dist", "node_modules/")):
            digest.update(f"{relative} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]


def run_npm(npm: str, arguments: list[str], folder: Path, environment: dict[str, str], limit_s: int) -> None:
    """Runs npm; it and everything it started are ended when it takes too long or we are interrupted. Raises WebUIError."""
    process = subprocess.Popen(
        [npm, *arguments], cwd=folder, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise WebUIError(f"npm {' '.join(arguments[:2])} took longer than {limit_s} s") from None
        raise
    if process.returncode != 0:
        words = [line for line in output.splitlines() if "rror" in line] or output.splitlines()
        raise WebUIError(f"npm {' '.join(arguments[:2])} failed: {' | '.join(words[:3])}")


def build(source: Path, npm: str, version: str, target: Path) -> None:
    """Builds in a temporary folder next to `target`, then renames. Raises WebUIError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as name:
        work, dist = Path(name, "ui"), Path(name, "dist")
        shutil.copytree(source, work, ignore=shutil.ignore_patterns("dist", "dist.source", "node_modules"))
        dist.mkdir()
        run_npm(npm, ["ci", "--no-audit", "--no-fund", "--fetch-retries=1", "--prefer-offline"], work, {}, INSTALL_LIMIT_S)
        run_npm(npm, ["run", "build"], work, {"LLAMA_UI_OUT_DIR": str(dist), "LLAMA_UI_VERSION": version, "LLAMA_BUILD_NUMBER": "0"}, BUILD_LIMIT_S)
        if not (dist / "index.html").exists():
            raise WebUIError("npm run build ended well, but wrote no index.html")
        os.rename(dist, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="tools/ui of llama.cpp")
    parser.add_argument("--npm", required=True, help="the npm program")
    parser.add_argument("--into", type=Path, required=True, help="where llama.cpp looks for built assets")
    parser.add_argument("--version", required=True, help="shown by the UI")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    parser.add_argument("--strict", action="store_true", help="a failure is an error")
    args = parser.parse_args()

    name = hash_sources(args.source)
    cached: Path = args.cache / "webui" / name
    mark: Path = args.into.with_name(args.into.name + ".source")  # beside it: every file inside is embedded
    state = mark.read_text(encoding="utf-8") if mark.exists() else ""
    if state == name and args.into.exists():
        return 0
    if state == f"{name} failed" and not cached.exists() and not args.strict:
        return 0
    shutil.rmtree(args.into, ignore_errors=True)
    try:
        with locked(args.cache / "webui" / ".lock"):
            if not cached.exists():
                build(args.source, args.npm, args.version, cached)
    except WebUIError as error:
        print(f"web UI left out: {error}", file=sys.stderr)
        mark.write_text(f"{name} failed", encoding="utf-8")
        return 1 if args.strict else 0
    shutil.copytree(cached, args.into)
    mark.write_text(name, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
