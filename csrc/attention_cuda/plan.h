// How a call is split over the thread blocks of a launch: plain arithmetic, the same on the device
// and on the host, where it is tested.
//
// An item is what one pass over a context computes: (row, column tile, KV head), where columns are
// a row's query tokens times the query heads of a KV head. Items stand in one line, each as many
// units long as its context has tiles of keys, and the line is cut into ranges of equal length:
// every thread block reads the same number of bytes, however ragged the rows. A piece is the part
// of an item that lies in one range. Items in several pieces are merged by whoever comes last.
//
// With fixed splits a unit is `fixed_tiles` tiles, cut at multiples of that from the context's
// start, and every unit is a piece of its own: where a row is cut depends on the row alone.
#pragma once

#include "common/host_device.h"

namespace clover::cuda {

constexpr int kSlab = 16;  // keys; block sizes of the tensor-core kernel are multiples of it

CLOVER_HD int ceil_div(int a, int b) { return (a + b - 1) / b; }
CLOVER_HD int least(int a, int b) { return a < b ? a : b; }
CLOVER_HD int most(int a, int b) { return a > b ? a : b; }

constexpr int kMostStages = 4;

// Tiles in flight that a block of a kernel has room for; 0: it does not fit.
CLOVER_HD int stages_within(int limit, int fixed_bytes, int stage_bytes) {
  if (limit < fixed_bytes) return 0;
  return stage_bytes == 0 ? 1 : least(kMostStages, (limit - fixed_bytes) / stage_bytes);
}

// What the splitting of every row of a call shares.
struct Split {
  int group;  // query heads per KV head
  int cols;   // columns that one item computes
  int kv_heads;
  int window;       // 0: none
  int fixed_tiles;  // 0: balanced ranges
  int tile;         // keys of a tile
  int most_count;   // rows of more tokens are left out: another kernel's
};

struct RowPlan {
  int first_tile;  // the first that a query token sees
  int end_tile;
  int units;  // per item
  int items;
};

// Rows without tokens, or left out, have no units, and their output is not written.
CLOVER_HD RowPlan plan_row(const Split& split, int length, int count) {
  RowPlan row;
  if (count > split.most_count) length = 0;
  const int first = split.window > 0 ? most(0, length - count - split.window + 1) : 0;
  row.first_tile = first / split.tile;
  row.end_tile = ceil_div(length, split.tile);
  row.units = row.end_tile - row.first_tile;
  if (split.fixed_tiles > 0 && row.units > 0)
    row.units = (row.end_tile - 1) / split.fixed_tiles - row.first_tile / split.fixed_tiles + 1;
  row.items = ceil_div(count * split.group, split.cols) * split.kv_heads;
  return row;
}

// How much there is to do: units of all rows, and of what they are.
struct Work {
  int units = 0;
  int items = 0;  // with units
  int longest = 0;

  CLOVER_HD void add(const RowPlan& row) {
    if (row.units == 0) return;
    units += row.units * row.items;
    items += row.items;
    longest = most(longest, row.units);
  }
  CLOVER_HD bool even() const { return units == items * longest; }
};

// The line of units cut into ranges whose lengths differ by one at most, one to a thread block at
// most. Where items are equal, ranges hold whole items, or items whole ranges, if that leaves few
// blocks idle: then there is less to merge, or nothing.
struct Ranges {
  int total;
  int size;
  int longer;  // so many, the first, have one unit more
  int count;

  // None is of less than `min_units` unless all is: a shorter one costs more to merge than it
  // saves.
  CLOVER_HD static Ranges of(const Work& work, int blocks, int min_units) {
    Ranges ranges = {work.units, 0, 0, 0};
    if (work.units == 0) return ranges;
    ranges.count = least(blocks, most(1, work.units / most(1, min_units)));
    if (work.even()) ranges.count = fitting(work.items, ranges.count);
    ranges.size = work.units / ranges.count;
    ranges.longer = work.units % ranges.count;
    return ranges;
  }
  CLOVER_HD int begin(int range) const { return range * size + least(range, longer); }
  CLOVER_HD int end(int range) const { return begin(range + 1); }
  CLOVER_HD int at(int unit) const {
    const int rest = unit - longer * (size + 1);
    return rest < 0 ? unit / (size + 1) : longer + rest / size;
  }

 private:
  // The most ranges up to `count` that divide, or are divided by, so many items; `count` where none
  // of nearly as many do.
  CLOVER_HD static int fitting(int items, int count) {
    if (items <= count) {
      const int even = count / items * items;
      return even > count - ceil_div(count, 16) ? even : count;
    }
    for (int few = count; few > count - ceil_div(count, 16); --few) {
      if (items % few == 0) return few;
    }
    return count;
  }
};

struct Piece {
  int row;
  int head;      // KV head
  int col_tile;  // from the row's first column
  int begin;     // tiles
  int end;
  int length;  // of the row
  int count;
  int start;  // the row's first query token
  int parts;  // pieces of the item; 1: nothing to merge
  // Partial results: the item's first piece is in `first_slot`, piece i in slot_base + i * stride.
  int slot;
  int first_slot;
  int slot_base;
  int slot_stride;
  int counter;
};

// Where one stands in the line of units.
struct Cursor {
  int row;
  int before;  // units of the rows before
  int unit;
  int end;  // of the range
  int range;
};

// The piece at the cursor, which must not be at its end and must stand in its row; moves on.
CLOVER_HD Piece take_piece(const Split& split, const Ranges& ranges, const RowPlan& row,
                           Cursor& cursor) {
  Piece piece;
  const int item = (cursor.unit - cursor.before) / row.units;
  const int item_begin = cursor.before + item * row.units;
  const int unit = cursor.unit - item_begin;
  piece.row = cursor.row;
  piece.head = item % split.kv_heads;
  piece.col_tile = item / split.kv_heads;
  int taken = 1;
  if (split.fixed_tiles > 0) {
    const int from = (row.first_tile / split.fixed_tiles + unit) * split.fixed_tiles;
    piece.begin = most(row.first_tile, from);
    piece.end = least(row.end_tile, from + split.fixed_tiles);
    piece.parts = row.units;
    piece.first_slot = piece.slot_base = piece.counter = item_begin;
    piece.slot_stride = 1;
    piece.slot = item_begin + unit;
  } else {
    taken = least(row.units - unit, cursor.end - cursor.unit);
    piece.begin = row.first_tile + unit;
    piece.end = piece.begin + taken;
    const int first = ranges.at(item_begin);
    piece.parts = ranges.at(item_begin + row.units - 1) - first + 1;
    piece.first_slot = 2 * first + 1;
    piece.slot_base = 2 * first;
    piece.slot_stride = 2;
    piece.slot = unit == 0 ? piece.first_slot : 2 * cursor.range;
    piece.counter = first;
  }
  cursor.unit += taken;
  return piece;
}

}  // namespace clover::cuda
