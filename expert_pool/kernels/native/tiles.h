// Projections over tiles of rows and columns; included once for each instruction set.
//
// Every output is one sum over the inner dimension in one fixed order, whatever rows and columns
// lie in the same tile. So a row's bits depend on nothing but the row and its expert.
#pragma once

#include "across.h"
#include "arithmetic.h"
#include "experts.h"
#include "row_tiles.h"

namespace {

// Lines of the weights that come next, fetched while these are computed with.
struct Ahead {
  const char* next;
  int64_t a_step;
};

template <class Isa, int R>
inline void dot_columns(const uint16_t* const* rows, const uint16_t* weight, int64_t depth,
                        int64_t columns, float* out, Ahead& ahead) {
  // out[r * CHUNK + c]: R rows times `columns` rows of a weight, `depth` values each.
  constexpr int C = Isa::columns;
  int64_t c = 0;
  for (; c + C <= columns; c += C) {
    const uint16_t* w = weight + c * depth;
    typename Isa::Sum sums[R][C];
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) sums[r][i] = Isa::zero();
    int64_t k = 0;
    for (; k + Isa::step <= depth; k += Isa::step) {
      typename Isa::Values values[C];
      for (int i = 0; i < C; ++i) values[i] = Isa::load(w + i * depth + k);
      for (int64_t line = 0; line < ahead.a_step; ++line)
        __builtin_prefetch(ahead.next + line * 64, 0, 3);
      ahead.next += ahead.a_step * 64;
      for (int r = 0; r < R; ++r) {
        typename Isa::Values row = Isa::load(rows[r] + k);
        for (int i = 0; i < C; ++i) sums[r][i] = Isa::add(sums[r][i], row, values[i]);
      }
    }
    if (k < depth) {
      typename Isa::Values values[C];
      for (int i = 0; i < C; ++i) values[i] = Isa::load_some(w + i * depth + k, depth - k);
      for (int r = 0; r < R; ++r) {
        typename Isa::Values row = Isa::load_some(rows[r] + k, depth - k);
        for (int i = 0; i < C; ++i) sums[r][i] = Isa::add(sums[r][i], row, values[i]);
      }
    }
    for (int r = 0; r < R; ++r) Isa::total(sums[r], out + r * CHUNK + c);
  }
  for (; c < columns; ++c) {
    const uint16_t* w = weight + c * depth;
    for (int r = 0; r < R; ++r) {
      typename Isa::Sum sums[C];
      for (int i = 0; i < C; ++i) sums[i] = Isa::zero();
      int64_t k = 0;
      for (; k + Isa::step <= depth; k += Isa::step)
        sums[0] = Isa::add(sums[0], Isa::load(rows[r] + k), Isa::load(w + k));
      if (k < depth)
        sums[0] = Isa::add(sums[0], Isa::load_some(rows[r] + k, depth - k),
                           Isa::load_some(w + k, depth - k));
      float totals[C];
      Isa::total(sums, totals);
      out[r * CHUNK + c] = totals[0];
    }
  }
}

inline void add_bias(float* values, const uint16_t* bias, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      values[r * CHUNK + c] = rounded(values[r * CHUNK + c]) + widen(bias[c]);
}

// The first projection of an expert, its activation and gating.
struct Up {
  const Layer& layer;
  const char* slot;
  const Call& call;
  int64_t first;
  const uint16_t* weight = reinterpret_cast<const uint16_t*>(slot + layer.up);
  int64_t depth = layer.hidden;
  int64_t other = layer.inner;  // the columns that are computed beside these

  template <class Isa, int R>
  inline void tile(int64_t row, int64_t column, int64_t columns, Ahead* ahead) const {
    const uint16_t* rows[R];
    for (int r = 0; r < R; ++r)
      rows[r] = call.rows + call.pairs[first + row + r] / call.top_k * depth;
    const uint16_t* bias =
        layer.up_bias < 0 ? nullptr : reinterpret_cast<const uint16_t*>(slot + layer.up_bias);
    float gate[R * CHUNK], up[R * CHUNK];
    dot_columns<Isa, R>(rows, weight + column * depth, depth, columns, gate, ahead[0]);
    if (bias) add_bias(gate, bias + column, R, columns);
    if (layer.gated) {
      int64_t beside = other + column;
      dot_columns<Isa, R>(rows, weight + beside * depth, depth, columns, up, ahead[1]);
      if (bias) add_bias(up, bias + beside, R, columns);
    }
    for (int r = 0; r < R; ++r)
      apply_gate(layer, gate + r * CHUNK, layer.gated ? up + r * CHUNK : nullptr,
                 call.scratch + (first + row + r) * layer.inner + column, columns);
  }
};

// The second projection of an expert.
struct Down {
  const Layer& layer;
  const char* slot;
  const Call& call;
  int64_t first;
  const uint16_t* weight = reinterpret_cast<const uint16_t*>(slot + layer.down);
  int64_t depth = layer.inner;
  int64_t other = 0;

