// Choices that were made by measuring; docs/kernels.md says how.
#pragma once

namespace clover::cuda {

constexpr int kMinUnits = 8;       // tiles of a range at least
constexpr int kFixedTiles = 256;   // 4,096 tokens
constexpr int kSlotsPerBlock = 2;  // of a range, where it begins and where it ends

}  // namespace clover::cuda
