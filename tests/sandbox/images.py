"""Images for tests, made of what this machine has, in a store of their own: no registry is asked."""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from opd.sandbox.isolation import interpreter_path

PYTHON, SHELL = "opd-test/python:1", "opd-test/shell:1"
"""With Python and a shell's programs; with these alone."""
_LEFT_OUT = ("test", "site-packages", "idlelib", "tkinter", "ensurepip", "__pycache__", "lib2to3")


@contextlib.contextmanager
def podman_or_reason() -> Iterator[str | None]:
    """While it is open podman has both images and runs them, by variables that name a store of its own; or
    the reason why it does not.
    """
    busybox = shutil.which("busybox")
    if shutil.which("podman") is None or busybox is None:
        yield "there is no podman, or no busybox to make an image of"
        return
    folder = Path(tempfile.mkdtemp(prefix="opd-"))  # short, as podman refuses long ones
    before, why, store = dict(os.environ), "", folder
    try:
        for runtime, driver in (("", "overlay"), ("runc", "overlay"), ("runc", "vfs"), ("crun", "vfs")):
            store = folder / f"{runtime}{driver}"
            try:
                _settings(store, runtime, driver)
                _imported(SHELL, {"/bin/busybox": busybox})
                limits = ["--ulimit=nofile=64:64", "--ulimit=nproc=64:64"]
                _podman("run", "--rm", "--network=none", *limits, SHELL, "true")
                _imported(PYTHON, {"/bin/busybox": busybox, **_python()})
            except subprocess.CalledProcessError as error:
                why = error.stderr.decode(errors="replace").strip()[-300:]
                _removed(store)
            else:
                yield None
                return
        yield f"podman runs no container here: {why}"
    finally:
        _removed(store)
        shutil.rmtree(folder, ignore_errors=True)
        for name in ("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF"):
            os.environ.pop(name, None)
            os.environ |= {name: before[name]} if name in before else {}


def _settings(store: Path, runtime: str, driver: str) -> None:
    store.mkdir(parents=True)
    engine = f'[engine]\ntmp_dir = "{store}/tmp"\n' + (f'runtime = "{runtime}"\n' if runtime else "")
    (store / "containers.conf").write_text(engine)
    paths = f'graphroot = "{store}/graph"\nrunroot = "{store}/run"\n'
    (store / "storage.conf").write_text(f'[storage]\ndriver = "{driver}"\n{paths}')
    os.environ["CONTAINERS_CONF"] = str(store / "containers.conf")
    os.environ["CONTAINERS_STORAGE_CONF"] = str(store / "storage.conf")


def _podman(*words: str, given: bytes = b"") -> bytes:
    done = subprocess.run(["podman", *words], input=given, capture_output=True, timeout=300, check=True)
    return done.stdout


def _removed(store: Path) -> None:
    for words in (("rm", "--force", "--all"), ("rmi", "--force", "--all")):
        with contextlib.suppress(subprocess.CalledProcessError):
            _podman(*words)
    subprocess.run(["umount", "-l", str(store / "graph/overlay")], capture_output=True, check=False)
    shutil.rmtree(store, ignore_errors=True)


def _imported(name: str, files: dict[str, str]) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for there, here in files.items():
            archive.add(os.path.realpath(here), there.lstrip("/"), recursive=False, filter=_readable)
        applets = subprocess.run(
            [files["/bin/busybox"], "--list"], capture_output=True, text=True, check=True
        )
        for applet in {*applets.stdout.split()} - {"busybox"}:
            _link(archive, f"bin/{applet}", "busybox")
    _podman("import", "--quiet", "-", name, given=data.getvalue())


def _readable(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.mode = 0o755 if member.mode & 0o100 else 0o644
    return member


def _link(archive: tarfile.TarFile, name: str, to: str) -> None:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, to
    archive.addfile(member)


def _python() -> dict[str, str]:
    """This interpreter, its library and what both are linked with: path in the image -> here."""
    library = Path(sys.base_prefix, "lib", f"python{sys.version_info[0]}.{sys.version_info[1]}")
    kept = [
        path
        for path in sorted(library.rglob("*"))
        if path.is_file()
        and not set(path.relative_to(library).parts) & set(_LEFT_OUT)
        and path.suffix != ".a"
        and not path.relative_to(library).parts[0].startswith("config-")
    ]
    found = {f"/usr/local/lib/{library.name}/{path.relative_to(library)}": str(path) for path in kept}
    found["/usr/local/bin/python3"] = interpreter_path()
    linked = [interpreter_path(), *(str(path) for path in kept if path.suffix == ".so")]
    said = subprocess.run(["ldd", *linked], capture_output=True, text=True, check=False).stdout
    return found | {path: path for path in re.findall(r"(/\S+) \(0x", said)}
