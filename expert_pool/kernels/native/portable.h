// Any processor: the compiler's own vectors of 8 floats, as wide as the instruction set makes them.
#pragma once

#include "tiles.h"

namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));

struct Portable {
  static constexpr int rows = 2;
  static constexpr int columns = 4;
  static constexpr int64_t step = 16;
  typedef Floats Sum;
  struct Values {
    Floats even, odd;
  };
  static inline Sum zero() { return Floats{}; }
  static inline Values split(Words words) {
    Words even = words << 16, odd = words & 0xffff0000u;
    Values values;
    memcpy(&values.even, &even, sizeof even);
    memcpy(&values.odd, &odd, sizeof odd);
    return values;
  }
  static inline Values load(const uint16_t* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return split(words);
  }
  static inline Values load_some(const uint16_t* from, int64_t count) {
    uint16_t padded[step] = {};
    for (int64_t i = 0; i < count; ++i) padded[i] = from[i];
    return load(padded);
  }
  static inline Sum add(Sum sum, const Values& a, const Values& b) {
    sum += a.even * b.even;
    sum += a.odd * b.odd;
    return sum;
  }
  static inline void total(const Sum* sums, float* out) {
    for (int c = 0; c < columns; ++c) {
      Sum s = sums[c];
      out[c] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }
  }

  // Across: columns of a weight's row in vectors of even and of odd ones.
  static constexpr int64_t wide = 32;
  static constexpr int64_t deep = 1;
  static constexpr int parts = 4;
  typedef Floats Weights;
  static inline void load_wide(const uint16_t* first, const uint16_t*, Weights* to) {
    for (int half = 0; half < 2; ++half) {
      Values values = load(first + 16 * half);
      to[2 * half] = values.even;
      to[2 * half + 1] = values.odd;
    }
  }
  typedef float Spread;
  static inline Spread spread(const uint16_t* row) { return widen(*row); }
  static inline Sum add_wide(const Sum& sum, Spread row, const Weights& weights) {
    return sum + row * weights;
  }
  static inline void sort_columns(float* sums) {
    float sorted[wide];
    for (int64_t i = 0; i < wide; ++i)
      sorted[i] = sums[i / 16 * 16 + i % 2 * 8 + i % 16 / 2];
    memcpy(sums, sorted, sizeof sorted);
  }
};

}  // namespace
