#if defined(__x86_64__)
#include <immintrin.h>

#include "tiles.h"

namespace {

struct Avx512Bf16 {
  static constexpr int rows = 6;
  static constexpr int columns = 4;
  static constexpr int64_t step = 32;
  typedef __m512 Sum;
  typedef __m512bh Values;
  static inline Sum zero() { return _mm512_setzero_ps(); }
  static inline Values load(const uint16_t* from) {
    return (__m512bh)_mm512_loadu_si512(from);
  }
  static inline Values load_some(const uint16_t* from, int64_t count) {
    return (__m512bh)_mm512_maskz_loadu_epi16(__mmask32((uint32_t(1) << count) - 1), from);
  }
  static inline Sum add(Sum sum, Values a, Values b) { return _mm512_dpbf16_ps(sum, a, b); }
  static inline void total(const Sum* sums, float* out) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(sums[0], sums[1]),
                              _mm512_unpackhi_ps(sums[0], sums[1]));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(sums[2], sums[3]),
                              _mm512_unpackhi_ps(sums[2], sums[3]));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 four = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)));
  }

  // Across: two rows of a weight at a time, their values side by side.
  static constexpr int64_t wide = 64;
  static constexpr int64_t deep = 2;
  static constexpr int parts = 4;
  typedef __m512bh Weights;
  static inline void load_wide(const uint16_t* first, const uint16_t* second, Weights* to) {
    for (int half = 0; half < 2; ++half) {
      __m512i a = _mm512_loadu_si512(first + 32 * half);
      __m512i b = _mm512_loadu_si512(second + 32 * half);
      to[2 * half] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      to[2 * half + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
  }
  typedef __m512bh Spread;
  static inline Spread spread(const uint16_t* row) {
    int32_t pair;
    memcpy(&pair, row, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
  }
  static inline Sum add_wide(Sum sum, Spread row, Weights weights) {
    return _mm512_dpbf16_ps(sum, row, weights);
  }
  // The order of columns that unpacking left, put right.
  static inline void sort_columns(float* sums) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    for (int half = 0; half < 2; ++half) {
      __m512 a = _mm512_loadu_ps(sums + 32 * half), b = _mm512_loadu_ps(sums + 32 * half + 16);
      _mm512_storeu_ps(sums + 32 * half, _mm512_permutex2var_ps(a, low, b));
      _mm512_storeu_ps(sums + 32 * half + 16, _mm512_permutex2var_ps(a, high, b));
    }
  }
};

}  // namespace

const Kernels avx512_bf16_kernels = KERNELS("avx512_bf16", Avx512Bf16);
#endif
