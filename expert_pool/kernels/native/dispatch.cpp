// Which instruction set, who computes what, and the functions that Python calls.
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "experts.h"

namespace {

constexpr int64_t BLOCK_BYTES = 128 * 1024;  // of weights that a thread takes at a time
constexpr int64_t COMBINE_BYTES = 64 * 1024;
constexpr int SPINS = 2000;  // before a waiting thread offers its core to others

int64_t block_columns(int64_t row_bytes) {
  int64_t columns = BLOCK_BYTES / (row_bytes * CHUNK) * CHUNK;
  return columns < CHUNK ? CHUNK : columns;
}

int64_t blocks(int64_t columns, int64_t block) { return (columns + block - 1) / block; }

// Threads take blocks from one row of them: up of the first expert, then up of each expert before
// down of the one before it. Whoever finds a down block too early waits for up blocks that others
// have taken before; so the first blocks not finished are always in someone's hands.
struct Work {
  const Kernels* kernels;
  const Layer* layer;
  const Call* call;
  int64_t up_block, up_blocks, down_block, down_blocks;
  int64_t* firsts;   // first pair of each expert
  int64_t* done;     // finished up blocks of each expert
  int64_t next;

  void up(int64_t expert, int64_t block) {
    int64_t begin = block * up_block, end = begin + up_block;
    if (end > layer->inner) end = layer->inner;
    kernels->up(*layer, slot(expert), *call, firsts[expert], call->counts[expert], begin, end);
    __atomic_add_fetch(&done[expert], 1, __ATOMIC_RELEASE);
  }

  void down(int64_t expert, int64_t block) {
    for (int spins = 0; __atomic_load_n(&done[expert], __ATOMIC_ACQUIRE) < up_blocks; ++spins)
      if (spins >= SPINS) sched_yield();
    int64_t begin = block * down_block, end = begin + down_block;
    if (end > layer->hidden) end = layer->hidden;
    kernels->down(*layer, slot(expert), *call, firsts[expert], call->counts[expert], begin, end);
  }

  const char* slot(int64_t expert) const {
    return layer->arena + call->slots[expert] * layer->slot_bytes;
  }

  void run() {
    int64_t stage = up_blocks + down_blocks, total = stage * call->experts;
    while (true) {
      int64_t at = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (at >= total) return;
      if (at < up_blocks) {
        up(0, at);
        continue;
      }
      int64_t expert = (at - up_blocks) / stage, block = (at - up_blocks) % stage;
      if (expert == call->experts - 1)
        down(expert, block);
      else if (block < up_blocks)
        up(expert + 1, block);
      else
        down(expert, block - up_blocks);
    }
  }
};

void run_work(int64_t begin, int64_t end, void* context) {
  for (; begin < end; ++begin) static_cast<Work*>(context)->run();
}

struct LinearWork {
  const Kernels* kernels;
  const Linear* linear;
  int64_t block, next;
};

void run_linear(int64_t begin, int64_t end, void* context) {
  LinearWork& work = *static_cast<LinearWork*>(context);
  for (; begin < end; ++begin) {
    while (true) {
      int64_t first = __atomic_fetch_add(&work.next, work.block, __ATOMIC_RELAXED);
      if (first >= work.linear->width) break;
      int64_t last = first + work.block;
      if (last > work.linear->width) last = work.linear->width;
      work.kernels->linear(*work.linear, first, last);
    }
  }
}

struct Combining {
  const Kernels* kernels;
  const uint16_t* by_pair;
  const float* weights;
  uint16_t* out;
  int64_t hidden, top_k;
};

void run_combining(int64_t begin, int64_t end, void* context) {
  const Combining& c = *static_cast<Combining*>(context);
  c.kernels->combine(c.by_pair, c.weights, c.out, c.hidden, c.top_k, begin, end);
}

const Kernels* find(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#if defined(COTERIE_NO_AVX512_BF16)
  const Kernels* best = avx2 ? &avx2_kernels : &generic_kernels;
#else
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512bf16");
  const Kernels* best = avx512 ? &avx512_bf16_kernels : avx2 ? &avx2_kernels : &generic_kernels;
#endif
  if (!strcmp(name, "avx2")) return avx2 ? &avx2_kernels : nullptr;
#else
  const Kernels* best = &generic_kernels;
#endif
  if (!strcmp(name, "generic")) return &generic_kernels;
  return strcmp(name, "native") ? nullptr : best;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// "native": the best this processor runs; nullptr where it cannot run the named one.
const Kernels* coterie_kernels(const char* name) { return find(name); }

const char* coterie_kernels_name(const Kernels* kernels) { return kernels->name; }

// 0; 1: no memory; 2: torch's threads failed, and the outputs are not whole.
int32_t coterie_experts(const Kernels* kernels, ParallelFor parallel, const Layer* layer,
                        const Call* call) {
  int64_t experts = call->experts;
  if (experts <= 0) return 0;
  int64_t* numbers = static_cast<int64_t*>(calloc(2 * experts, sizeof(int64_t)));
  if (!numbers) return 1;
  Work work = {kernels, layer, call, 0, 0, 0, 0, numbers, numbers + experts, 0};
  bool across = layer->transposed;
  work.up_block = across ? ACROSS : block_columns(layer->hidden * 2 * (layer->gated ? 2 : 1));
  work.up_blocks = blocks(layer->inner, work.up_block);
  work.down_block = across ? ACROSS : block_columns(layer->inner * 2);
  work.down_blocks = blocks(layer->hidden, work.down_block);
  for (int64_t e = 1; e < experts; ++e)
    work.firsts[e] = work.firsts[e - 1] + call->counts[e - 1];
  int32_t failed = 0;
  if (parallel && call->threads > 1)
    failed = parallel(0, call->threads, 1, run_work, &work);
  else
    work.run();
  free(numbers);
  return failed ? 2 : 0;
}

int32_t coterie_linear(const Kernels* kernels, ParallelFor parallel, const uint16_t* rows,
                       const uint16_t* weight, const uint16_t* bias, uint16_t* out, int64_t count,
                       int64_t depth, int64_t width, int64_t threads) {
  Linear linear = {rows, weight, bias, out, count, depth, width};
  LinearWork work = {kernels, &linear, block_columns(depth * 2), 0};
  int32_t failed = 0;
  if (parallel && threads > 1 && width > work.block)
    failed = parallel(0, threads, 1, run_linear, &work);
  else
    run_linear(0, 1, &work);
  return failed ? 2 : 0;
}

// by_pair bf16 [rows * top_k, hidden] and weights [rows, top_k] to bf16 [rows, hidden].
int32_t coterie_combine(const Kernels* kernels, ParallelFor parallel, const uint16_t* by_pair,
                        const float* weights, uint16_t* out, int64_t rows, int64_t hidden,
                        int64_t top_k, int64_t threads) {
  Combining combining = {kernels, by_pair, weights, out, hidden, top_k};
  int32_t failed = 0;
  if (parallel && threads > 1 && rows * top_k * hidden * 2 > COMBINE_BYTES)
    failed = parallel(0, rows, (rows + threads - 1) / threads, run_combining, &combining);
  else
    run_combining(0, rows, &combining);
  return failed ? 2 : 0;
}
}
#pragma GCC visibility pop
