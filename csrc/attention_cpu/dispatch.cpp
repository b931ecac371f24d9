#include "attention_cpu/dispatch.h"

#include <stdexcept>

#include "common/isa.h"

namespace clover::attention {

namespace portable {
extern const Kernels kernels;
}
#ifdef CLOVER_HAVE_AVX2
namespace avx2 {
extern const Kernels kernels;
}
#endif
#ifdef CLOVER_HAVE_AVX512
namespace avx512 {
extern const Kernels kernels;
}
#endif
#ifdef CLOVER_HAVE_AVX512BF16
namespace avx512bf16 {
extern const Kernels kernels;
}
#endif
#ifdef CLOVER_HAVE_AMX
namespace amx {
extern const Kernels kernels;
}
#endif

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found = {&portable::kernels};
#ifdef CLOVER_HAVE_AVX2
  if (cpu_has_avx2()) found.push_back(&avx2::kernels);
#endif
#ifdef CLOVER_HAVE_AVX512
  if (cpu_has_avx512()) found.push_back(&avx512::kernels);
#endif
#ifdef CLOVER_HAVE_AVX512BF16
  if (cpu_has_avx512bf16()) found.push_back(&avx512bf16::kernels);
#endif
#ifdef CLOVER_HAVE_AMX
  if (cpu_has_amx()) found.push_back(&amx::kernels);
#endif
  return found;
}

const Kernels* choose_kernels(const std::string& name, const std::vector<int>& dims) {
  const Kernels* best = nullptr;
  bool known = name == "auto";
  std::string names;
  for (const Kernels* kernels : available_kernels()) {
    names += std::string(", ") + kernels->name;
    bool fits = true;
    for (int dim : dims) fits = fits && dim % kernels->width == 0;
    if (fits) best = kernels;
    if (name == kernels->name) {
      known = true;
      break;
    }
  }
  if (!known) throw std::invalid_argument("instruction set must be auto" + names + ", not " + name);
  if (!best) throw std::invalid_argument("head sizes must be multiples of 4");
  return best;
}

}  // namespace clover::attention
