// Python's way to csrc/attention_cuda. Tensors cross as device addresses, with sizes, strides and
// the code of their type, which are checked here; streams as CUDA's handles. The plan of a call's
// work is bound in every build, so that it can be tested without a GPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "attention_cuda/prompt_plan.h"

#ifdef CLOVER_HAVE_CUDA
#include "attention_cuda/attention.h"
#include "bindings/rotation.h"
#endif

namespace py = pybind11;

namespace clover {
namespace {

// Range, row, head, column tile, first tile, end tile, parts of the item, slot of this piece, slots
// of all parts, counter.
using PlannedPiece = std::tuple<int, int, int, int, int, int, int, int, std::vector<int>, int>;

PlannedPiece described(const cuda::Piece& piece, int range) {
  std::vector<int> slots;
  for (int part = 0; part < piece.parts; ++part)
    slots.push_back(part == 0 ? piece.first_slot : piece.slot_base + part * piece.slot_stride);
  return {range,     piece.row,   piece.head, piece.col_tile,   piece.begin,
          piece.end, piece.parts, piece.slot, std::move(slots), piece.counter};
}

// What the blocks of a launch would do, in order.
std::vector<PlannedPiece> plan(const std::vector<int>& lengths, const std::vector<int>& counts,
                               int group, int cols, int kv_heads, int window, int fixed_tiles,
                               int tile, int blocks, int min_units) {
  if (lengths.size() != counts.size())
    throw std::invalid_argument("lengths and counts must be of one size");
  const cuda::Split split = {
      group, cols, kv_heads, window, fixed_tiles, tile, std::numeric_limits<int>::max()};
  std::vector<cuda::RowPlan> rows;
  cuda::Work work;
  for (size_t i = 0; i < lengths.size(); ++i) {
    rows.push_back(cuda::plan_row(split, lengths[i], counts[i]));
    work.add(rows.back());
  }
  const cuda::Ranges ranges = cuda::Ranges::of(work, blocks, min_units);
  std::vector<PlannedPiece> pieces;
  cuda::Cursor cursor = {0, 0, 0, 0, 0};
  for (int range = 0; range < ranges.count; ++range) {
    cursor.range = range;
    cursor.unit = ranges.begin(range);
    cursor.end = ranges.end(range);
    while (cursor.unit < cursor.end) {
      const cuda::RowPlan& row = rows.at(cursor.row);
      if (cursor.unit >= cursor.before + row.units * row.items) {
        cursor.before += row.units * row.items;
        ++cursor.row;
        continue;
      }
      pieces.push_back(described(cuda::take_piece(split, ranges, row, cursor), range));
    }
  }
  return pieces;
}

// Row, head, column tile, part, first tile, end tile.
using PlannedPrompt = std::tuple<int, int, int, int, int, int>;

// The parts of each item, and every part in order, that the prompt kernel's blocks share out.
std::pair<int, std::vector<PlannedPrompt>> plan_prompts(const std::vector<int>& lengths,
                                                        const std::vector<int>& counts, int group,
                                                        int kv_heads, int window, int tile,
                                                        int blocks, int narrow) {
  if (lengths.size() != counts.size())
    throw std::invalid_argument("lengths and counts must be of one size");
  const cuda::Split split = {
      group, cuda::kPromptCols, kv_heads, window, 0, tile, std::numeric_limits<int>::max()};
  int total = 0, tiles = 0;
  for (size_t i = 0; i < lengths.size(); ++i) {
    const int items = cuda::prompt_items(split, lengths[i], counts[i], narrow);
    total += items;
    if (items > 0) tiles = std::max(tiles, cuda::plan_row(split, lengths[i], counts[i]).units);
  }
  const int splits = cuda::prompt_splits(total, tiles, blocks, 2 * blocks);
  std::vector<PlannedPrompt> parts;
  for (size_t i = 0; i < lengths.size(); ++i) {
    cuda::PromptItem item = {};
    item.row = static_cast<int>(i);
    item.length = lengths[i];
    item.count = counts[i];
    const int here = cuda::prompt_items(split, lengths[i], counts[i], narrow) * splits;
    for (int index = 0; index < here; ++index) {
      cuda::place_item(split, splits, index, item);
      parts.push_back({item.row, item.head, item.col_tile, item.part, item.begin, item.end});
    }
  }
  return {splits, std::move(parts)};
}

#ifdef CLOVER_HAVE_CUDA

using cuda::Attention;

template <typename T>
T* at(int64_t address, int64_t alignment, const char* name) {
  if (address == 0 || address % alignment != 0)
    throw std::invalid_argument(std::string(name) + " is not at an address aligned to " +
                                std::to_string(alignment) + " bytes");
  return reinterpret_cast<T*>(address);
}

cuda::DType dtype_of(int code) {
  if (code < 0 || code > 3) throw std::invalid_argument("unknown type code");
  return static_cast<cuda::DType>(code);
}

cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

// float8 layers take and give 16-bit types.
const cuda::LayerConfig& checked_layer(const Attention& self, int layer, int dtype, bool stored) {
  if (layer < 0 || layer >= self.layers()) throw std::invalid_argument("no such layer");
  const cuda::LayerConfig& config = self.config(layer);
  const cuda::DType given = dtype_of(dtype);
  const bool narrow = config.dtype == cuda::DType::kFloat8E4M3;
  const bool wide = given == cuda::DType::kBFloat16 || given == cuda::DType::kFloat16;
  if (narrow ? !(wide || (stored && given == config.dtype)) : given != config.dtype)
    throw std::invalid_argument("tensors are not of a type that the layer takes");
  return config;
}

void check_stride(int64_t stride, int64_t least, int64_t tokens, const char* name) {
  if (tokens > 1 && stride < least)
    throw std::invalid_argument(std::string("tokens of ") + name + " overlap");
}

void append(Attention& self, int layer, int64_t stream, int dtype, int64_t k, int64_t k_stride,
            int64_t v, int64_t v_stride, int64_t slots, int tokens) {
  const cuda::LayerConfig& of = checked_layer(self, layer, dtype, true);
  if (tokens < 0) throw std::invalid_argument("tokens must not be negative");
  if (tokens == 0) return;
  check_stride(k_stride, int64_t{of.kv_heads} * of.k_dim, tokens, "k");
  check_stride(v_stride, int64_t{of.kv_heads} * of.v_dim, tokens, "v");
  const int64_t size = cuda::dtype_bytes(dtype_of(dtype));
  cuda::AppendParams call = {};
  call.k = at<void>(k, size, "k");
  call.k_stride = k_stride;
  call.v = at<void>(v, size, "v");
  call.v_stride = v_stride;
  call.dtype = dtype_of(dtype);
  call.slots = at<int64_t>(slots, 8, "slots");
  call.tokens = tokens;
  py::gil_scoped_release release;
  self.append(layer, call, stream_of(stream));
}

void append_rotated(Attention& self, int layer, int64_t stream, int dtype, int tokens,
                    HeadSizes sizes, float eps, Strided qkv, int64_t positions, RopeTable table,
                    int64_t norm, int64_t slots) {
  const cuda::LayerConfig& of = checked_layer(self, layer, dtype, false);
  const cuda::RotateParams rows =
      rotation(dtype, tokens, sizes, eps, qkv, positions, table, norm, qkv);
  if (rows.kv_heads != of.kv_heads || rows.head_dim != of.k_dim || rows.head_dim != of.v_dim)
    throw std::invalid_argument("rows do not have the heads of the layer");
  const int64_t* const at_slots = at_address<int64_t>(slots, "slots");
  py::gil_scoped_release release;
  self.append_rotated(layer, rows, at_slots, stream_of(stream));
}

cuda::AttendCall attend_call(Attention& self, int layer, int dtype, int64_t q, int64_t q_stride,
                             int64_t starts, int64_t tables, int64_t table_stride, int64_t lengths,
                             int rows, int tokens, int64_t o, int64_t lse) {
  const cuda::LayerConfig& of = checked_layer(self, layer, dtype, false);
  if (rows < 1 || tokens < 1) throw std::invalid_argument("rows and tokens must be at least 1");
  check_stride(q_stride, int64_t{of.kv_heads} * of.group * of.k_dim, tokens, "q");
  const int64_t size = cuda::dtype_bytes(dtype_of(dtype));
  return {at<void>(q, size, "q"),
          q_stride,
          dtype_of(dtype),
          at<int32_t>(starts, 4, "query_starts"),
          at<int32_t>(tables, 4, "block_tables"),
          table_stride,
          at<int32_t>(lengths, 4, "lengths"),
          rows,
          tokens,
          at<void>(o, size, "o"),
          at<float>(lse, 4, "lse")};
}

void attend(Attention& self, int layer, int64_t stream, int dtype, int64_t q, int64_t q_stride,
            int64_t starts, int64_t tables, int64_t table_stride, int64_t lengths, int rows,
            int tokens, int64_t o, int64_t lse) {
  if (rows == 0 && tokens == 0) return;
  const cuda::AttendCall call = attend_call(self, layer, dtype, q, q_stride, starts, tables,
                                            table_stride, lengths, rows, tokens, o, lse);
  py::gil_scoped_release release;
  self.attend(layer, call, stream_of(stream));
}

void gather(Attention& self, int layer, int64_t stream, int dtype, int64_t table, int first,
            int length, int64_t k, int64_t v) {
  const cuda::LayerConfig& of = checked_layer(self, layer, dtype, false);
  (void)of;
  if (first < 0 || length <= first) throw std::invalid_argument("no positions to gather");
  const int64_t size = cuda::dtype_bytes(dtype_of(dtype));
  cuda::GatherParams call = {};
  call.table = at<int32_t>(table, 4, "block_table");
  call.first = first;
  call.length = length;
  call.k = at<void>(k, size, "k");
  call.v = at<void>(v, size, "v");
  call.dtype = dtype_of(dtype);
  py::gil_scoped_release release;
  self.gather(layer, call, stream_of(stream));
}

void copy_blocks(Attention& self, int64_t stream, int64_t from, int64_t from_index, int64_t to,
                 int64_t to_index, int64_t bytes, int64_t count) {
  if (bytes < 1 || count < 0) throw std::invalid_argument("sizes must not be negative");
  if (count == 0) return;
  cuda::CopyParams call = {at<unsigned char>(from, 1, "from"),
                           reinterpret_cast<const int64_t*>(from_index),
                           at<unsigned char>(to, 1, "to"),
                           reinterpret_cast<const int64_t*>(to_index),
                           bytes,
                           count};
  py::gil_scoped_release release;
  self.copy_blocks(call, stream_of(stream));
}

std::unique_ptr<Attention> make(int device, int64_t pool, int64_t pool_bytes, int block_size,
                                int num_blocks, bool fixed_splits, int shared_limit) {
  return std::make_unique<Attention>(device, at<void>(pool, 256, "pool"), pool_bytes, block_size,
                                     num_blocks, fixed_splits, shared_limit);
}

void add_layer(Attention& self, int dtype, int kv_heads, int group, int k_dim, int v_dim,
               float scale, int window, float softcap, float k_scale, float v_scale,
               std::vector<float> sinks, std::vector<float> alibi_slopes) {
  self.add_layer({dtype_of(dtype), kv_heads, group, k_dim, v_dim, scale, window, softcap, k_scale,
                  v_scale, std::move(sinks), std::move(alibi_slopes)});
}

void bind_pool(py::module_& m) {
  m.def("cuda_device_count", &cuda::device_count);
  m.def("cuda_versions", [] {
    const cuda::Versions versions = cuda::versions();
    return std::make_tuple(versions.driver, versions.runtime);
  });
  py::class_<Attention>(m, "CudaAttentionPool")
      .def(py::init(&make), py::kw_only(), py::arg("device"), py::arg("pool"),
           py::arg("pool_bytes"), py::arg("block_size"), py::arg("num_blocks"),
           py::arg("fixed_splits"), py::arg("shared_limit") = 0)
      .def("add_layer", &add_layer, py::kw_only(), py::arg("dtype"), py::arg("kv_heads"),
           py::arg("group"), py::arg("k_dim"), py::arg("v_dim"), py::arg("scale"),
           py::arg("window"), py::arg("softcap"), py::arg("k_scale"), py::arg("v_scale"),
           py::arg("sinks"), py::arg("alibi_slopes"))
      .def("append", &append)
      .def("append_rotated", &append_rotated)
      .def("attend", &attend)
      .def("gather", &gather)
      .def("copy_blocks", &copy_blocks)
      .def("settle_rows", &Attention::settle_rows, py::arg("settled"))
      .def("rows_changed", &Attention::rows_changed)
      .def("take_bad", &Attention::take_bad);
}

#endif

}  // namespace

void bind_attention_cuda(py::module_& m) {
  m.def("cuda_attention_plan", &plan, py::kw_only(), py::arg("lengths"), py::arg("counts"),
        py::arg("group"), py::arg("cols"), py::arg("kv_heads"), py::arg("window"),
        py::arg("fixed_tiles"), py::arg("tile"), py::arg("blocks"), py::arg("min_units"));
  m.def("cuda_prompt_plan", &plan_prompts, py::kw_only(), py::arg("lengths"), py::arg("counts"),
        py::arg("group"), py::arg("kv_heads"), py::arg("window"), py::arg("tile"),
        py::arg("blocks"), py::arg("narrow"));
  m.def("cuda_stages_within", &cuda::stages_within, py::kw_only(), py::arg("limit"),
        py::arg("fixed_bytes"), py::arg("stage_bytes"));
#ifdef CLOVER_HAVE_CUDA
  m.attr("CUDA_BUILT") = true;
  bind_pool(m);
#else
  m.attr("CUDA_BUILT") = false;
#endif
}

}  // namespace clover
