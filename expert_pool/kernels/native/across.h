// Projections by weights [in, out], as they lie: rows of a weight are scaled and added up.
//
// Every output is one sum over the inner dimension, from its first value to its last, whatever
// rows and columns are computed beside it.
#pragma once

#include "arithmetic.h"
#include "experts.h"
#include "row_tiles.h"

namespace {

constexpr int64_t PANEL = 24;        // rows whose sums are kept while a block of weights passes
constexpr int64_t SPAN = 2 * ACROSS;  // columns of a panel: gate and up
constexpr int64_t DEPTH = 128;       // rows of a weight that all rows of a panel pass at a time

// R rows times `depth` rows of `Isa::wide` columns of a weight, added to `sums`.
template <class Isa, int R>
inline void add_products(const uint16_t* const* rows, int64_t from, const uint16_t* weight,
                         int64_t stride, int64_t depth, const uint16_t* ahead, float* sums) {
  constexpr int P = Isa::parts;
  typename Isa::Sum s[R][P];
  for (int r = 0; r < R; ++r) memcpy(s[r], sums + r * SPAN, sizeof s[r]);
  int64_t k = 0;
  for (; k + Isa::deep <= depth; k += Isa::deep) {
    typename Isa::Weights weights[P];
    Isa::load_wide(weight + k * stride, weight + (k + 1) * stride, weights);
    if (ahead)
      for (int64_t row = k; row < k + Isa::deep; ++row)
        for (int64_t at = 0; at < Isa::wide; at += 32)
          __builtin_prefetch(ahead + row * stride + at, 0, 3);
    for (int r = 0; r < R; ++r) {
      typename Isa::Spread row = Isa::spread(rows[r] + from + k);
      for (int i = 0; i < P; ++i) s[r][i] = Isa::add_wide(s[r][i], row, weights[i]);
    }
  }
  if (k < depth) {
    // One row left of a pair: the other one counts as zeros.
    const uint16_t nothing[Isa::wide] = {};
    typename Isa::Weights weights[P];
    Isa::load_wide(weight + k * stride, nothing, weights);
    for (int r = 0; r < R; ++r) {
      uint16_t pair[2] = {rows[r][from + k], 0};
      typename Isa::Spread row = Isa::spread(pair);
      for (int i = 0; i < P; ++i) s[r][i] = Isa::add_wide(s[r][i], row, weights[i]);
    }
  }
  for (int r = 0; r < R; ++r) memcpy(sums + r * SPAN, s[r], sizeof s[r]);
}

template <class Isa>
inline void add_panel(const uint16_t* const* rows, int64_t count, int64_t from,
                      const uint16_t* weight, int64_t stride, int64_t depth,
                      const uint16_t* ahead, float* sums) {
  in_tiles<Isa>(count, [&](int64_t row, auto size) {
    add_products<Isa, size.value>(rows + row, from, weight, stride, depth, ahead,
                                  sums + row * SPAN);
    ahead = nullptr;  // once is enough
  });
}

// `count` rows of at most PANEL times `columns` columns of a weight: sums[row * SPAN + column].
template <class Isa>
void project(const uint16_t* const* rows, int64_t count, const uint16_t* weight, int64_t stride,
             int64_t depth, int64_t columns, float* sums) {
  for (int64_t row = 0; row < count; ++row)
    for (int64_t c = 0; c < columns; c += Isa::wide)
      memset(sums + row * SPAN + c, 0, Isa::wide * sizeof(float));
  for (int64_t from = 0; from < depth; from += DEPTH) {
    int64_t deep = depth - from < DEPTH ? depth - from : DEPTH;
    for (int64_t c = 0; c < columns; c += Isa::wide) {
      const uint16_t* part = weight + from * stride + c;
      if (columns - c >= Isa::wide) {
        // What comes next: the columns beside these, or the rows below.
        const uint16_t* ahead = columns - c > Isa::wide ? part + Isa::wide
                                : from + 2 * DEPTH <= depth ? weight + (from + DEPTH) * stride
                                                            : nullptr;
        add_panel<Isa>(rows, count, from, part, stride, deep, ahead, sums + c);
        continue;
      }
      uint16_t padded[DEPTH * Isa::wide];
      memset(padded, 0, deep * Isa::wide * sizeof(uint16_t));
      for (int64_t k = 0; k < deep; ++k)
        memcpy(padded + k * Isa::wide, part + k * stride, (columns - c) * sizeof(uint16_t));
      add_panel<Isa>(rows, count, from, padded, Isa::wide, deep, nullptr, sums + c);
    }
  }
  for (int64_t row = 0; row < count; ++row)
    for (int64_t c = 0; c < columns; c += Isa::wide) Isa::sort_columns(sums + row * SPAN + c);
}

inline const uint16_t* values_at(const char* slot, int64_t offset) {
  return offset < 0 ? nullptr : reinterpret_cast<const uint16_t*>(slot + offset);
}

inline void add_biases(float* values, const uint16_t* bias, int64_t rows, int64_t columns) {
  if (!bias) return;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      values[r * SPAN + c] = rounded(values[r * SPAN + c]) + widen(bias[c]);
}

// Columns begin .. end - 1 of the intermediate rows: at most ACROSS.
template <class Isa>
void up_across(const Layer& layer, const char* slot, const Call& call, int64_t first, int64_t count,
               int64_t begin, int64_t end) {
  const uint16_t* weight = values_at(slot, layer.up);
  const uint16_t* bias = values_at(slot, layer.up_bias);
  int64_t depth = layer.hidden, stride = layer.gated ? 2 * layer.inner : layer.inner;
  int64_t columns = end - begin;
  // Alternating gates are one stretch of columns; others are two, or one without gates.
  int64_t stretch = layer.interleaved ? 2 * columns : columns;
  int64_t at = layer.interleaved ? 2 * begin : begin;
  int stretches = layer.gated && !layer.interleaved ? 2 : 1;
  float sums[PANEL * SPAN], apart[SPAN];
  for (int64_t row = 0; row < count; row += PANEL) {
    int64_t many = count - row < PANEL ? count - row : PANEL;
    const uint16_t* rows[PANEL];
    for (int64_t r = 0; r < many; ++r)
      rows[r] = call.rows + call.pairs[first + row + r] / call.top_k * depth;
    for (int part = 0; part < stretches; ++part) {
      int64_t column = at + part * layer.inner;
      float* to = sums + part * ACROSS;
      project<Isa>(rows, many, weight + column, stride, depth, stretch, to);
      add_biases(to, bias ? bias + column : nullptr, many, stretch);
    }
    for (int64_t r = 0; r < many; ++r) {
      const float* gate = sums + r * SPAN;
      const float* up = layer.gated ? gate + ACROSS : nullptr;
      if (layer.interleaved) {
        for (int64_t c = 0; c < columns; ++c) {
          apart[c] = gate[2 * c];
          apart[ACROSS + c] = gate[2 * c + 1];
        }
        gate = apart;
        up = apart + ACROSS;
      }
      uint16_t* out = call.scratch + (first + row + r) * layer.inner + begin;
      apply_gate(layer, gate, up, out, columns);
    }
  }
}

// Columns begin .. end - 1 of the outputs.
template <class Isa>
void down_across(const Layer& layer, const char* slot, const Call& call, int64_t first,
                 int64_t count, int64_t begin, int64_t end) {
  const uint16_t* weight = values_at(slot, layer.down) + begin;
  const uint16_t* bias = values_at(slot, layer.down_bias);
  int64_t depth = layer.inner, columns = end - begin;
  float sums[PANEL * SPAN];
  for (int64_t row = 0; row < count; row += PANEL) {
    int64_t many = count - row < PANEL ? count - row : PANEL;
    const uint16_t* rows[PANEL];
    for (int64_t r = 0; r < many; ++r) rows[r] = call.scratch + (first + row + r) * depth;
    project<Isa>(rows, many, weight, layer.hidden, depth, columns, sums);
    add_biases(sums, bias ? bias + begin : nullptr, many, columns);
    for (int64_t r = 0; r < many; ++r) {
      int64_t place = call.placed ? call.pairs[first + row + r] : first + row + r;
      uint16_t* out = call.out + place * layer.hidden + begin;
      for (int64_t c = 0; c < columns; ++c) out[c] = narrow(sums[r * SPAN + c]);
    }
  }
}

}  // namespace
