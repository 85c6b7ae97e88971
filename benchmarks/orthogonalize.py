"""Time `dmuon.orthogonalize` on CPU against `torch.optim.Muon`'s iteration, one matrix at a time.

Both run in float32 with the same coefficients ("original") and five steps; the baseline is the
code of torch.optim.Muon without its cast to bfloat16. Runs alternate, and medians are compared.

The last columns judge the machine: `rate` is the share of one large GEMM's rate that dmuon
keeps up over the FLOPs that it does, and `ceiling` the speedup if every symmetric product cost
exactly half and everything ran at that GEMM's rate. A bar above the ceiling cannot be met here.

    python benchmarks/orthogonalize.py [--threads 2] [--repeats 7]
"""

import argparse
import statistics
import time

import torch

from dmuon.newton_schulz import orthogonalize, resolve_coefficients
from dmuon.newton_schulz.choice import GRAM_ASPECT, choose_backend
from dmuon.newton_schulz.products import diagonal_side

ORIGINAL = resolve_coefficients("original")
# matrices, rows, columns, speedup to reach
CASES = [(1, 1024, 4096, 1.9), (1, 512, 2048, 1.9), (1, 1024, 1024, 1.25), (64, 128, 128, 3.0)]


def baseline(x):
    x = x / x.norm().clamp(min=1e-7)
    for a, b, c in ORIGINAL:
        gram = x @ x.T
        update = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, update, x, beta=a)
    return x


def medians_ms(functions, repeats):
    """Return the median wall time of each function; their runs alternate."""
    times = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, record in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            record.append((time.perf_counter() - start) * 1e3)
    return [statistics.median(record[1:]) for record in times]


def flops(rows, columns, share):
    """Return dmuon's FLOPs on one matrix if a symmetric product costs `share` of a full one.

    Long matrices take the Gram form with one restart: two Gram matrices, two products with the
    matrix and 14 with the Gram matrix. Others take the plain form.
    """
    cube, long = 2 * rows**3, 2 * rows**2 * columns
    if columns >= GRAM_ASPECT * rows:
        return 2 * (share + 1) * long + 14 * share * cube
    return len(ORIGINAL) * ((share + 1) * long + share * cube)


def time_case(count, rows, columns, repeats):
    """Return torch's and dmuon's milliseconds, after comparing the results."""
    matrices = [torch.randn(rows, columns) for _ in range(count)]

    def plain():
        return [baseline(x) for x in matrices]

    def ours():
        if count == 1:
            return [orthogonalize(matrices[0])]
        return list(orthogonalize(torch.stack(matrices)))

    torch.testing.assert_close(ours(), plain(), atol=1e-4, rtol=0)
    return medians_ms([plain, ours], repeats)


def gemm_rate(repeats):
    """Return the FLOPs a millisecond of one large GEMM."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 4096)
    (gemm_ms,) = medians_ms([lambda: left @ right], repeats)
    return 2 * 1024**2 * 4096 / gemm_ms


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"float32, {arguments.threads} threads, five steps; torch {torch.__version__}")
    titles = ("matrices", "torch ms", "dmuon ms", "speedup", "bar", "ceiling", "rate")
    print("{:>16} {:>9} {:>9} {:>8} {:>5} {:>8} {:>5}".format(*titles))
    missed = []
    for count, rows, columns, bar in CASES:
        rate = gemm_rate(arguments.repeats)
        plain_ms, ours_ms = time_case(count, rows, columns, arguments.repeats)
        backend = choose_backend((rows, columns), ORIGINAL, dtype=torch.float32, device_type="cpu")
        share = (1 + diagonal_side(rows) / rows) / 2 if backend.product == "blocks" else 1
        used = count * flops(rows, columns, share) / ours_ms / rate
        ceiling = plain_ms * rate / (count * flops(rows, columns, 1 / 2))
        print(
            f"{f'{count} x {rows} x {columns}':>16} {plain_ms:9.1f} {ours_ms:9.1f} "
            f"{plain_ms / ours_ms:8.2f} {bar:5.2f} {ceiling:8.2f} {used:5.0%}",
            flush=True,
        )
        if plain_ms / ours_ms < bar:
            where = "above the ceiling" if bar > ceiling else "within the ceiling"
            missed.append(f"{count} x {rows} x {columns} ({where})")
    if missed:
        raise SystemExit(f"speedup missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
