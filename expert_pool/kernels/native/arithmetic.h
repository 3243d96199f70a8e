// Roundings and activations, written so that compilers make vector loops of them.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "experts.h"

namespace {

inline float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float widen(uint16_t value) { return float_of_bits(uint32_t(value) << 16); }

// To the nearest bf16, ties to even; NaN stays NaN.
inline uint16_t narrow(float value) {
  uint32_t bits = bits_of_float(value);
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  uint32_t nan = (bits >> 16) | 0x40u;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

inline float rounded(float value) { return widen(narrow(value)); }

// exp to about 2 units in the last place (the polynomial of Cephes' expf); 0 below -87, infinity
// above 88.7.
inline float exponential(float x) {
  float low = x < -87.3f ? -87.3f : x;
  float in = low > 88.8f ? 88.8f : low;
  float turns = in * 1.44269504f;
  int32_t n = int32_t(turns + (turns < 0 ? -0.5f : 0.5f));
  float r = in - float(n) * 0.693359375f;
  r = r + float(n) * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  // In two factors, as 2^128 is no float.
  int32_t half = n >> 1;
  float scaled = p * float_of_bits(uint32_t(half + 127) << 23) *
                 float_of_bits(uint32_t(n - half + 127) << 23);
  scaled = x < -87.3f ? 0.0f : scaled;
  return x != x ? x : scaled;
}

template <int64_t kind>
inline float activated(float x) {
  if (kind == SILU) return x / (1.0f + exponential(-x));
  if (kind == GELU_TANH) {
    float u = 0.7978845608f * (x + 0.044715f * x * x * x);
    float t = 1.0f - 2.0f / (exponential(2.0f * u) + 1.0f);
    return 0.5f * x * (1.0f + t);
  }
  if (kind == GELU_ERF) return 0.5f * x * (1.0f + erff(x * 0.7071067812f));
  float positive = x < 0 ? 0.0f : x;
  if (kind == RELU) return positive;
  return rounded(positive) * rounded(positive);
}

template <int64_t kind>
inline void gate_all(const float* gate, const float* up, uint16_t* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float value = activated<kind>(rounded(gate[i]));
    out[i] = up ? narrow(rounded(value) * rounded(up[i])) : narrow(value);
  }
}

// gpt-oss: gates bounded above, the others on both sides, and one added to these.
inline void clamped_all(float alpha, float limit, const float* gate, const float* up, uint16_t* out,
                        int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    float g = rounded(gate[i]), u = rounded(up[i]);
    g = g > limit ? limit : g;
    u = u > limit ? limit : u < -limit ? -limit : u;
    float share = rounded(1.0f / (1.0f + exponential(-rounded(g * alpha))));
    out[i] = narrow(rounded(u + 1.0f) * rounded(g * share));
  }
}

// Rounded where stock rounds: after each projection, after the activation, after the product.
inline void apply_gate(const Layer& layer, const float* gate, const float* up, uint16_t* out,
                       int64_t count) {
  switch (layer.activation) {
    case SILU: return gate_all<SILU>(gate, up, out, count);
    case GELU_TANH: return gate_all<GELU_TANH>(gate, up, out, count);
    case GELU_ERF: return gate_all<GELU_ERF>(gate, up, out, count);
    case RELU: return gate_all<RELU>(gate, up, out, count);
    case RELU_SQUARED: return gate_all<RELU_SQUARED>(gate, up, out, count);
    case CLAMPED_SWIGLU: return clamped_all(layer.alpha, layer.limit, gate, up, out, count);
  }
}

}  // namespace
