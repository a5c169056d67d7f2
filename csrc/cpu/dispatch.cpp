// The choice of the kernel table, once per process: the CPU's features, narrowed by SAGC_CPU_LEVEL.
#include <atomic>
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace sagc {
namespace {

struct Level {
  const KernelTable* table;
  bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

// Features, not CPU names: hypervisors hide the latter.
const Level kLevels[] = {
    {&kScalarKernels, [] { return true; }},
#if defined(__x86_64__)
    {&kAvx2Kernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {&kAvx512Kernels, has_avx512},
    {&kAvx512Bf16Kernels, [] { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }},
#endif
};

const KernelTable* find(const char* name) {
  for (const Level& level : kLevels)
    if (level.supported() && std::strcmp(level.table->name, name) == 0) return level.table;
  return nullptr;
}

const KernelTable* best() {
  const KernelTable* table = nullptr;
  for (const Level& level : kLevels)
    if (level.supported()) table = level.table;
  return table;
}

const KernelTable* initial() {
  const char* wanted = std::getenv("SAGC_CPU_LEVEL");
  const KernelTable* table = wanted != nullptr ? find(wanted) : nullptr;
  return table != nullptr ? table : best();  // native.py refuses unknown names before it loads the library
}

std::atomic<const KernelTable*>& current() {
  static std::atomic<const KernelTable*> table{initial()};
  return table;
}

}  // namespace

const KernelTable& kernels() { return *current().load(std::memory_order_relaxed); }

bool set_level(const char* name) {
  const KernelTable* table = std::strcmp(name, "auto") == 0 ? best() : find(name);
  if (table != nullptr) current().store(table, std::memory_order_relaxed);
  return table != nullptr;
}

const char* available_levels() {
  static const struct Names {
    char text[64] = "";
    Names() {
      for (const Level& level : kLevels)
        if (level.supported()) {
          if (text[0] != '\0') std::strcat(text, ",");
          std::strcat(text, level.table->name);
        }
    }
  } names;
  return names.text;
}

}  // namespace sagc
