"""Writes a C program that times the inner loop of products with AVX2: 4 rows times 16 outputs over two scales of 32
inputs each, weights, activations, scales and sums in the L1 cache, nothing unpacked.

    python3 inner_loop.py > loop.c && gcc -O1 -mavx2 loop.c -o loop && taskset -c 1 ./loop
"""

ROWS, QUADS, SCALES = 4, 8, 2


def loop(scaled, summed):
    """The instructions: products of pairs of bytes, added over a scale's quads; `scaled`: times the scale; `summed`: and
    added to words in memory."""
    lines = []
    for quad in range(SCALES * QUADS):
        scale, nth = divmod(quad, QUADS)
        for half in range(2):
            lines.append(f"vmovdqu {64 * quad + 32 * half}(%0),%%ymm{8 + half}")
        for row in range(ROWS):
            lines.append(f"vpbroadcastd {4 * (8 * quad + row)}(%1),%%ymm10")
            for half in range(2):
                total = 2 * row + half
                if nth == 0:
                    lines.append(f"vpmaddubsw %%ymm10,%%ymm{8 + half},%%ymm{total}")
                else:
                    lines.append(f"vpmaddubsw %%ymm10,%%ymm{8 + half},%%ymm11")
                    lines.append(f"vpaddw %%ymm11,%%ymm{total},%%ymm{total}")
                if nth == QUADS - 1 and scaled:
                    lines.append(f"vpmaddwd {64 * scale + 32 * half}(%2),%%ymm{total},%%ymm{total}")
                    if summed:
                        lines.append(f"vpaddd {32 * total}(%3),%%ymm{total},%%ymm{total}")
                        lines.append(f"vmovdqa %%ymm{total},{32 * total}(%3)")
    return lines


print("""#include <stdint.h>
#include <stdio.h>
#include <time.h>
static uint8_t weights[4096] __attribute__((aligned(64))), scales[128] __attribute__((aligned(64)));
static int32_t x[512] __attribute__((aligned(64)));
static uint8_t sums[256] __attribute__((aligned(64)));
static double now() { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
int main() {""")
clobbers = ",".join(f'"ymm{i}"' for i in range(12))
for name, scaled, summed in [("pairs", 0, 0), ("and scales", 1, 0), ("and sums in memory", 1, 1)]:
    text = r"\n\t".join(loop(scaled, summed))
    print(f"""{{ double best = 1e9;
for (int run = 0; run < 200; run++) {{ double start = now();
for (int i = 0; i < 80000; i++) __asm__ volatile("{text}"
:: "r"(weights + i % 4 * 1024), "r"(x + i % 4 * 128), "r"(scales), "r"(sums) : {clobbers}, "memory");
double seconds = now() - start; if (seconds < best) best = seconds; }}
printf("{name}: %.1f G multiply-adds/s\\n", 80000 * {ROWS * 16 * 4 * SCALES * QUADS}. / best / 1e9); }}""")
print("}")
