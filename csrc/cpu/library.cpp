// The operators that speak of the library itself: which instruction sets it can use here, and which one it uses.
#include <string>

#include "torch_util.h"

namespace sagc {
namespace {

std::string cpu_level() { return kernels().name; }

std::string cpu_levels() { return available_levels(); }

void set_cpu_level(std::string name) {
  STD_TORCH_CHECK(set_level(name.c_str()), "CPU level ", name, " is not among those available here: auto,", available_levels());
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def("cpu_level() -> str");
  m.def("cpu_levels() -> str");
  m.def("set_cpu_level(str name) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CompositeExplicitAutograd, m) {
  m.impl("cpu_level", TORCH_BOX(&cpu_level));
  m.impl("cpu_levels", TORCH_BOX(&cpu_levels));
  m.impl("set_cpu_level", TORCH_BOX(&set_cpu_level));
}

}  // namespace sagc
