#!/usr/bin/env python3
"""Packs a CUDA build for a machine that has an NVIDIA driver and the CUDA runtime with cuBLAS, and nothing else of ours.

    pack_cuda.py build/cuda OUT.tar.xz --python 3.12 [--stock build/stock-cuda] [--without numpy] [--tests]

The archive holds one folder, spark/: the package with its stripped libraries, what it needs from PyPI for that Python,
and bin/dflash_server, which finds the CUDA libraries of the machine's Python packages (nvidia-cublas, nvidia-cuda-runtime)
or of its loader's path. With --stock, spark/stock/llama-server is an unpatched one, to compare with; with --tests, the test
suite's needs are packed too. Unpack it anywhere.
"""

from __future__ import annotations

import argparse
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from install_python import ROOT, build_llama_cpp_python, read_project
from upstream_source import default_cache

MAX_BYTES = 60 * 1024**2
LAUNCHER = """#!/bin/sh
# Starts PROGRAM from this folder, with the CUDA libraries that this machine's Python packages bring, if any.
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python3}
cuda=$("$python" -c 'import glob, sysconfig; print(":".join(glob.glob(sysconfig.get_path("purelib") + "/nvidia/c*/lib")))' 2>/dev/null)
export LD_LIBRARY_PATH="${cuda:+$cuda:}$LD_LIBRARY_PATH"
export PYTHONPATH="$here:$here/site:$PYTHONPATH"
exec COMMAND "$@"
"""


class PackError(Exception):
    """The text is for the user."""


def strip_to(source: Path, target: Path) -> None:
    subprocess.run(["strip", "--strip-unneeded", "-o", str(target), str(source)], check=True)


def libraries(build: Path) -> list[Path]:
    found = sorted(p for p in (build / "bin").glob("lib*.so*") if not p.is_symlink())
    if not any(p.name.startswith("libggml-cuda") for p in found):
        raise PackError(f"'{build}' holds no finished CUDA build (no libggml-cuda in bin/): build it first.")
    return found


def unpack_requirements(python: str, site: Path, without: set[str], with_tests: bool, cache: Path) -> None:
    """The package's dependencies as files, for Python `python` on this kind of machine."""
    wheels = cache / "wheels"
    build_llama_cpp_python(cache, wheels)
    project = read_project()
    requirements = list(project["dependencies"]) + (list(project["optional-dependencies"]["test"]) if with_tests else [])
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--only-binary=:all:", "--python-version", python,
                   "--implementation", "cp", "--find-links", str(wheels), "--dest", scratch, *requirements]  # fmt: skip
        if subprocess.run(command).returncode != 0:
            raise PackError(f"pip could not fetch the packages for Python {python}; its reason is above.")
        for wheel in sorted(Path(scratch).glob("*.whl")):
            if wheel.name.split("-")[0].replace("_", "-").lower() not in without:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(site)


def write_launcher(path: Path, command: str) -> None:
    path.write_text(LAUNCHER.replace("PROGRAM", path.name).replace("COMMAND", command))
    path.chmod(0o755)


def pack(build: Path, out: Path, python: str, stock: Path | None, without: set[str], with_tests: bool, with_data: bool) -> int:
    """Writes the archive; its size in bytes. Raises PackError."""
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch) / "spark"
        ignore = shutil.ignore_patterns("__pycache__", "lib", *([] if with_data else ["*.gguf"]))
        shutil.copytree(ROOT / "pyspark_moe", top / "pyspark_moe", ignore=ignore)
        lib = top / "pyspark_moe" / "lib"
        for folder in (lib, top / "site", top / "bin"):
            folder.mkdir()
        for library in libraries(build):
            strip_to(library, lib / library.name)
        shutil.copy(ROOT / "native" / "spark_moe.h", lib)
        shutil.copy(build / "build_info.json", lib)
        unpack_requirements(python, top / "site", without, with_tests, default_cache())
        write_launcher(top / "bin" / "dflash_server", '"$python" -m pyspark_moe.server.cli')
        write_launcher(top / "bin" / "pyspark-moe", '"$python" -m pyspark_moe.tools.cli')
        write_launcher(top / "bin" / "with-spark", "")
        if stock is not None:
            (top / "stock").mkdir()
            for library in libraries(stock):
                strip_to(library, top / "stock" / library.name)
            for link in (stock / "bin").glob("lib*.so*"):
                if link.is_symlink():
                    (top / "stock" / link.name).symlink_to(os.readlink(link))
            strip_to(stock / "bin" / "llama-server", top / "stock" / "llama-server.bin")
            write_launcher(top / "bin" / "stock-llama-server", 'env LD_LIBRARY_PATH="$here/stock:$LD_LIBRARY_PATH" "$here/stock/llama-server.bin"')
        # a dictionary larger than the libraries: the two CUDA backends are nearly equal and are stored once
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 512 * 1024**2}]
        with lzma.open(out, "wb", filters=filters) as stream, tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(top, "spark", filter=anonymous)
    return out.stat().st_size


def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the names of whoever packs."""
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="Python version there [%(default)s]")
    parser.add_argument("--stock", type=Path, help="build folder of an unpatched llama-server")
    parser.add_argument("--without", action="append", default=[], metavar="PACKAGE", help="is on the other machine already")
    parser.add_argument("--tests", action="store_true", help="with what the tests need")
    parser.add_argument("--no-data", action="store_true", help="without the demo models")
    arguments = parser.parse_args()
    try:
        size = pack(arguments.build, arguments.out, arguments.python, arguments.stock, {p.lower() for p in arguments.without}, arguments.tests, not arguments.no_data)
    except (PackError, OSError, subprocess.CalledProcessError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    print(f"{arguments.out}: {size / 1024**2:.1f} MiB")
    if size > MAX_BYTES:
        print(f"pack: more than {MAX_BYTES // 1024**2} MiB; leave something out (--no-data, --without)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
