"""Where the upstream sources come from: the pin, the download through pip, the pristine tree in the cache.

The cache (default ~/.cache/pyspark_moe, or below XDG_CACHE_HOME where that is set) holds
    sdist/      the archive as PyPI serves it
    upstream/   <version>-<sha256>/ : vendor/llama.cpp of one archive, unpacked once, never changed afterwards
Everything is written under a temporary name and renamed at the end, so an interrupted run leaves nothing half done and
two builds may run at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DISTRIBUTION = "llama-cpp-python"
# Large parts of vendor/llama.cpp that no build reads (documentation, test vocabularies, pictures): 110 of 176 MB.
UNUSED = (".git", ".github", ".devops", "benches", "docs", "media", "models")

# pip runs the build backend of an sdist that it downloads, only to learn its name. The real backend wants a compiler
# and cmake, and takes minutes; this one answers the same question from the version that was asked for.
METADATA_ONLY_BACKEND = """
import os
def get_requires_for_build_wheel(config_settings=None):
    return []
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    with open("PKG-INFO", encoding="utf-8") as file:
        metadata = file.read()
    name = "llama_cpp_python.dist-info"
    os.makedirs(os.path.join(directory, name))
    with open(os.path.join(directory, name, "METADATA"), "w", encoding="utf-8") as file:
        file.write(metadata)
    return name
def build_wheel(*args, **kwargs):
    raise RuntimeError("this backend only describes the package")
"""


class UpstreamError(Exception):
    """The sources cannot be had; the text says what was wrong and what to do."""


@dataclass(frozen=True)
class Pin:
    """patches/UPSTREAM: version of the sdist, its SHA-256 (hex), the llama.cpp commit that it vendors."""

    version: str
    sha256: str
    commit: str


def read_pin(path: Path) -> Pin:
    """Reads patches/UPSTREAM (`key = value` lines). Raises UpstreamError when a key is missing."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UpstreamError(f"{path} is missing: it pins the upstream version and SHA-256") from None
    values = {key.strip(): value.strip() for key, sep, value in (line.partition("=") for line in lines) if sep and not key.startswith("#")}
    missing = [key for key in ("version", "sha256", "commit") if not values.get(key)]
    if missing:
        raise UpstreamError(f"{path} does not say {', '.join(missing)}; each is a line `key = value`")
    return Pin(values["version"], values["sha256"].lower(), values["commit"])


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pyspark_moe"


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on `path` between processes; the file itself stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def verify(path: Path, pin: Pin) -> None:
    """Raises UpstreamError unless `path` is the pinned sdist."""
    if not path.is_file():
        raise UpstreamError(f"{path} does not exist; give the path of llama_cpp_python-{pin.version}.tar.gz")
    actual = sha256_of(path)
    if actual != pin.sha256:
        raise UpstreamError(
            f"{path} has SHA-256 {actual}, patches/UPSTREAM pins {pin.sha256} for {DISTRIBUTION} {pin.version}; "
            "delete the file if it is a broken download, or do not trust it"
        )


def fetch(version: str, cache: Path, pin: Pin | None = None) -> Path:
    """Path of the sdist, downloaded with pip when the cache does not have it. With a pin its SHA-256 is verified.

    pip is run by this interpreter with the user's own configuration (index, proxy, certificates).
    Raises UpstreamError.
    """
    target = cache / "sdist" / f"llama_cpp_python-{version}.tar.gz"
    with locked(cache / "sdist" / ".lock"):
        if not target.exists():
            print(f"upstream: downloading {DISTRIBUTION} {version} (about 75 MB) with pip", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as folder:
                downloaded = _pip_download(version, Path(folder), pin)
                if pin:
                    verify(downloaded, pin)
                os.replace(downloaded, target)
        elif pin:
            verify(target, pin)
    return target


def adopt(path: Path, pin: Pin, cache: Path) -> None:
    """Copies a local sdist into the cache, where everything looks for it. Raises UpstreamError when it is not the pinned one."""
    verify(path, pin)
    target = cache / "sdist" / f"llama_cpp_python-{pin.version}.tar.gz"
    with locked(target.parent / ".lock"):
        if not target.exists():
            partial = target.with_suffix(".partial")
            shutil.copyfile(path, partial)
            os.replace(partial, target)


def _pip_download(version: str, folder: Path, pin: Pin | None) -> Path:
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    (backend / "__init__.py").write_text("", encoding="utf-8")
    (backend / "build.py").write_text(METADATA_ONLY_BACKEND, encoding="utf-8")
    requirement = f"{DISTRIBUTION}=={version}" + (f" --hash=sha256:{pin.sha256}" if pin else "")
    (folder / "requirements.txt").write_text(requirement + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", DISTRIBUTION]
    command += ["--dest", str(folder / "files"), "--requirement", str(folder / "requirements.txt")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(backend.parent)}, capture_output=True, text=True)
    files = list((folder / "files").glob("*.tar.gz")) if done.returncode == 0 else []
    if len(files) != 1:
        tail = "\n  ".join(done.stderr.strip().splitlines()[-8:])
        raise UpstreamError(
            f"pip could not download {DISTRIBUTION} {version}:\n  {tail}\n"
            "Without network, give a local copy: --sdist FILE (CMake: -DSPARK_UPSTREAM_SDIST=FILE), or an unpacked llama.cpp "
            "of the same version: --source DIR (-DSPARK_UPSTREAM_SOURCE=DIR)"
        )
    return files[0]


def unpack(sdist: Path, version: str, sha256: str, cache: Path) -> Path:
    """The pristine vendor/llama.cpp of the sdist, unpacked into the cache at the first call. Raises UpstreamError."""
    target = cache / "upstream" / f"{version}-{sha256[:16]}"
    with locked(cache / "upstream" / ".lock"):
        if not target.exists():
            partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=".unpack-"))
            try:
                count = _unpack_tree(sdist, partial)
                if not (partial / "CMakeLists.txt").exists():
                    raise UpstreamError(f"{sdist} has no vendor/llama.cpp/CMakeLists.txt; it is not the sdist of {DISTRIBUTION}")
                print(f"upstream: unpacked {count} files of llama.cpp", file=sys.stderr, flush=True)
                os.chmod(partial, 0o755)
                os.rename(partial, target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return target


def _unpack_tree(sdist: Path, target: Path) -> int:
    """Writes the regular files below */vendor/llama.cpp; links, devices and paths that leave the tree are never created."""
    count = 0
    try:
        with tarfile.open(sdist, "r:gz") as archive:
            for member in archive:
                parts = member.name.split("/")
                if parts[1:3] != ["vendor", "llama.cpp"] or len(parts) < 4 or not member.isfile():
                    continue
                parts = parts[3:]
                if parts[0] in UNUSED:
                    continue
                if any(part in ("", ".", "..") for part in parts):
                    raise UpstreamError(f"{sdist} holds the path {member.name!r}, which leaves its folder; it is not to be trusted")
                path = target.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None  # isfile() above
                with open(path, "wb") as file:
                    shutil.copyfileobj(source, file)
                os.chmod(path, 0o755 if member.mode & 0o100 else 0o644)
                os.utime(path, (member.mtime, member.mtime))
                count += 1
    except (tarfile.TarError, EOFError, OSError) as error:
        raise UpstreamError(f"{sdist} cannot be unpacked: {error}") from error
    return count