  template <class Isa, int R>
  inline void tile(int64_t row, int64_t column, int64_t columns, Ahead* ahead) const {
    const uint16_t* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = call.scratch + (first + row + r) * depth;
    float values[R * CHUNK];
    dot_columns<Isa, R>(rows, weight + column * depth, depth, columns, values, ahead[0]);
    if (layer.down_bias >= 0)
      add_bias(values, reinterpret_cast<const uint16_t*>(slot + layer.down_bias) + column, R,
               columns);
    for (int r = 0; r < R; ++r) {
      int64_t place = call.placed ? call.pairs[first + row + r] : first + row + r;
      uint16_t* out = call.out + place * layer.hidden + column;
      for (int64_t c = 0; c < columns; ++c) out[c] = narrow(values[r * CHUNK + c]);
    }
  }
};

// A linear layer outside of the experts: its bias is added before the one rounding.
struct Plain {
  const Linear& linear;
  const uint16_t* weight = linear.weight;
  int64_t depth = linear.depth;
  int64_t other = 0;

  template <class Isa, int R>
  inline void tile(int64_t row, int64_t column, int64_t columns, Ahead* ahead) const {
    const uint16_t* rows[R];
    for (int r = 0; r < R; ++r) rows[r] = linear.rows + (row + r) * depth;
    float values[R * CHUNK];
    dot_columns<Isa, R>(rows, weight + column * depth, depth, columns, values, ahead[0]);
    for (int r = 0; r < R; ++r) {
      uint16_t* out = linear.out + (row + r) * linear.width + column;
      if (linear.bias)
        for (int64_t c = 0; c < columns; ++c)
          out[c] = narrow(values[r * CHUNK + c] + widen(linear.bias[column + c]));
      else
        for (int64_t c = 0; c < columns; ++c) out[c] = narrow(values[r * CHUNK + c]);
    }
  }
};

// All `count` rows, columns begin .. end - 1.
template <class Isa, class Tile>
void all_tiles(const Tile& work, int64_t count, int64_t begin, int64_t end) {
  int64_t tiles = (count + Isa::rows - 1) / Isa::rows;
  // While a chunk is computed with, the next one comes from memory, in equal parts; with one tile
  // of rows there is nothing to hide behind, and the next few columns are near enough.
  int64_t distance = tiles == 1 ? Isa::columns : CHUNK;
  int64_t a_step = tiles == 1 ? Isa::columns : tiles == 2 ? 2 : tiles <= 4 ? 1 : 0;
  for (int64_t column = begin; column < end; column += CHUNK) {
    int64_t columns = end - column < CHUNK ? end - column : CHUNK;
    const uint16_t* next = work.weight + (column + distance) * work.depth;
    Ahead ahead[2] = {
        {reinterpret_cast<const char*>(next), a_step},
        {reinterpret_cast<const char*>(next + work.other * work.depth), a_step}};
    in_tiles<Isa>(count, [&](int64_t row, auto size) {
      work.template tile<Isa, size.value>(row, column, columns, ahead);
    });
  }
}

template <class Isa>
void up_columns(const Layer& layer, const char* slot, const Call& call, int64_t first,
                int64_t count, int64_t begin, int64_t end) {
  if (layer.transposed)
    up_across<Isa>(layer, slot, call, first, count, begin, end);
  else
    all_tiles<Isa>(Up{layer, slot, call, first}, count, begin, end);
}

template <class Isa>
void down_columns(const Layer& layer, const char* slot, const Call& call, int64_t first,
                  int64_t count, int64_t begin, int64_t end) {
  if (layer.transposed)
    down_across<Isa>(layer, slot, call, first, count, begin, end);
  else
    all_tiles<Isa>(Down{layer, slot, call, first}, count, begin, end);
}

template <class Isa>
void linear_columns(const Linear& linear, int64_t begin, int64_t end) {
  all_tiles<Isa>(Plain{linear}, linear.count, begin, end);
}

// Rows begin .. end - 1: the weighted sum over a row's choices, in router order.
void combine_rows(const uint16_t* by_pair, const float* weights, uint16_t* out, int64_t hidden,
                  int64_t top_k, int64_t begin, int64_t end) {
  constexpr int64_t WIDTH = 64;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t at = 0; at < hidden; at += WIDTH) {
      int64_t width = hidden - at < WIDTH ? hidden - at : WIDTH;
      float sums[WIDTH] = {};
      for (int64_t k = 0; k < top_k; ++k) {
        const uint16_t* values = by_pair + (row * top_k + k) * hidden + at;
        float weight = weights[row * top_k + k];
        for (int64_t i = 0; i < width; ++i) sums[i] += weight * widen(values[i]);
      }
      for (int64_t i = 0; i < width; ++i) out[row * hidden + at + i] = narrow(sums[i]);
    }
  }
}

}  // namespace

#define KERNELS(name, Isa) \
  {name, up_columns<Isa>, down_columns<Isa>, linear_columns<Isa>, combine_rows}
