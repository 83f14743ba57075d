"""What a process can no longer do once it is confined: the kernel's own means, for this process alone.

Seccomp refuses what starts or reaches other processes, opens sockets or raises limits; Landlock, what is read
and written elsewhere. Neither needs a privilege, and neither can be taken back. Limits of the process are
those of `setrlimit`. Imports the standard library alone: the programs in the sandbox read this file too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
from collections.abc import Mapping, Sequence
from typing import Any

_MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> what seccomp calls it, and the column of `_REFUSED`."""
_PROCESSES = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
"""What starts other processes, or reaches them."""
_REFUSED = {
    # sockets, and what could open one past this filter; pairs within the process are no way out
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # what is in other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272),
    # limits, namespaces, mounts and the kernel
    "setrlimit": (160, 164), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "open_by_handle_at": (304, 265),
    "init_module": (175, 105), "finit_module": (313, 273), "kexec_load": (246, 104),
    "reboot": (169, 142), "swapon": (167, 224), "quotactl": (179, 60), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "sethostname": (170, 161),
    # changes to files that Landlock, or an early one, does not know
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "utime": (132, None), "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45),
    # memory that outlives the process, or is counted nowhere
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
}  # fmt: skip
_OWN_ONLY = {"kill": (62, 129), "tgkill": (234, 131)}
"""Refused but to the process itself, which may abort."""
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
_THREAD, _NAMESPACES = 0x10000, 0x7E020000
_ALLOW, _NO_PERMISSION, _NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_X32 = 0x40000000

Jump = tuple[int, int, int, int]
"""An instruction of the filter: code, where to if true, where to if false, operand."""


def refuse_calls(*, processes: bool = False) -> bool:
    """Seccomp, for this process and what it starts for good; False where the machine or the kernel has none.

    What is refused fails with EPERM. Processes can be neither started nor signalled, unless `processes`: then
    nothing but programs of their own is allowed beyond that, and no namespaces.
    """
    known = _MACHINES.get(os.uname().machine)
    if known is None or not _no_new_privileges():
        return False
    program = b"".join(struct.pack("<HBBI", *step) for step in _filter(*known, processes))
    held = ctypes.create_string_buffer(program)
    told = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(held)))
    return _prctl(22, 2, ctypes.addressof(told)) == 0


def _filter(machine: int, column: int, processes: bool) -> list[Jump]:
    """Words of a call: number at 0, machine at 4, arguments from 16 in pairs of a low and a high half."""
    own = os.getpid()
    steps: list[Jump] = [
        (_LOAD, 0, 0, 4), (_EQUAL, 1, 0, machine), (_RETURN, 0, 0, _NO_PERMISSION),
        (_LOAD, 0, 0, 0), (_BITS, 0, 1, _X32 if column == 0 else 0), (_RETURN, 0, 0, _NO_PERMISSION),
        (_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _NO_SUCH_CALL),  # the C library then takes clone
    ]  # fmt: skip
    refused = _REFUSED if processes else _PROCESSES | _REFUSED
    for numbers in refused.values():
        if numbers[column] is not None:
            steps += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _NO_PERMISSION)]
    for numbers in {} if processes else _OWN_ONLY.values():
        steps += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, 16), (_EQUAL, 0, 1, own)]
        steps += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NO_PERMISSION)]
    steps += [(_EQUAL, 0, 4, _CLONE[column]), (_LOAD, 0, 0, 16)]
    if processes:
        steps += [(_BITS, 0, 1, _NAMESPACES), (_RETURN, 0, 0, _NO_PERMISSION), (_RETURN, 0, 0, _ALLOW)]
    else:
        steps += [(_BITS, 0, 1, _THREAD), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NO_PERMISSION)]
    steps += [(_EQUAL, 0, 6, _PRLIMIT[column]), (_LOAD, 0, 0, 32), (_EQUAL, 0, 3, 0), (_LOAD, 0, 0, 36)]
    steps += [(_EQUAL, 0, 1, 0), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NO_PERMISSION)]
    return [*steps, (_RETURN, 0, 0, _ALLOW)]


