#!/usr/bin/env python3
"""The house rules that a program can check; exits 1 and names file, line and rule for each that is broken.

Sizes of files, a budget for the patch series and the header of each patch, which part of the package may import which,
no configuration in environment variables, no architecture names outside tests, no machine's paths, Python 3.10 syntax.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from patch_series import PatchError, parse_patch

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600  # aim at 400
MAX_LINES_TESTS = 800
MAX_PATCH_LINES = 400
PATCH_HEADER = ("Subject: [PATCH]", "Why:", "Class:", "Forwarded:", "Last-Update:", "Remove-when:", "Test:")
CODE = {".py", ".cpp", ".h", ".cu", ".cuh", ".c"}
TEXT = CODE | {".md", ".toml", ".cmake", ".txt", ".patch", ".sh", ".yml"}
GENERATED = ("tests/data/", "benchmarks/results/", "pyspark_moe/data/")

# Importable alone: no library is loaded and no other layer is needed to test them.
PURE = {
    "config", "errors", "model_info", "budget", "placement", "routing_profile", "history", "shared_file",
    "fingerprint", "model_profile", "device_placement", "routing_trace", "simulator",
}
NATIVE = ("pyspark_moe._native", "llama_cpp", "cffi")
# The loader tells llama-cpp-python where its libraries are, in the way that package asks for; XDG_CACHE_HOME is a convention.
ENVIRONMENT_ALLOWED = {"pyspark_moe/_native.py", "pyspark_moe/bootstrap.py", "pyspark_moe/model_profile.py", "pyspark_moe/tools/extract.py"}
ARCHITECTURES = re.compile(r"\b(laguna|qwen3moe|qwen35moe|gpt-?oss|deepseek\w*|gemma4|mixtral)\b", re.IGNORECASE)
# draft.py tells which architectures expose what a draft model reads; native code and the rest must not care.
ARCHITECTURES_ALLOWED = {"pyspark_moe/draft.py"}
MACHINE_PATH = re.compile(r"(?<![\w.$~}/-])/(work|home/\w+|root|tmp/(?!\.)\w+/\w+)/")


def tracked_files() -> list[Path]:
    """Files git knows or would add; every file below the root when there is no git repository."""
    try:
        done = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
        names = done.stdout.splitlines() if done.returncode == 0 else None
    except FileNotFoundError:
        names = None
    if names is None:
        skip = {".venv", "build", ".git"}
        names = [p.relative_to(ROOT).as_posix() for p in ROOT.rglob("*") if p.is_file() and p.relative_to(ROOT).parts[0] not in skip]
    return [ROOT / name for name in sorted(set(names)) if (ROOT / name).is_file() and not name.startswith(GENERATED)]


def check_size(name: str, lines: list[str]) -> Iterator[str]:
    limit = MAX_LINES_TESTS if name.startswith("tests/") else MAX_LINES
    if len(lines) > limit:
        yield f"{name}: {len(lines)} lines; the limit is {limit}: split it by what changes for different reasons"


def check_text(name: str, lines: list[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if MACHINE_PATH.search(line):
            yield f"{name}:{number}: a path of one machine: {line.strip()[:80]}"
        if line != line.rstrip() and not name.endswith((".patch", ".md")):
            yield f"{name}:{number}: blanks at the end of the line"
        if re.search(r"\b(TODO|FIXME|XXX)\b", line) and name != "scripts/lint_tree.py" and not name.endswith(".patch"):
            yield f"{name}:{number}: finish it, or file an issue: {line.strip()[:80]}"


def check_architectures(name: str, lines: list[str]) -> Iterator[str]:
    if name.startswith(("native/", "pyspark_moe/")) and name not in ARCHITECTURES_ALLOWED:
        for number, line in enumerate(lines, 1):
            if ARCHITECTURES.search(line):
                yield f"{name}:{number}: names a model architecture; facts come from the GGUF: {line.strip()[:80]}"


def imported_modules(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Absolute names of everything imported, at any depth of the file; `from x import y` yields x and x.y."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join(parents[: len(parents) - node.level + 1] + ([node.module] if node.module else []))
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def check_python(name: str, text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text, filename=name, feature_version=(3, 10))
    except SyntaxError as error:
        yield f"{name}:{error.lineno}: not Python 3.10: {error.msg}"
        return
    parts = name.removesuffix(".py").split("/")
    package = ".".join(parts[:-1])
    module = ".".join(parts)
    if parts[0] == "pyspark_moe":
        for line, imported in imported_modules(tree, package):
            yield from (f"{name}:{line}: {rule}" for rule in forbidden_import(module, imported))
        if name not in ENVIRONMENT_ALLOWED:
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv"), ("os", "putenv")}:
                    yield f"{name}:{node.lineno}: os.{node.attr}: configuration is a flag and a field of a dataclass"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield f"{name}:{node.lineno}: a bare except hides errors"
        if isinstance(node, ast.ExceptHandler) and all(isinstance(statement, ast.Pass) for statement in node.body):
            if isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException"):
                yield f"{name}:{node.lineno}: `except {node.type.id}: pass` hides errors"


def forbidden_import(module: str, imported: str) -> Iterator[str]:
    inside = imported.startswith("pyspark_moe")
    leaf = module.split(".")[1] if module.count(".") >= 1 else ""
    if leaf in PURE and any(imported == native or imported.startswith(native + ".") for native in NATIVE):
        yield f"imports {imported}; {leaf} must be importable without any library"
    if leaf == "errors" and inside:
        yield f"imports {imported}; errors imports nothing of the package"
    upper = ("pyspark_moe.server", "pyspark_moe.tools")
    if inside and imported.startswith(upper) and not module.startswith((*upper, "pyspark_moe.demo")):
        yield f"imports {imported}; arrows go from server and tools down, never up"


def check_patches() -> Iterator[str]:
    total = 0
    for path in sorted((ROOT / "patches").glob("*.patch")):
        name = f"patches/{path.name}"
        if not re.fullmatch(r"\d{4}-[a-z0-9-]+\.patch", path.name):
            yield f"{name}: a patch is called NNNN-what-it-does.patch"
        try:
            patch = parse_patch(path.name, path.read_text(encoding="utf-8"))
        except PatchError as error:
            yield f"patches/{error}"
            continue
        total += patch.changed_lines
        for key in PATCH_HEADER:
            if not re.search(rf"^{re.escape(key)}\s*\S", patch.header, re.MULTILINE):
                yield f"{name}: the header lacks '{key}'"
        for test in re.findall(r"^Test:\s*(\S+)", patch.header, re.MULTILINE):
            if not (ROOT / test.split("::")[0]).exists():
                yield f"{name}: its test {test} does not exist"
        index = ROOT / "patches" / "README.md"
        if index.exists() and path.name not in index.read_text(encoding="utf-8"):
            yield f"{name}: patches/README.md does not list it"
    if total > MAX_PATCH_LINES:
        yield f"patches/: {total} changed lines; the whole series may have {MAX_PATCH_LINES}: move logic into native/"


def main() -> int:
    problems: list[str] = []
    files = tracked_files()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix not in TEXT and path.name not in ("Makefile", "run"):
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if path.suffix in CODE:
            problems += check_size(name, lines)
            problems += check_architectures(name, lines)
        problems += check_text(name, lines)
        if path.suffix == ".py":
            problems += check_python(name, text)
    problems += check_patches()
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"lint: {len(files)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
