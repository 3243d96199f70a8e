// Rows in tiles of at most Isa::rows, as equal as can be.
#pragma once

#include <stdint.h>

namespace {

template <int R>
struct Rows {
  static constexpr int value = R;
};

// Calls tile(first row, Rows<R>()) for tiles that make up `count` rows.
template <class Isa, class Tile>
inline void in_tiles(int64_t count, Tile tile) {
  int64_t left = (count + Isa::rows - 1) / Isa::rows;
  for (int64_t row = 0; row < count; --left) {
    int64_t rows = (count - row + left - 1) / left;
    // What an instruction set has no tiles for is not compiled.
    switch (rows) {
      case 1: tile(row, Rows<1>()); break;
      case 2: tile(row, Rows<2>()); break;
      case 3: if constexpr (Isa::rows >= 3) tile(row, Rows<3>()); break;
      case 4: if constexpr (Isa::rows >= 4) tile(row, Rows<4>()); break;
      case 5: if constexpr (Isa::rows >= 5) tile(row, Rows<5>()); break;
      case 6: if constexpr (Isa::rows >= 6) tile(row, Rows<6>()); break;
    }
    row += rows;
  }
}

}  // namespace
