// Choices that were made by measuring; docs/kernels.md says how.
#pragma once

namespace clover::cuda {

constexpr int kMinTokens = 128;  // of a range at least
constexpr int kFixedTokens = 4096;
// Columns of a row, query tokens x group, up to which the kernel for few of them serves a call
// whose rows have no more.
constexpr int kNarrowCols = 32;
constexpr int kSlotsPerBlock = 2;  // of a range, where it begins and where it ends

}  // namespace clover::cuda
