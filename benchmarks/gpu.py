"""Check the kernels on a GPU against float64, then time `orthogonalize`. Under four minutes.

Prepared for one H200 with torch 2.11 and Triton 3.6; no figure from it has been recorded yet. For
every matrix shape of Llama-3-8B and Qwen3-32B it prints the milliseconds of `torch.optim.Muon`'s
iteration, of each backend in bfloat16, of one batched GEMM of the same shape, and the arithmetic
floor: the FLOPs of the Gram form with every symmetric product halved, over the best GEMM rate seen.
The backends of quack-kernels are among them where that package is installed.

    python benchmarks/gpu.py [--seconds 200]
"""

import argparse
import itertools
import time
from functools import partial

import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from dmuon.newton_schulz import orthogonalize, resolve_coefficients
from dmuon.newton_schulz.backend import BACKENDS
from dmuon.newton_schulz.choice import is_importable, obstacle
from dmuon.newton_schulz.kernels.triton import triton_product
from dmuon.newton_schulz.products import Terms
from dmuon.newton_schulz.restarts import safe_restarts

ORIGINAL = resolve_coefficients("original")
# (rows, columns) of one layer, without embeddings; how many of them.
SHAPES = {
    "Llama-3-8B": [(4096, 4096, 2), (1024, 4096, 2), (14336, 4096, 3)],
    "Qwen3-32B": [(8192, 5120, 1), (1024, 5120, 2), (5120, 8192, 1), (25600, 5120, 3)],
}
PRODUCTS = [triton_product]
if is_importable("quack.gemm_interface"):
    from dmuon.newton_schulz.kernels.quack import quack_product

    PRODUCTS.append(quack_product)


def backends(dtype):
    """Return the backends that run on this machine in `dtype`."""
    device = torch.device("cuda")
    return [b for b in BACKENDS if obstacle(b, ORIGINAL, device, dtype) is None]


def check_products():
    """Compare the symmetric kernels with float64 on odd sizes, strides, batches and dtypes."""
    generator = torch.Generator("cuda").manual_seed(0)
    tolerances = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    shapes = [(1, 1, 17), (3, 17, 63), (2, 129, 1), (2, 511, 1000), (3, 256, 520), (1, 1024, 4096)]
    for product, dtype in itertools.product(PRODUCTS, tolerances):
        if product is not triton_product and dtype == torch.float32:
            continue
        close = partial(torch.testing.assert_close, atol=tolerances[dtype], rtol=tolerances[dtype])
        for batch, size, depth in shapes:
            wide = torch.randn(batch, size, 2 * depth, generator=generator, device="cuda")
            wide = (wide / depth**0.5).to(dtype)
            strided = [wide[..., ::2]] if product is triton_product else []
            for x in (wide[..., :depth], *strided):
                found = product(x, x.mT, Terms())
                exact = x.double() @ x.double().mT
                close(found.double(), exact)
                r = found / max(1, size**0.5)
                found = product(r, r, Terms(2.0315, r, -4.775, 3.4445))
                r = r.double()
                exact = 2.0315 * r @ r - 4.775 * r + 3.4445 * torch.eye(size, device="cuda")
                close(found.double(), exact)
        print(f"{product.__name__} {dtype} equals float64")


def check_backends():
    """Compare every backend with float64 on a batch, in bfloat16 and float16."""
    x = torch.randn(2, 512, 1536, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
    expected = orthogonalize(x.double(), backend="newton_schulz+dense")
    for dtype, tolerance in [(torch.bfloat16, 0.04), (torch.float16, 0.006), (torch.float32, 1e-3)]:
        for backend in backends(dtype):
            found = orthogonalize(x, coefficients=ORIGINAL, dtype=dtype, backend=backend)
            error = ((found - expected).norm() / expected.norm()).item()
            print(f"{backend!s:>22} {dtype!s:>15} relative error {error:.1e}")
            assert error <= tolerance, (backend, dtype, error)


def milliseconds(function, repeats=5):
    """Return the median time of `function` on the device."""
    function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[repeats // 2]


def floor_flops(rows, columns):
    """Return the FLOPs of the Gram form with every symmetric product halved."""
    segments = 1 + len(safe_restarts(ORIGINAL, torch.bfloat16))
    # Z and Q on every step but the first of a segment, R twice between steps of a segment.
    products = 4 * len(ORIGINAL) - 3 * segments
    return segments * 3 * rows**2 * columns + products * rows**3


def time_shape(rows, columns, count, names):
    """Return the milliseconds of torch.optim.Muon, of each backend, and of one batched GEMM."""
    x = torch.randn(count, rows, columns, device="cuda", dtype=torch.bfloat16)
    wide = x if rows <= columns else x.mT
    gram = torch.randn(count, min(rows, columns), min(rows, columns), device="cuda").bfloat16()

    def torch_muon():
        return [_zeropower_via_newtonschulz(matrix, ORIGINAL[0], 5, 1e-7) for matrix in x]

    ours = [partial(orthogonalize, x, coefficients=ORIGINAL, backend=name) for name in names]
    return [milliseconds(f) for f in (torch_muon, *ours, partial(torch.bmm, gram, wide))]


def time_shapes(deadline):
    names = backends(torch.bfloat16)
    titles = ["torch", *names, "one GEMM", "floor"]
    print(f"{'model':>11} {'shape':>18} " + " ".join(f"{name!s:>20}" for name in titles))
    best_rate = 0.0
    for model, shapes in SHAPES.items():
        for rows, columns, count in shapes:
            if time.monotonic() > deadline:
                print("out of time: the remaining shapes were not timed")
                return
            times = time_shape(rows, columns, count, names)
            small, large = sorted((rows, columns))
            best_rate = max(best_rate, 2 * count * small * small * large / times[-1])
            times.append(count * floor_flops(small, large) / best_rate)
            cells = " ".join(f"{value:20.3f}" for value in times)
            print(f"{model:>11} {f'{count} x {rows} x {columns}':>18} {cells}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    check_products()
    check_backends()
    time_shapes(deadline)


if __name__ == "__main__":
    main()
