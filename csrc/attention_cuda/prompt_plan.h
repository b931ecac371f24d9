// How rows of many query tokens are split over thread blocks: plain arithmetic, the same on host
// and device, tested on the host.
//
// An item is a tile of columns (a row's query tokens x the query heads of a KV head) and the keys
// that any of them sees. Where items are fewer than multiprocessors, or make an uneven last wave,
// every item's keys are split in as many parts, which whoever comes last merges.
#pragma once

#include "attention_cuda/plan.h"

namespace clover::cuda {

constexpr int kPromptCols = 128;
constexpr int kMostSplits = 8;
constexpr int kSplitTiles =
    4;  // keys' tiles that a part has at least; what merging costs, in tiles

// Items of a row; rows of at most `narrow` tokens are another kernel's.
CLOVER_HD int prompt_items(const Split& split, int length, int count, int narrow) {
  if (length == 0 || count <= narrow) return 0;
  return ceil_div(count * split.group, kPromptCols) * split.kv_heads;
}

// Parts of every item: what takes the fewest tiles from the first block's start to the last one's
// end, where the longest item has `tiles` of them. No more parts in all than `slots`.
CLOVER_HD int prompt_splits(int items, int tiles, int blocks, int slots) {
  int best = 1, least_time = ceil_div(items, blocks) * tiles;
  for (int splits = 2; splits <= kMostSplits; ++splits) {
    if (items * splits > slots || tiles < kSplitTiles * splits) break;
    const int waves = ceil_div(items * splits, blocks);
    const int time = waves * (ceil_div(tiles, splits) + kSplitTiles);
    if (time < least_time) best = splits, least_time = time;
  }
  return best;
}

struct PromptItem {
  int row;  // -1: nothing is left
  int head;
  int col_tile;
  int part;
  int unsplit;  // number of the item, its parts together
  int length;   // of the row
  int count;
  int start;
  int begin;  // tiles of keys
  int end;
  int low;  // first position that one of the columns sees
};

// `index` counts an item's parts, from the row's first on; the longest items come first.
CLOVER_HD void place_item(const Split& split, int splits, int index, PromptItem& item) {
  const int parts = split.kv_heads * splits;
  const int col_tiles = ceil_div(item.count * split.group, kPromptCols);
  item.col_tile = col_tiles - 1 - index / parts;
  item.head = index % parts / splits;
  item.part = index % splits;
  const int before = item.length - item.count;
  const int from = item.col_tile * kPromptCols / split.group;
  const int to =
      least((item.col_tile * kPromptCols + kPromptCols - 1) / split.group, item.count - 1);
  item.low = split.window > 0 ? most(0, before + from - split.window + 1) : 0;
  const int first = item.low / split.tile;
  const int tiles = ceil_div(before + to + 1, split.tile) - first;
  item.begin = first + tiles * item.part / splits;
  item.end = first + tiles * (item.part + 1) / splits;
}

}  // namespace clover::cuda
