#!/usr/bin/env python3
"""The vendored llama.cpp: fetch the pinned sources, apply the patch series, and the way back.

    upstream.py fetch                     the pinned sdist, into the cache (with --sdist FILE: from there)
    upstream.py stage --into DIR          what a build does: pinned sources + whole series, only changed files are written
    upstream.py apply --into DIR          a tree to edit, with the series up to --upto PATCH
    upstream.py refresh --tree DIR        writes the edits of that tree into the last patch applied to it
    upstream.py check [--version X]       does the series apply, exactly (pinned) or at an offset (another version)?
    upstream.py stats                     changed lines of each patch

Only the standard library is used, neither `patch` nor `git` has to exist.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from patch_series import Patch, PatchError, apply_file, diff_file, parse_patch, reverse_file
from upstream_source import UNUSED, Pin, UpstreamError, adopt, default_cache, fetch, locked, read_pin, sha256_of, unpack, verify

ROOT = Path(__file__).resolve().parent.parent
STAMP = ".spark-stamp"  # written last into a staged tree: hash of pin and series
EDIT_MARK = ".spark-series"  # names the patches applied to a tree made for editing
SEARCH = 400  # lines a hunk may have moved in `check` and when later patches are rewritten by `refresh`

Overlay = dict[str, "str | None"]  # path -> content after the series; None: deleted


@dataclass(frozen=True)
class Context:
    """What every command works on: the pin, where patches are, the cache, an optional local source."""

    pin: Pin
    patches: Path
    cache: Path
    sdist: Path | None
    source: Path | None

    def pristine(self) -> Path:
        if self.source:
            if not (self.source / "ggml" / "CMakeLists.txt").exists():
                raise UpstreamError(f"{self.source} is not a llama.cpp source tree: it has no ggml/CMakeLists.txt")
            return self.source
        if self.sdist:
            verify(self.sdist, self.pin)
        ready = self.cache / "upstream" / f"{self.pin.version}-{self.pin.sha256[:16]}"
        if ready.exists():
            return ready  # verified when it was unpacked
        sdist = self.sdist or fetch(self.pin.version, self.cache, self.pin)
        return unpack(sdist, self.pin.version, self.pin.sha256, self.cache)

    def series(self) -> list[Patch]:
        return [parse_patch(path.name, path.read_text(encoding="utf-8")) for path in sorted(self.patches.glob("*.patch"))]


def read_text(path: Path) -> str | None:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except FileNotFoundError:
        return None


def apply_series(pristine: Path, series: Sequence[Patch], max_offset: int = 0) -> tuple[Overlay, list[str]]:
    """Contents of every patched file after the series, and a line for each hunk that was found at an offset.

    Verifies itself: undoing the series from the result must give the pristine files back. Raises PatchError.
    """
    overlay: Overlay = {}
    notes: list[str] = []
    for patch in series:
        for file in patch.files:
            before = overlay[file.path] if file.path in overlay else read_text(pristine / file.path)
            overlay[file.path], offsets = apply_file(patch.name, file, before, max_offset)
            for hunk, offset in zip(file.hunks, offsets):
                if offset:
                    notes.append(f"{patch.name}: {file.path}: {hunk.title} found {offset:+d} lines away")
    if not notes:
        verify_series(overlay, pristine, series)
    return overlay, notes


def verify_series(overlay: Overlay, pristine: Path, series: Sequence[Patch]) -> None:
    """Raises PatchError unless every hunk of the series is in `overlay` and nothing else is."""
    contents = dict(overlay)
    for patch in reversed(series):
        for file in reversed(patch.files):
            contents[file.path], _ = apply_file(f"{patch.name} (verification)", reverse_file(file), contents[file.path])
    for path, content in contents.items():
        if content != read_text(pristine / path):
            raise PatchError(f"{path}: undoing the series does not give the pristine file back; the patched tree is not what the patches say")


def stamp_of(context: Context) -> str:
    digest = hashlib.sha256(f"{context.pin.version} {context.source or context.pin.sha256}\n".encode())
    for path in sorted(context.patches.glob("*.patch")):
        digest.update(f"{path.name} {sha256_of(path)}\n".encode())
    return digest.hexdigest()[:16]


def write_if_changed(path: Path, content: bytes, mode: int = 0o644) -> bool:
    if path.is_file() and path.read_bytes() == content:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.chmod(partial, mode)
    os.replace(partial, path)
    return True


def sync_tree(pristine: Path, overlay: Overlay, target: Path) -> int:
    """Makes `target` equal to pristine + overlay; returns the number of files written or removed.

    A file that is right already keeps its modification time, so that a build tool compiles only what a changed patch
    touches. Files that came from the pristine tree carry its time; a changed one gets the time of now.
    """
    written = 0
    wanted: set[str] = set()
    for folder, folders, names in os.walk(pristine):
        if Path(folder) == pristine:
            folders[:] = [name for name in folders if name not in UNUSED]
            names = [name for name in names if name not in UNUSED]
        for name in names:
            source = Path(folder, name)
            relative = source.relative_to(pristine).as_posix()
            if relative in overlay:
                continue
            wanted.add(relative)
            path = target / relative
            have, want = path.stat() if path.exists() else None, source.stat()
            if have and (have.st_size, have.st_mtime_ns) == (want.st_size, want.st_mtime_ns):
                continue
            if have is None:
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, path)
                written += 1
            else:
                written += write_if_changed(path, source.read_bytes(), want.st_mode & 0o777)
    for relative, content in overlay.items():
        if content is not None:
            wanted.add(relative)
            written += write_if_changed(target / relative, content.encode("utf-8"))
    for folder, _, names in os.walk(target):
        for name in names:
            path = Path(folder, name)
            relative = path.relative_to(target).as_posix()
            if relative not in wanted and relative not in (STAMP, EDIT_MARK, ".partial") and not relative.startswith("tools/ui/dist"):
                path.unlink()
                written += 1
    return written


def command_fetch(context: Context, args: argparse.Namespace) -> int:
    if context.sdist:
        adopt(context.sdist, context.pin, context.cache)
    print(fetch(context.pin.version, context.cache, context.pin))
    return 0


def command_stage(context: Context, args: argparse.Namespace) -> int:
    target: Path = args.into.resolve()
    if target.exists() and any(target.iterdir()) and not (target / STAMP).exists() and not (target / ".partial").exists():
        raise UpstreamError(f"{target} exists and was not made by this tool; give another folder, or remove it")
    series = [] if args.unpatched else context.series()
    with locked(target.parent / f".{target.name}.lock"):
        pristine = context.pristine()
        overlay, _ = apply_series(pristine, series)
        target.mkdir(parents=True, exist_ok=True)
        (target / ".partial").touch()
        (target / STAMP).unlink(missing_ok=True)
        written = sync_tree(pristine, overlay, target)
        verify_series({path: read_text(target / path) for path in overlay}, pristine, series)
        (target / STAMP).write_text(("unpatched" if args.unpatched else stamp_of(context)) + "\n", encoding="utf-8")
        (target / ".partial").unlink(missing_ok=True)
    print(f"upstream: llama.cpp {context.pin.commit} of {context.pin.version}, {len(series)} patches, {written} files changed")
    return 0


def select_upto(series: list[Patch], name: str | None) -> list[Patch]:
    if name is None:
        return series
    matches = [i for i, patch in enumerate(series) if patch.name == name or patch.name.startswith(f"{name}-")]
    if len(matches) != 1:
        raise UpstreamError(f"no patch is called {name!r}; the series has {', '.join(patch.name for patch in series) or 'none'}")
    return series[: matches[0] + 1]


def command_apply(context: Context, args: argparse.Namespace) -> int:
    target: Path = args.into.resolve()
    if target.exists() and any(target.iterdir()) and not (target / EDIT_MARK).exists():
        raise UpstreamError(f"{target} exists and was not made by this tool; give another folder, or remove it")
    series = select_upto(context.series(), args.upto)
    pristine = context.pristine()
    overlay, _ = apply_series(pristine, series)
    target.mkdir(parents=True, exist_ok=True)
    sync_tree(pristine, overlay, target)
    (target / EDIT_MARK).write_text("".join(f"{patch.name}\n" for patch in series), encoding="utf-8")
    print(f"{len(series)} patches applied in {target}")
    print(f"edit there, then: {Path(sys.argv[0]).name} refresh --tree {target}")
    return 0


def command_refresh(context: Context, args: argparse.Namespace) -> int:
    tree: Path = args.tree.resolve()
    mark = read_text(tree / EDIT_MARK)
    if not mark:
        raise UpstreamError(f"{tree} is not a tree that `apply` made with at least one patch")
    series = context.series()
    names = mark.split()
    if [patch.name for patch in series[: len(names)]] != names:
        raise UpstreamError(f"the series has changed since {tree} was made; apply again into a new folder and repeat the edit there")
    pristine = context.pristine()
    before, _ = apply_series(pristine, series[: len(names) - 1])
    after: Overlay = dict(before)
    for path in _tree_files(tree) | set(before) | _tree_files(pristine):
        content = read_text_or_skip(tree / path)
        if content != (before[path] if path in before else read_text_or_skip(pristine / path)):
            after[path] = content
    contents = [before, after]
    for patch in series[len(names) :]:
        later = dict(contents[-1])
        for file in patch.files:
            old = later[file.path] if file.path in later else read_text(pristine / file.path)
            later[file.path], _ = apply_file(patch.name, file, old, SEARCH)
        contents.append(later)
    for number, patch in enumerate(series[len(names) - 1 :]):
        old, new = contents[number], contents[number + 1]
        changed = sorted(path for path in new if path not in old or old[path] != new[path])
        body = "".join(diff_file(path, old[path] if path in old else read_text(pristine / path), new[path]) for path in changed)
        if write_if_changed(context.patches / patch.name, (patch.header + body).encode("utf-8")):
            print(f"rewritten: {patch.name}")
    apply_series(pristine, context.series())
    print(f"{len(series)} patches apply exactly")
    return 0


def _tree_files(root: Path) -> set[str]:
    paths: set[str] = set()
    for folder, folders, names in os.walk(root):
        if Path(folder) == root:
            folders[:] = [name for name in folders if name not in UNUSED]
            names = [name for name in names if name not in UNUSED and name not in (EDIT_MARK, STAMP)]
        paths.update(Path(folder, name).relative_to(root).as_posix() for name in names)
    return paths


def read_text_or_skip(path: Path) -> str | None:
    """Text of a file; a binary file reads as a description of its bytes, equal for equal files."""
    try:
        return read_text(path)
    except UnicodeDecodeError:
        return f"binary {sha256_of(path)}"


def command_check(context: Context, args: argparse.Namespace) -> int:
    other = args.version not in (None, context.pin.version)
    if other:
        sdist = context.sdist or fetch(args.version, context.cache)
        pristine = context.source or unpack(sdist, args.version, sha256_of(sdist), context.cache)
    else:
        pristine = context.pristine()
    overlay: Overlay = {}
    failed = 0
    for patch in context.series():
        for file in patch.files:
            before = overlay[file.path] if file.path in overlay else read_text(pristine / file.path)
            try:
                overlay[file.path], offsets = apply_file(patch.name, file, before, SEARCH if other else 0)
            except PatchError as error:
                failed += 1
                print(f"FAILS   {error}")
            else:
                moved = [f"{offset:+d}" for offset in offsets if offset]
                print(f"{'moved ' if moved else 'exact '}  {patch.name}: {file.path}: {len(offsets)} hunks{' ' + ' '.join(moved) if moved else ''}")
    if failed:
        print(f"{failed} files do not take their hunks. For each: apply --upto the patch before, edit by hand, refresh")
    return 1 if failed else 0


def command_stats(context: Context, args: argparse.Namespace) -> int:
    total = 0
    for patch in context.series():
        total += patch.changed_lines
        print(f"{patch.changed_lines:5d}  {len(patch.files):2d} files  {patch.name}")
    print(f"{total:5d}  changed lines in all")
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--patches", type=Path, default=ROOT / "patches", help="folder of UPSTREAM and the series")
    top.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    top.add_argument("--sdist", type=Path, help="a local copy of the pinned sdist instead of PyPI")
    top.add_argument("--source", type=Path, help="an unpacked, unpatched llama.cpp instead of an sdist")
    commands = top.add_subparsers(dest="command", required=True, metavar="fetch | stage | apply | refresh | check | stats")
    commands.add_parser("fetch").set_defaults(run=command_fetch)
    stage = commands.add_parser("stage")
    stage.add_argument("--into", type=Path, required=True)
    stage.add_argument("--unpatched", action="store_true", help="leave the series out (the stock build of comparisons)")
    stage.set_defaults(run=command_stage)
    edit = commands.add_parser("apply")
    edit.add_argument("--into", type=Path, required=True)
    edit.add_argument("--upto", help="last patch to apply: its file name or its number")
    edit.set_defaults(run=command_apply)
    refresh = commands.add_parser("refresh")
    refresh.add_argument("--tree", type=Path, required=True)
    refresh.set_defaults(run=command_refresh)
    check = commands.add_parser("check")
    check.add_argument("--version", help="try the series on this sdist version (default: the pinned one)")
    check.set_defaults(run=command_check)
    commands.add_parser("stats").set_defaults(run=command_stats)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        context = Context(read_pin(args.patches / "UPSTREAM"), args.patches, args.cache, args.sdist, args.source)
        return int(args.run(context, args))
    except (UpstreamError, PatchError) as error:
        print(f"upstream: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
