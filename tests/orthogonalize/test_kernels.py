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
from dmuon.orthogonalize.kernels.symmetric import triton_product

generator = torch.Generator().manual_seed(0)
for size, depth in [(1, 17), (17, 63), (63, 1), (129, 17), (65, 129)]:
    # The interpreter multiplies the bits of bfloat16 as integers: that dtype needs a GPU.
    for dtype, tolerance in [(torch.float32, 1e-5), (torch.float16, 2e-3)]:
        wide = torch.randn(2, size, 2 * depth, generator=generator).to(dtype)
        x = wide[:, :, ::2]
        gram = triton_product(x, x.mT)
        expected = x.double() @ x.double().mT
        torch.testing.assert_close(gram.double(), expected, atol=tolerance, rtol=tolerance)
        square = torch.randn(2, size, size, generator=generator)
        square = (square + square.mT).to(dtype).mT / size
        found = triton_product(square, square, square, alpha=2.0315, beta=-4.775)
        exact = square.double()
        expected = 2.0315 * exact @ exact - 4.775 * exact
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(found[:, 64:, :64], found[:, :64, 64:].mT)
"""

COMPILED = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from dmuon.orthogonalize.kernels.symmetric import symmetric_kernel, tile_config

arch, name, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
config = tile_config({"fp32": torch.float32, "bf16": torch.bfloat16}[name], 1024)
options = {key: config.pop(key) for key in ("num_warps", "num_stages")}
# Contiguous inputs: Triton specialises unit strides and sizes divisible by 16.
constants = dict(config, HAS_ADD=True, left_stride_k=1, right_stride_n=1, add_stride_n=1)
signature, divisible = {}, {}
for index, argument in enumerate(symmetric_kernel.arg_names):
    if argument in constants:
        signature[argument] = "constexpr"
    elif argument in ("alpha", "beta"):
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


@pytest.mark.parametrize(
    ("arch", "dtype", "instruction"),
    [
        (80, "bf16", r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16"),
        (90, "bf16", r"wgmma\.mma_async\.sync\.aligned\.m64n128k16\.f32\.bf16"),
        (90, "fp32", r"fma\.rn\.f32"),
    ],
)
def test_symmetric_kernel_compiles_to_tensor_core_code_without_spills(
    arch, dtype, instruction, tmp_path
):
    cuobjdump = run_python(COMPILED, str(arch), dtype, str(tmp_path)).strip()
    assert re.search(instruction, Path(tmp_path, "kernel.ptx").read_text())
    usage = subprocess.run(
        [cuobjdump, "-res-usage", tmp_path / "kernel.cubin"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    # Spilled registers would lie on the stack or in local memory.
    assert re.search(r"REG:\d+ STACK:0 SHARED:\d+ LOCAL:0", usage), usage


def test_cpu_needs_no_triton():
    run_python(
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "import torch\n"
        "from dmuon.orthogonalize import orthogonalize, resolve_coefficients\n"
        "orthogonalize(torch.ones(300, 300), coefficients=resolve_coefficients('original'))\n"
        "assert not any(name.startswith('dmuon.orthogonalize.kernels') for name in sys.modules)\n"
    )
