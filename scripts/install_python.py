#!/usr/bin/env python3
"""Installs what this project needs from PyPI into the interpreter that runs this script (a virtual environment).

    install_python.py tools          scikit-build-core, cmake, ninja
    install_python.py runtime        the dependencies of pyproject.toml, llama-cpp-python without its native build
    install_python.py test           the same with the `test` extra
    install_python.py fuzz           the `fuzz` extra; exit code 3 where its packages have no wheel for this Python

Wheels are kept in the cache (wheels/), and an installation looks there first, so that a second checkout, or a machine
that has lost its network, installs from what is there. pip is used with the user's own configuration.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from upstream_source import DISTRIBUTION, UpstreamError, default_cache, fetch, locked, read_pin

ROOT = Path(__file__).resolve().parent.parent
NO_WHEEL = 3  # exit code
TOOLS = ["scikit-build-core>=0.10,<1", "cmake>=4.0,<5", "ninja>=1.11"]


def read_project() -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10; scikit-build-core brings tomli there
        import tomli as tomllib
    with open(ROOT / "pyproject.toml", "rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    return project


def pip(*arguments: str, environment: dict[str, str] | None = None, quiet: bool = False) -> bool:
    """Runs pip of this interpreter; True when it succeeded. `quiet` hides the output of an attempt that may fail."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    output = subprocess.DEVNULL if quiet else None
    return subprocess.run(command, env={**os.environ, **(environment or {})}, stdout=output, stderr=output).returncode == 0


def install(requirements: list[str], wheels: Path, never_built: str = DISTRIBUTION) -> None:
    """Installs from the wheel cache, after filling it from the index when something is missing. never_built: distributions,
    separated by commas, that are not compiled here. Raises UpstreamError."""
    wheels.mkdir(parents=True, exist_ok=True)
    cached = ["--no-index", "--find-links", str(wheels), *requirements]
    if pip("install", "--quiet", *cached, quiet=True):
        return
    print(f"python: fetching {len(requirements)} packages and what they need", file=sys.stderr, flush=True)
    with locked(wheels / ".lock"):
        # prefer-binary: an older wheel rather than compiling a newer sdist; never an sdist of llama-cpp-python
        if not pip("wheel", "--quiet", "--prefer-binary", "--only-binary", never_built, "--find-links", str(wheels), "--wheel-dir", str(wheels), *requirements):
            raise UpstreamError("pip could not fetch the packages above; without network they must be in the cache already: " + str(wheels))
    if not pip("install", "--quiet", *cached):
        raise UpstreamError(f"pip could not install from {wheels}, although it has just filled it; the reason is above")


def install_fuzz(requirements: list[str], wheels: Path) -> bool:
    """False where the index has wheels of these for another Python and none for this one. Raises UpstreamError when they cannot be
    fetched for any other reason."""
    try:
        install(requirements, wheels, never_built=":all:")
    except UpstreamError:
        if (sys.version_info[:2], platform.machine()) == ((3, 11), "x86_64"):
            raise
        other = ["--python-version", "3.11", "--platform", "manylinux2014_x86_64", "--only-binary", ":all:", "--no-deps"]
        with tempfile.TemporaryDirectory() as folder:
            if not pip("download", "--quiet", "--dest", folder, *other, *requirements, quiet=True):
                raise
        return False
    return True


def build_llama_cpp_python(cache: Path, wheels: Path) -> None:
    """Puts a Python-only wheel of llama-cpp-python into the wheel cache: its native build is switched off (LLAMA_BUILD=OFF)."""
    pin = read_pin(ROOT / "patches" / "UPSTREAM")
    if list(wheels.glob(f"llama_cpp_python-{pin.version}-*.whl")):
        return
    sdist = fetch(pin.version, cache, pin)
    print(f"python: packing {DISTRIBUTION} {pin.version} without its native build", file=sys.stderr, flush=True)
    scripts = str(Path(sys.executable).parent)
    environment = {"CMAKE_ARGS": "-DLLAMA_BUILD=OFF -DLLAVA_BUILD=OFF", "PATH": scripts + os.pathsep + os.environ.get("PATH", os.defpath)}
    if not pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(sdist), environment=environment):
        raise UpstreamError(f"{DISTRIBUTION} could not be packed; the reason is above")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["tools", "runtime", "test", "fuzz"])
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    args = parser.parse_args()
    wheels: Path = args.cache / "wheels"
    try:
        if args.what == "tools":
            install(TOOLS, wheels)
            return 0
        project = read_project()
        if args.what == "fuzz":
            fuzz = project["optional-dependencies"]["fuzz"]
            if not install_fuzz(fuzz, wheels):
                version = ".".join(map(str, sys.version_info[:2]))
                print(f"python: SKIPPED: {', '.join(fuzz)} has no wheel for Python {version} on this machine; nothing is fuzzed", file=sys.stderr)
                return NO_WHEEL
            return 0
        build_llama_cpp_python(args.cache, wheels)
        requirements = list(project["dependencies"])
        if args.what == "test":
            requirements += project["optional-dependencies"]["test"]
        install(requirements, wheels)
    except UpstreamError as error:
        print(f"python: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
