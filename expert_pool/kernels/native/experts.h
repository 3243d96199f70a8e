// What the Python side and the kernels agree on. library.py declares the same structures.
#pragma once

#include <stdint.h>

// torch's own thread pool, as libtorch_cpu exports it: torch_parallel_for of torch's stable C ABI.
typedef void (*ParallelBody)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, ParallelBody body,
                               void* context);

// One MoE layer: the same for all of its experts.
struct Layer {
  int64_t hidden;
  int64_t inner;       // width of the intermediate row
  int64_t gated;       // 1: the up projection has 2 * inner outputs, gates first
  int64_t activation;  // enum Activation
  int64_t transposed;  // 1: weights are [in, out], else [out, in]
  int64_t interleaved;  // 1: gate and up alternate; only where transposed
  float alpha;         // of CLAMPED_SWIGLU
  float limit;
  const char* arena;   // slot 0
  int64_t slot_bytes;
  int64_t up;          // byte offsets in a slot; -1: it has none
  int64_t up_bias;
  int64_t down;
  int64_t down_bias;
};

enum Activation { SILU = 0, GELU_TANH = 1, GELU_ERF = 2, RELU = 3, RELU_SQUARED = 4,
                  CLAMPED_SWIGLU = 5 };

// Some experts of a layer and the rows that chose them, one expert after another.
struct Call {
  const uint16_t* rows;   // bf16 [T, hidden]
  const int64_t* pairs;   // row * top_k + choice
  const int64_t* slots;   // of each expert
  const int64_t* counts;  // pairs of each expert
  int64_t experts;
  int64_t top_k;
  int64_t placed;         // 1: the output of a pair is row `pair` of out, 0: rows in order
  uint16_t* scratch;      // bf16 [pairs, inner]
  uint16_t* out;          // bf16 [..., hidden]
  int64_t threads;
};

// A linear layer over a few rows.
struct Linear {
  const uint16_t* rows;    // bf16 [count, depth]
  const uint16_t* weight;  // bf16 [width, depth]
  const uint16_t* bias;    // bf16 [width] or none
  uint16_t* out;           // bf16 [count, width]
  int64_t count;
  int64_t depth;
  int64_t width;
};

constexpr int64_t CHUNK = 16;   // columns that are finished together, of weights [out, in]
constexpr int64_t ACROSS = 256;  // columns of a block of weights [in, out]

// What one instruction set offers. Blocks count columns; a block begins at a multiple of CHUNK, or
// of ACROSS where weights are transposed, where it is no longer than that.
struct Kernels {
  const char* name;
  void (*up)(const Layer&, const char* slot, const Call&, int64_t first, int64_t count,
             int64_t begin, int64_t end);
  void (*down)(const Layer&, const char* slot, const Call&, int64_t first, int64_t count,
               int64_t begin, int64_t end);
  void (*linear)(const Linear&, int64_t begin, int64_t end);
  void (*combine)(const uint16_t* by_pair, const float* weights, uint16_t* out, int64_t hidden,
                  int64_t top_k, int64_t begin, int64_t end);
};

extern const Kernels generic_kernels;
#if defined(__x86_64__)
extern const Kernels avx2_kernels;
extern const Kernels avx512_bf16_kernels;
#endif
