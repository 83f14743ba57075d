"""Confine this process with the kernel's own means.

Seccomp refuses calls that start or reach other processes, open sockets or raise limits. Landlock limits the
files that can be read and written. Neither needs a privilege, and neither can be undone. `setrlimit` limits
resources. Imports the standard library alone, because the programs in the sandbox read this file too.
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
"""Machine -> its seccomp number, and its column in `_REFUSED`."""
_PROCESSES = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "setpriority": (141, 140),
    "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
}  # fmt: skip
"""Calls that start other processes, or reach them."""
_REFUSED = {
    # sockets, and calls that could open one past this filter; pairs within the process are no way out
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # other processes
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
"""Refused, except to the process itself, which may abort."""
_CLONE, _CLONE3, _PRLIMIT = (56, 220), 435, (302, 261)
_THREAD, _NAMESPACES = 0x10000, 0x7E020000
_ALLOW, _NO_PERMISSION, _NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x00050026
_LOAD, _EQUAL, _BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_X32 = 0x40000000

Jump = tuple[int, int, int, int]
"""An instruction of the filter: code, jump if true, jump if false, operand."""


def refuse_calls(*, processes: bool = False) -> bool:
    """Apply seccomp to this process and its children, for good. Return False if the machine or kernel has
    none.

    Refused calls fail with EPERM. Processes can be neither started nor signalled. With `processes` it may
    start programs of its own, but gets no further right and no namespaces.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None or not _no_new_privileges():
        return False
    program = b"".join(struct.pack("<HBBI", *step) for step in _build_filter(*machine, processes))
    buffer = ctypes.create_string_buffer(program)
    header = ctypes.create_string_buffer(
        struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    )
    return _prctl(22, 2, ctypes.addressof(header)) == 0


def _build_filter(machine: int, column: int, processes: bool) -> list[Jump]:
    """Build the filter. Words of a call: number at 0, machine at 4, arguments from 16 as low, high halves."""
    process = os.getpid()
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
        steps += [(_EQUAL, 0, 4, numbers[column]), (_LOAD, 0, 0, 16), (_EQUAL, 0, 1, process)]
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
    """Return the kernel's Landlock version, or 0 if it has none or Landlock is switched off."""
    return max(0, _syscall(_RULESET, None, 0, 1))


def restrict_files(read: Sequence[str], write: Sequence[str] = ()) -> bool:
    """Apply Landlock to this process and its children, for good. Return False if the kernel has none. Files
    below `read` can be read, those below `write` also changed, and nothing else. If the kernel supports it,
    TCP ports and signals to processes outside this confinement are refused too.
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
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    rule = ctypes.create_string_buffer(
                        struct.pack("<Qi", allowed[not folder], descriptor), 12
                    )
                    _syscall(_ADD_RULE, rules, 1, rule, 0)
                finally:
                    os.close(descriptor)
        return _syscall(_RESTRICT, rules, 0) == 0
    finally:
        os.close(rules)


def confine(job: Mapping[str, Any]) -> None:
    """Drop rights, resources and files of this process for good, as its `job` says. `refuse_calls` comes
    last, because it forbids much of this.
    """
    if job["uid"]:
        become(job["uid"])
    else:
        _keep_capabilities(0)  # without root's privileges; its files stay its own
    if job["kind"] != "bubblewrap":  # bubblewrap ends with its own parent, and all in it
        end_with_parent()
    # Each child has these too: seconds of processor time, bytes of memory, bytes of a file, open files.
    resource.setrlimit(resource.RLIMIT_CPU, (job["cpu_seconds"], job["cpu_seconds"]))
    resource.setrlimit(resource.RLIMIT_AS, (job["memory"], job["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (job["disk"], job["disk"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (job["open_files"], job["open_files"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if job["landlock"]:
        restrict_files(job["reads"], job["writes"])


def limit_processes(most: int = 0) -> None:
    """Limit the processes and threads of this user in its namespace. Root may have more."""
    resource.setrlimit(resource.RLIMIT_NPROC, (most, most))


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    _prctl(1, 9)


def become(user: int) -> None:
    """As root, become `user` for good, because the kernel counts this user's processes and not root's. The
    process still reads files that root may read, such as a Python below /root. Only Landlock then narrows
    that. It writes its own files alone. Raises `OSError` if it has no right to.
    """
    _prctl(8, 1)  # keep capabilities over the change of the user
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    _keep_capabilities(1 << _DAC_READ_SEARCH)
    _prctl(47, 2, _DAC_READ_SEARCH)  # over `execve` too


_DAC_READ_SEARCH = 2


def _keep_capabilities(mask: int) -> None:
    header = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    number = {"x86_64": 126, "aarch64": 91}.get(os.uname().machine)
    if number is not None:
        _syscall(number, header, ctypes.create_string_buffer(struct.pack("<6I", *[mask] * 3, 0, 0, 0)))


def adopt_orphans() -> None:
    """Become the parent of orphans of this process's children, at any depth."""
    _prctl(36, 1)


def hide() -> None:
    """Forbid other processes of the same user to inspect or change this one."""
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
