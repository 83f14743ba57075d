"""The CUDA kernels without a GPU: each compiles for sm_90a, fits the machine, and keeps its statistics.

Each takes its compilers several seconds, so a normal run compiles one of them, and `--full` the rest.
On a machine with an H100 or H200:
python -m pytest -m gpu tests/kernels/test_tilelang_sm90.py
"""

import importlib.util
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from opd.kernels import tilelang_rows, tilelang_target, tilelang_tokens, verification
from opd.kernels.divergences import divergence_

CUDA = tilelang_target.CUDA
MAX_SHARED_BYTES = 227 * 1024
REGISTERS_PER_PROCESSOR = 65536

KERNELS = {
    "row_reverse": (tilelang_rows.row_kernel, "reverse", "float32"),
    "row_forward": (tilelang_rows.row_kernel, "forward", "float32"),
    "row_jsd": (tilelang_rows.row_kernel, "jsd", "float32"),
    "token_statistics": (tilelang_tokens.token_kernel, "statistics", "float32"),
    "token_gradient": (tilelang_tokens.token_kernel, "entropy_gradient", "float32"),
}
FAST = ("row_reverse",)
ALL = [name if name in FAST else pytest.param(name, marks=pytest.mark.long) for name in KERNELS]
GPU_REASON = tilelang_target.missing("cuda")

needs_nvcc = pytest.mark.skipif(
    importlib.util.find_spec("tilelang") is None or shutil.which("nvcc") is None,
    reason="needs opd[tilelang] and nvcc",
)
needs_gpu = pytest.mark.skipif(
    GPU_REASON is not None,
    reason=f"{GPU_REASON}; run `python -m pytest -m gpu tests/kernels` on an H100 or H200",
)


@dataclass(frozen=True)
class Compiled:
    source: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    threads: int


@cache
def lowered(name: str, warp_specialized: bool = False) -> tuple[str, int]:
    """The CUDA source, and the dynamic shared memory that its launch asks for in bytes."""
    import tilelang
    from tilelang import tvm

    factory, *options = KERNELS[name]
    target = tvm.target.Target({"kind": "cuda", "arch": tilelang_target.HOPPER})
    passes = {} if warp_specialized else tilelang_target.CUDA_PASSES
    with tvm.transform.PassContext(opt_level=3, config=passes), target:
        artifact = tilelang.lower(factory(CUDA, *options), target=target)
    (function,) = artifact.device_mod.functions.values()
    return artifact.kernel_source, int(function.attrs.get("dyn_shared_memory_buf", 0))


@cache
def compiled(name: str, folder: Path) -> Compiled:
    import tilelang

    root = Path(tilelang.__file__).parent
    source, shared_bytes = lowered(name)
    path = folder / f"{name}.cu"
    path.write_text(source)
    includes = [f"-I{root / 'src'}", f"-I{root / '3rdparty' / 'cutlass' / 'include'}"]
    command = ["nvcc", "-cubin", f"-arch={tilelang_target.HOPPER}", "-std=c++20", "-w", "--ptxas-options=-v"]
    result = subprocess.run(
        [*command, *includes, "-o", path.with_suffix(".cubin"), path],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", result.stderr)
    registers = re.search(r"Used (\d+) registers", result.stderr)
    static = re.search(r"(\d+) bytes smem", result.stderr)
    threads = re.search(r"__launch_bounds__\((\d+)", source)
    assert spills is not None
    assert registers is not None
    assert threads is not None
    shared_bytes += int(static[1]) if static else 0
    return Compiled(source, int(registers[1]), int(spills[1]) + int(spills[2]), shared_bytes, int(threads[1]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sm90")


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("name", ALL)
def test_a_kernel_compiles_and_fits(name: str, folder: Path) -> None:
    kernel = compiled(name, folder)
    print(f"{name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared memory")
    assert kernel.spilled_bytes == 0
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert kernel.registers * kernel.threads <= REGISTERS_PER_PROCESSOR


def vocabulary_loops(source: str) -> list[tuple[int, int]]:
    """Lines of the loops over tiles of the vocabulary, from the first line to the closing brace."""
    lines = source.splitlines()
    loops = []
    for start, line in enumerate(lines):
        if re.search(r"for \(int \w+ = 0; \w+ < \(vocabulary >> \d+\)", line):
            indent = len(line) - len(line.lstrip())
            stop = next(i for i in range(start + 1, len(lines)) if lines[i] == " " * indent + "}")
            loops.append((start, stop))
    return loops


def statistics_start_once(source: str, sweeps: int) -> bool:
    """Whether both maxima and all three sums are set before the first sweep, and never again inside it."""
    lines, loops = source.splitlines(), vocabulary_loops(source)
    starts = [i for i, line in enumerate(lines) if "= -0x1.93e5939a08ceap+99f" in line]
    if len(starts) != 2 or len(loops) != sweeps or max(starts) > loops[0][0]:
        return False
    zeroed = (re.fullmatch(r"\s*(\w+)\[0\] = 0x0p\+0f/.*", line) for line in lines[max(starts) : loops[0][0]])
    sums = {match[1] for match in zeroed if match is not None}
    sweep = "\n".join(lines[loops[0][0] : loops[0][1]])
    kept = all(f" {name}[0] = ({name}[0] + " in sweep for name in sums)
    return len(sums) == 3 and kept and not any(f" {name}[0] = 0x0p+0f" in sweep for name in sums)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("kind", "sweeps"),
    [
        ("reverse", 2),
        *(pytest.param(kind, n, marks=pytest.mark.long) for kind, n in (("forward", 2), ("jsd", 3))),
    ],
)
def test_running_statistics_start_once_outside_the_vocabulary_loop(kind: str, sweeps: int) -> None:
    source, _ = lowered(f"row_{kind}")
    assert statistics_start_once(source, sweeps)
    # The miscompilation this guards against: what starts a statistic is moved into the loop.
    lines = source.splitlines()
    (start, _), *_ = vocabulary_loops(source)
    for moved in range(start - 5, start):
        broken = [*lines[:moved], *lines[moved + 1 : start + 1], lines[moved], *lines[start + 1 :]]
        assert not statistics_start_once("\n".join(broken), sweeps)


@pytest.mark.slow
@needs_nvcc
def test_every_cuda_kernel_is_built_without_warp_specialization() -> None:
    assert tilelang_target.CUDA_PASSES["tl.disable_warp_specialized"] is True
    source, _ = lowered("row_reverse")
    assert "warpgroup_reg_alloc" not in source
    assert "warpgroup_reg_dealloc" not in source


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_row_kernel_on_a_gpu(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(64, 32003, generator=generator) * 3
    teacher = student + torch.randn(64, 32003, generator=generator)
    coef = torch.rand(64, generator=generator)
    reference = student.double(), teacher.double()
    values = divergence_(*reference, kind, 0.3, coef.double())
    arrays = student.cuda(), teacher.cuda()
    got = tilelang_rows.divergence_(*arrays, kind, 0.3, coef.cuda())
    torch.testing.assert_close(got.cpu().double(), values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(arrays[0].cpu().double(), reference[0], rtol=1e-5, atol=1e-6)
    arrays[0][3, 7] = float("nan")
    got = tilelang_rows.divergence_(arrays[0], teacher.cuda(), kind, 0.3, None)
    assert got.isnan().sum() == 1


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("vocabulary", [17, 32003, 151936])
def test_single_tokens_on_a_gpu(vocabulary: int) -> None:
    launches = tilelang_tokens.launch_statistics, tilelang_tokens.launch_gradient
    assert verification.token_fault(*launches, vocabulary, torch.device("cuda")) is None
