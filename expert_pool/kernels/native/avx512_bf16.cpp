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
};

}  // namespace

const Kernels avx512_bf16_kernels = KERNELS("avx512_bf16", Avx512Bf16);
#endif