_READ, _READ_FILE, _WRITE_FILE = 0b1101, 0b101, 0b111
_RULESET, _ADD_RULE, _RESTRICT = 444, 445, 446


def landlock_version() -> int:
    """Of the kernel; 0 where it has none or it is switched off."""
    return max(0, _syscall(_RULESET, None, 0, 1))


def restrict_files(read: Sequence[str], write: Sequence[str] = ()) -> bool:
    """Landlock, for this process and what it starts, for good: files below `read` can be read, those below
    `write` changed too, nothing else; nor are there TCP ports, or signals to processes that are not confined
    with it, where the kernel knows to refuse them. False where the kernel has no Landlock.
    """
    version = landlock_version()
    if version == 0 or not _no_new_privileges():
        return False
    rights = (1 << 13) - 1 | (version >= 2) << 13 | (version >= 3) << 14 | (version >= 5) << 15
    ruleset = struct.pack("<QQQ", rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = _syscall(_RULESET, ctypes.create_string_buffer(ruleset[:size], size), size, 0)
    if rules < 0:
        return False
    try:
        for path in (*read, *write):
            with contextlib.suppress(OSError):
                folder, change = os.path.isdir(path), path in write
                allowed = (rights, _WRITE_FILE) if change else (_READ, _READ_FILE)
                place = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    rule = ctypes.create_string_buffer(struct.pack("<Qi", allowed[not folder], place), 12)
                    _syscall(_ADD_RULE, rules, 1, rule, 0)
                finally:
                    os.close(place)
        return _syscall(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def confine(job: Mapping[str, Any]) -> None:
    """Take rights, resources and files from this process for good, as its `job` says. `refuse_calls` comes
    last, because it keeps a process from much of this.
    """
    if job["uid"]:
        become(job["uid"])
    else:
        drop_privileges()
    if job["kind"] != "bubblewrap":  # which ends with its own parent, and all in it
        end_with_parent()
    limit(job["cpu_seconds"], job["memory"], job["disk"], job["open_files"])
    if job["landlock"]:
        restrict_files(job["reads"], job["writes"])


def limit(seconds: int, memory: int, file: int, files: int) -> None:
    """Of this process and what it starts, each: seconds of processor time, bytes of memory, and of a file,
    and open files.
    """
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file, file))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_processes(most: int = 0) -> None:
    """At most so many processes and threads of this user in its namespace; root may have more."""
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def end_with_parent() -> None:
    """Be killed when the thread that has started this process ends."""
    _prctl(1, 9)


def become(user: int) -> None:
    """As root: be `user` for good, whose processes the kernel counts, which it does not do with root's. It
    still reads what root may, such as a Python below /root, which only Landlock then narrows; it writes what
    is its own. Raises `OSError` without the right to.
    """
    _prctl(8, 1)  # keep capabilities over the change of the user
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _keep_capabilities(1 << _DAC_READ_SEARCH)
    _prctl(47, 2, _DAC_READ_SEARCH)  # over `execve` too


def drop_privileges() -> None:
    """Give back what root may beyond others; its files stay its own."""
    _keep_capabilities(0)


_DAC_READ_SEARCH = 2


def _keep_capabilities(kept: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    number = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine)
    if number is not None:
        _syscall(number, header, ctypes.create_string_buffer(struct.pack("<6I", *[kept] * 3, 0, 0, 0)))


def adopt_orphans() -> None:
    """Become the parent of what this process's children leave behind, however far down."""
    _prctl(36, 1)


def hide() -> None:
    """Let no process of the same user look into this one, or change it."""
    _prctl(4, 0)


def _no_new_privileges() -> bool:
    return _prctl(38, 1) == 0


def _prctl(option: int, first: int, second: int = 0) -> int:
    long = ctypes.c_ulong
    library = ctypes.CDLL(None, use_errno=True)
    return library.prctl(option, long(first), long(second), long(0), long(0))


def _syscall(number: int, *arguments: object) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *words)
