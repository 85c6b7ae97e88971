"""Every Triton kernel: in the interpreter against float64, and compiled for real GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

INTERPRETED = """
import torch
from dmuon.newton_schulz.kernels.triton import triton_product
from dmuon.newton_schulz.products import Terms

generator = torch.Generator().manual_seed(0)
tolerances = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
for size, depth in [(1, 17), (17, 63), (63, 1), (129, 17), (65, 129)]:
    for dtype, tolerance in tolerances.items():
        wide = torch.randn(2, size, 2 * depth, generator=generator).to(dtype)
        x = wide[:, :, ::2]
        gram = triton_product(x, x.mT, Terms())
        expected = x.double() @ x.double().mT
        torch.testing.assert_close(gram.double(), expected, atol=tolerance, rtol=tolerance)
        # One that shows a factor taken for its transpose, although the result is symmetric.
        symmetric = torch.randn(2, depth, depth, generator=generator).double()
        weighted = (x.double() @ (symmetric + symmetric.mT)).to(dtype)
        found = triton_product(weighted, x.mT, Terms(0.5))
        expected = 0.5 * weighted.double() @ x.double().mT
        scale = weighted.double().abs() @ x.double().mT.abs()
        assert ((found.double() - expected).abs() <= tolerance * (1 + 2 * scale)).all()
        square = torch.randn(2, size, size, generator=generator)
        square = (square + square.mT).to(dtype).mT / size
        found = triton_product(square, square, Terms(2.0315, square, -4.775, 3.4445))
        exact = square.double()
        expected = 2.0315 * exact @ exact - 4.775 * exact + 3.4445 * torch.eye(size)
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(found[:, 64:, :64], found[:, :64, 64:].mT)
"""

COMPILED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dmuon.newton_schulz.kernels.triton import symmetric_kernel, tile_config

arch, name, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
config = tile_config(dtypes[name], int(sys.argv[4]))
options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
# Contiguous inputs: Triton specialises unit strides and sizes divisible by 16.
constants = dict(config, HAS_ADD=True, UPCAST=False)
constants |= {sys.argv[5]: 1}
signature, divisible = {}, {}
for index, argument in enumerate(symmetric_kernel.arg_names):
    if argument in constants:
        signature[argument] = "constexpr"
    elif argument in ("alpha", "beta", "gamma"):
        signature[argument] = "fp32"
    else:
        signature[argument] = f"*{name}" if argument.endswith("_ptr") else "i32"
        divisible[(index,)] = [["tt.divisibility", 16]]
source = ASTSource(symmetric_kernel, signature, constants, divisible)
kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
open(folder + "/kernel.ptx", "w").write(kernel.asm["ptx"])
open(folder + "/kernel.cubin", "wb").write(kernel.asm["cubin"])
print(triton.knobs.nvidia.cuobjdump.path)
"""


def run_python(code, *arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "TRITON_DEFAULT_FP_FUSION": "1", **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_symmetric_kernel_equals_float64_in_the_interpreter():
    run_python(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")


# The right factor is a transpose (X X^T) or not (products of symmetric matrices).
@pytest.mark.parametrize("unit", ["right_stride_k", "right_stride_n"])
@pytest.mark.parametrize(
    ("arch", "dtype", "size", "instruction"),
    [
        (80, "bf16", 1024, r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16"),
        (80, "fp16", 256, r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16"),
        (90, "bf16", 1024, r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16"),
        (90, "fp16", 1024, r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.f16"),
        (90, "bf16", 256, r"wgmma\.mma_async\.sync\.aligned\.m64n64k16\.f32\.bf16"),
        (90, "fp32", 1024, r"fma\.rn\.f32"),
    ],
)
def test_symmetric_kernel_compiles_to_tensor_core_code_without_spills(
    arch, dtype, size, instruction, unit, tmp_path
):
    cuobjdump = run_python(COMPILED, str(arch), dtype, str(tmp_path), str(size), unit).strip()
    assert re.search(instruction, Path(tmp_path, "kernel.ptx").read_text())
    usage = subprocess.run(
        [cuobjdump, "-res-usage", tmp_path / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # Spilled registers would lie on the stack or in local memory.
    assert re.search(r"REG:\d+ STACK:0 SHARED:\d+ LOCAL:0", usage), usage


QUACK = """
import sys, types
import torch

calls = []

def gemm_symmetric(A, B, C=None, out=None, out_dtype=None, alpha=1.0, beta=1.0):
    calls.append(tuple(A.shape))
    total = alpha * (A.float() @ B.float())
    return (total if C is None else total + beta * C.float()).to(A.dtype)

sys.modules["quack"] = types.ModuleType("quack")
interface = sys.modules["quack.gemm_interface"] = types.ModuleType("quack.gemm_interface")
interface.gemm_symmetric = gemm_symmetric

from dmuon.newton_schulz.kernels.quack import quack_product
from dmuon.newton_schulz.products import Terms, dense_product

for size, depth in [(16, 24), (16, 23), (15, 24)]:
    x = torch.randn(2, size, depth).half()
    r = dense_product(x, x.mT, Terms()) / depth
    wide = Terms(2.0, r.float(), -3.0, 4.0)
    for left, right, terms, exact in [
        (x, x.mT, Terms(), Terms()), (r, r, Terms(2.0, r, -3.0, 4.0), wide)
    ]:
        torch.testing.assert_close(
            quack_product(left, right, terms).float(),
            dense_product(left.float(), right.float(), exact),
            atol=1e-2, rtol=1e-2,
        )
# A side that is no multiple of eight never reaches it.
assert calls == [(2, 16, 24), (2, 16, 16), (2, 16, 16)]
"""


def test_quack_product_equals_the_dense_one():
    # The package runs on a GPU only; its place is taken by a function of the same signature.
    run_python(QUACK)


def test_r72_cpu_needs_no_triton():
    run_python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "import dmuon\n"
        "dmuon.orthogonalize(torch.ones(300, 300))\n"
        "assert not any(name.startswith('dmuon.newton_schulz.kernels') for name in sys.modules)\n"
    )
