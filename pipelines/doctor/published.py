"""Whether published teachers can be read: all are asked side by side, and told together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from opd.errors import OpdError
from opd.pipelines.doctor.checks import Finding, number_of
from opd.progress import doing


def look(source: str) -> None:
    """Read the description of a published teacher. Raises `StorageError` if that cannot be done."""
    from opd.storage.published import PublishedModel
    from opd.teachers.published_adapter import PublishedAdapter, is_adapter

    with PublishedModel.open(PublishedAdapter.open(source).base if is_adapter(source) else source):
        pass


def unreachable(teachers: Mapping[str, str], look: Callable[[str], None]) -> dict[str, OpdError]:
    """What is wrong with those that are published and cannot be read; all are looked at side by side, since
    each may take its time to be given up.
    """
    from opd.teachers.skeleton import is_published

    published = {name: source for name, source in teachers.items() if is_published(source)}
    lost: dict[str, OpdError] = {}
    if published:
        with doing(f"reading {number_of(len(published), 'published teacher')}"):
            with ThreadPoolExecutor(len(published)) as pool:
                asked = {name: pool.submit(look, source) for name, source in published.items()}
            for name, future in asked.items():
                error = future.exception()
                if isinstance(error, OpdError):
                    lost[name] = error
                elif error is not None:
                    raise error
    return lost


def told_together(teachers: Mapping[str, str], lost: Mapping[str, OpdError]) -> list[Finding]:
    """One finding for all that fail in the same way."""
    alike: dict[str, list[str]] = {}
    for name, error in lost.items():
        alike.setdefault(str(error).replace(teachers[name], "URL"), []).append(name)
    return [
        Finding("error", f"teacher {', '.join(names)}", _for_all(str(lost[names[0]]), names))
        for names in alike.values()
    ]


def _for_all(sentence: str, names: list[str]) -> str:
    others = ", ".join(names[1:])
    return f"{sentence.rstrip('.')}; the same for {others}" if others else sentence
