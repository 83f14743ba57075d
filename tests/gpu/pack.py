"""Makes the folder that `accept.sh` needs beside torch and this repository, on a machine with a network.

    python -m tests.gpu.pack FOLDER [--python 3.12] [--tilelang] [--liger] [--cut-cross-entropy]
                                    [--lora] [--without NAME ...]

The folder gets one archive, `packages.tar.xz`: what `pyproject.toml` and pytest need, without torch and what
torch brings, for Linux on x86-64 and the given Python, in the versions that are installed here. With the
options what the kernel table compares with travels too, in its newest version. Fails above 60 MiB.
"""

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
NAME = "packages.tar.xz"
MOST = 60 << 20
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis")
WITH_TORCH = ("torch", "triton")
"""Not packed: a machine's torch is built for its driver."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
TILELANG = ("tilelang", "apache-tvm-ffi", "z3-solver", "torch-c-dlpack-ext")
"""What TileLang needs beside the rest."""
UNUSED = (
    "bin",
    "**/__pycache__",
    "**/*.pyc",
    "**/*.pyi",
    "numpy/**/tests",
    "matplotlib/tests",
    "mpl_toolkits/**/tests",
)


def wanted(python: str, tilelang: bool = False) -> dict[str, str]:
    """Every package by name with its version: the project's, pytest's, and what they need in turn.

    Raises `PackageNotFoundError` for one that is not installed here.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    waiting = [Requirement(text) for text in (*project["dependencies"], *FOR_TESTS)]
    waiting += [Requirement(name) for name in TILELANG if tilelang]
    there = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    there |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64"}
    found: dict[str, str] = {}
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name in found or name in WITH_TORCH or not (one.marker is None or one.marker.evaluate(there)):
            continue
        found[name] = version(name)
        waiting += [Requirement(text) for text in requires(name) or ()]
    return dict(sorted(found.items()))


def install(specifications: list[str], python: str, target: Path) -> None:
    """Unpack these packages, for another Python than this one maybe, below `target`."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--target", str(target), "--python-version", python, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, *specifications], check=True)


def prune(folder: Path, patterns: tuple[str, ...]) -> None:
    """Remove what no import needs."""
    for pattern in patterns:
        for path in sorted(folder.glob(pattern), reverse=True):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.exists() or path.is_symlink():
                path.unlink()


def pack(folder: Path, python: str, specifications: list[str]) -> Path:
    """Write the archive of these packages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        site = Path(temporary)
        install(specifications, python, site)
        prune(site, UNUSED)
        for library in site.glob("z3/lib/libz3.so.*"):  # which is there twice
            (site / "z3/lib/libz3.so").unlink()
            (site / "z3/lib/libz3.so").symlink_to(library.name)
        archive = folder / NAME
        with tarfile.open(archive, "w:xz", preset=6) as file:
            for path in sorted(site.iterdir()):
                file.add(path, path.name)
    return archive


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="of the machine with the GPU")
    parser.add_argument("--tilelang", action="store_true", help="TileLang's kernels too")
    parser.add_argument("--liger", action="store_true", help="Liger-Kernel, to compare with")
    parser.add_argument("--cut-cross-entropy", action="store_true", help="Apple's, to compare with")
    parser.add_argument("--lora", action="store_true", help="peft, to train adapters")
    parser.add_argument("--without", nargs="+", default=[], help="packages that the machine has")
    options = parser.parse_args()
    more = ["liger-kernel"] * options.liger + ["cut-cross-entropy"] * options.cut_cross_entropy
    try:
        more += [f"peft=={version('peft')}"] if options.lora else []
        packages = wanted(options.python, options.tilelang)
        chosen = [f"{name}=={number}" for name, number in packages.items() if name not in options.without]
        archive = pack(options.folder, options.python, [*chosen, *more])
    except PackageNotFoundError as error:
        print(
            f"{error.name} is not installed here; run this with the extra `test` installed.", file=sys.stderr
        )
        return 1
    size = archive.stat().st_size
    print(f"{archive}: {size / 2**20:.1f} MiB of {MOST >> 20}")
    return 0 if size <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
