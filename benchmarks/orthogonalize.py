"""Time the engine on CPU against `torch.optim.Muon`'s iteration, one matrix at a time.

Both run in float32 with the same coefficients ("original") and five steps; the baseline is the
code of torch.optim.Muon without its cast to bfloat16. Runs alternate, and medians are compared.

    python benchmarks/orthogonalize.py [--threads 2] [--repeats 7]
"""

import argparse
import statistics
import time

import torch

from dmuon.orthogonalize import orthogonalize, orthogonalize_all, resolve_coefficients
from dmuon.orthogonalize.symmetric import halvings

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


def gram_flops(rows, columns):
    """Return the FLOPs done by the Gram form on five steps with one restart, in blocks."""
    share = (1 + 2.0 ** -halvings(rows)) / 2
    return 2 * (share + 1) * 2 * rows**2 * columns + 14 * share * 2 * rows**3


def time_case(count, rows, columns, repeats):
    """Return torch's, the engine's and one GEMM's milliseconds, after comparing the results."""
    matrices = [torch.randn(rows, columns) for _ in range(count)]
    left, right = torch.randn(rows, rows), torch.randn(rows, columns)

    def plain():
        return [baseline(x) for x in matrices]

    def engine():
        if count == 1:
            return [orthogonalize(matrices[0], coefficients=ORIGINAL)]
        return orthogonalize_all(matrices, coefficients=ORIGINAL)

    torch.testing.assert_close(engine(), plain(), atol=1e-4, rtol=0)
    return medians_ms([plain, engine, lambda: left @ right], repeats)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"float32, {arguments.threads} threads, five steps; torch {torch.__version__}")
    print(f"{'matrices':>16} {'torch ms':>9} {'dmuon ms':>9} {'speedup':>8} {'bar':>5} {'GEMM':>6}")
    missed = []
    for count, rows, columns, bar in CASES:
        plain_ms, engine_ms, gemm_ms = time_case(count, rows, columns, arguments.repeats)
        # The rate of the FLOPs the Gram form does, over that of one large GEMM.
        rate = gram_flops(rows, columns) / engine_ms / (2 * rows**2 * columns / gemm_ms)
        print(
            f"{f'{count} x {rows} x {columns}':>16} {plain_ms:9.1f} {engine_ms:9.1f} "
            f"{plain_ms / engine_ms:8.2f} {bar:5.2f} {f'{rate:.0%}' if columns > rows else '':>6}",
            flush=True,
        )
        if plain_ms / engine_ms < bar:
            missed.append(f"{count} x {rows} x {columns}")
    if missed:
        raise SystemExit(f"speedup missed: {', '.join(missed)}")


if __name__ == "__main__":
    main()
