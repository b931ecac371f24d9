// Python's way to chains of operators (csrc/dense_cpu/chain.h). Tensors cross as addresses, whose
// sizes and types the caller has checked; the Python lock is released while a chain runs.
#include "dense_cpu/chain.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/addresses.h"

namespace py = pybind11;

namespace clover {
namespace {

using dense::Chain;

using Operands = std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>>;
using MatrixSize = std::tuple<int64_t, int64_t, int>;  // outputs of a fold, inputs, folds
// Act, operands, places of weight and bias, size of a matrix, map, centred, scalar.
using Code = std::tuple<int, Operands, std::pair<int64_t, int64_t>, MatrixSize, int, bool, float>;

dense::Instruction instruction(const Code& code) {
  const auto& [act, operands, weights, size, map, centred, scalar] = code;
  if (act < 0 || act > static_cast<int>(dense::Act::kMap) || map < 0 || map >= dense::kMaps)
    throw std::invalid_argument("no such act");
  dense::Instruction made;
  made.act = static_cast<dense::Act>(act);
  for (const auto& [buffer, offset, heads, stride, numbers] : operands)
    made.operands.push_back({buffer, offset, heads, stride, numbers});
  std::tie(made.weight, made.bias) = weights;
  std::tie(made.outputs, made.inputs, made.folds) = size;
  made.map = static_cast<dense::Map>(map);
  made.centred = centred;
  made.scalar = scalar;
  return made;
}

std::unique_ptr<Chain> make(int threads, const std::string& isa,
                            const std::tuple<int, int, int>& counts,
                            const std::vector<int64_t>& widths, const std::vector<Code>& code) {
  if (threads < 1) throw std::invalid_argument("threads must be at least 1");
  const auto [inputs, outputs, weights] = counts;
  std::vector<dense::Instruction> made;
  for (const Code& one : code) made.push_back(instruction(one));
  return std::make_unique<Chain>(threads, isa, dense::Layout{inputs, outputs, weights, widths},
                                 std::move(made));
}

void run(Chain& self, const std::tuple<int64_t, int>& weights, int64_t tokens,
         const std::vector<std::pair<int64_t, int64_t>>& places) {
  const auto [address, count] = weights;
  const dense::Layout& layout = self.layout();
  if (count != layout.weights) throw std::invalid_argument("another number of weights is needed");
  if (places.size() != static_cast<size_t>(layout.inputs + layout.outputs))
    throw std::invalid_argument("a place for each input and output is needed");
  std::vector<dense::Place> made;
  for (const auto& [data, stride] : places) {
    if (tokens > 1 && stride < layout.widths[made.size()])
      throw std::invalid_argument("rows overlap");
    made.push_back({at_address<uint16_t>(data, "rows"), stride});
  }
  const int64_t* addresses = at_address<int64_t>(address, "weights", count > 0);
  py::gil_scoped_release release;
  self.run(addresses, tokens, made);
}

}  // namespace

void bind_chain(py::module_& m) {
  py::class_<Chain>(m, "CpuChain")
      .def(py::init(&make), py::kw_only(), py::arg("threads"), py::arg("isa"), py::arg("counts"),
           py::arg("widths"), py::arg("code"))
      .def("run", &run);
}

}  // namespace clover
