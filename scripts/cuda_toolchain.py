#!/usr/bin/env python3
"""Completes a CUDA toolkit for a machine without GPU, driver or cuBLAS, so that the CUDA build can be made anywhere.

    cuda_toolchain.py prepare                        prints the folder to give to CUDAToolkit_ROOT
    cuda_toolchain.py configure BUILD -- CMAKE_FLAGS  prepares, and configures a build folder with it

scripts/pack_cuda.py packs the finished build for another machine (docs/guide/cuda.md).

prepare copies the toolkit whose nvcc is at hand, adds cuBLAS from the package nvidia-cublas of the toolkit's own major and
minor version, and a stub of the driver's libcuda.so.1 that defines the entry points which the sources call. Each stub
returns CUDA_ERROR_STUB_LIBRARY, so a program that is run by mistake without a driver says what is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from upstream_source import default_cache, locked

ROOT = Path(__file__).resolve().parent.parent
# What may be a call of the driver; those that cuda.h does not declare are left out.
DRIVER_CALL = re.compile(r"\b(cu[A-Z][A-Za-z0-9]*(?:_v[0-9]+)?)\s*\(")
NOT_DRIVER = ("cuComplex", "cuCreal", "cuCimag")


class ToolchainError(Exception):
    """The text is for the user."""


def run(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        raise ToolchainError(f"'{' '.join(map(str, command))}' failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def find_toolkit() -> tuple[Path, str]:
    """Folder and version ("13.0") of the toolkit whose nvcc is on PATH or in CUDA_HOME."""
    candidates = [Path(os.environ[name]) / "bin" / "nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path))
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for nvcc in candidates:
        if not nvcc.exists():
            continue
        version = re.search(r"release (\d+\.\d+)", run(nvcc, "--version"))
        # nvcc may be a wrapper elsewhere: it says itself where its toolkit is
        top = re.search(r"^#\$ TOP=(.*)$", subprocess.run([str(nvcc), "--dryrun", "-v", "_.cu"], capture_output=True, text=True).stderr, re.M)
        root = Path(top.group(1)).resolve() if top else nvcc.resolve().parent.parent
        if version and (root / "bin" / "nvcc").exists():
            return root, version.group(1)
    raise ToolchainError("no nvcc found: put it on PATH, or set CUDA_HOME to the toolkit's folder")


def fetch_cublas(version: str, folder: Path) -> Path:
    """Downloads the newest nvidia-cublas of `version` (major.minor); the wheel's path."""
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--dest", folder, f"nvidia-cublas=={version}.*")
    return next(folder.glob("nvidia_cublas-*.whl"))


def unpack_cublas(wheel: Path, toolkit: Path) -> None:
    """Puts headers and libraries where the toolkit's own would be."""
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            match = re.fullmatch(r"nvidia/(?:cu\d+|cublas)/(include|lib)/([^/]+)", name)
            if match:
                folder = toolkit / ("include" if match.group(1) == "include" else "lib64")
                with archive.open(name) as source, open(folder / match.group(2), "wb") as target:
                    shutil.copyfileobj(source, target)
    for library in list((toolkit / "lib64").glob("libcublas*.so.*")):
        link = library.with_name(library.name.split(".so.")[0] + ".so")
        link.unlink(missing_ok=True)
        link.symlink_to(library.name)


def driver_calls(sources: Iterable[Path], header: Path) -> list[str]:
    """Names that the sources call and cuda.h declares, with the version that the header maps them to."""
    text = header.read_text(errors="replace")
    renamed = dict(re.findall(r"^#\s*define\s+(cu[A-Z]\w*)\s+(cu[A-Z]\w*_v\d+)\s*$", text, re.M))
    declared = set(re.findall(r"CUDAAPI\s+(cu[A-Z]\w*)\s*\(", text))
    names: set[str] = set()
    for source in sources:
        names.update(DRIVER_CALL.findall(source.read_text(errors="replace")))
    used = {n for n in names if not n.startswith(NOT_DRIVER) and (n in declared or n in renamed)}
    return sorted({renamed.get(n, n) for n in used})


def build_stub(names: list[str], folder: Path) -> None:
    """libcuda.so with the soname of the driver's library."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "stub.c"
        source.write_text("".join(f"int {name}(void) {{ return 34; }} /* CUDA_ERROR_STUB_LIBRARY */\n" for name in names))
        compiler = os.environ.get("CC", "cc")
        run(compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so", source)
    link = folder / "libcuda.so.1"
    link.unlink(missing_ok=True)
    link.symlink_to("libcuda.so")


def cuda_sources() -> list[Path]:
    folders = [ROOT / "native", *ROOT.glob("build/*/upstream/ggml/src/ggml-cuda")]
    return [p for f in folders for suffix in ("*.cu", "*.cuh", "*.cpp", "*.h") for p in f.rglob(suffix)]


def prepare(cache: Path) -> Path:
    """The completed toolkit; made once, the stub again whenever the sources call something new."""
    source, version = find_toolkit()
    toolkit = cache / "cuda" / f"toolkit-{version}"
    with locked(cache / "cuda.lock"):
        if not (toolkit / ".complete").exists():
            print(f"cuda: completing the toolkit {version} of {source}", file=sys.stderr, flush=True)
            shutil.rmtree(toolkit, ignore_errors=True)
            toolkit.mkdir(parents=True)
            for name in ("bin", "include", "nvvm"):
                shutil.copytree(source / name, toolkit / name, symlinks=False)
            libraries = next(f for f in (source / "lib64", source / "lib") if f.exists())
            shutil.copytree(libraries, toolkit / "lib64", symlinks=True)
            (toolkit / "lib").symlink_to("lib64")
            if not (toolkit / "lib64" / "libcublas.so").exists():
                with tempfile.TemporaryDirectory() as scratch:
                    unpack_cublas(fetch_cublas(version, Path(scratch)), toolkit)
            (toolkit / ".complete").touch()
        names = driver_calls(cuda_sources(), toolkit / "include" / "cuda.h")
        stamp = toolkit / "lib64" / "stubs" / ".names"
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        if not stamp.exists() or stamp.read_text() != digest:
            build_stub(names, toolkit / "lib64" / "stubs")
            stamp.write_text(digest)
    return toolkit


def configure(toolkit: Path, build: Path, flags: list[str]) -> None:
    """Configures `build` for CUDA with the tools of this interpreter's environment."""
    tools = Path(sys.executable).parent
    command = [tools / "cmake", "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", f"-DPython3_EXECUTABLE={sys.executable}"]
    command += ["-S", ROOT, "-B", build, "-DSPARK_CUDA=ON", f"-DCUDAToolkit_ROOT={toolkit}", f"-DCMAKE_CUDA_COMPILER={toolkit}/bin/nvcc"]
    # programs are linked against libraries that need cuBLAS and the driver, which are on no path of this machine's loader
    command.append(f"-DCMAKE_EXE_LINKER_FLAGS=-Wl,-rpath-link,{toolkit}/lib64:{toolkit}/lib64/stubs")
    run(*command, *flags)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("prepare")
    configuring = commands.add_parser("configure")
    configuring.add_argument("build", type=Path)
    configuring.add_argument("flags", nargs="*", help="for CMake, e.g. -DSPARK_CUDA_ARCHITECTURES=86")
    arguments = parser.parse_args()
    try:
        toolkit = prepare(default_cache())
        if arguments.command == "prepare":
            print(toolkit)
        else:
            configure(toolkit, arguments.build, arguments.flags)
    except (ToolchainError, OSError) as error:
        print(f"cuda: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
