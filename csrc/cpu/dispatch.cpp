// The choice of the kernel table, once per process: the CPU's features, narrowed by SAGC_CPU_LEVEL.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sagc {
namespace {

struct Level {
  const char* name;
  bool (*supported)();            // by this CPU
  const KernelTable& (*table)();  // only where it is supported
  bool for_tests = false;         // chosen by name alone, never listed
};

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

// The kernel hands out the tile registers per process, on request.
bool may_use_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// One small product of every kind of edge (rows, columns and k that fill no tile) against the scalar kernels.
bool multiplies_bf16(const KernelTable& table) {
  constexpr int64_t M = 19, N = 37, K = 75;
  static bf16_t x[M * K], weight[N * K];
  static float y[M * N], wanted[M * N];
  alignas(64) static unsigned char scratch[16384];
  uint32_t state = 1;
  auto random = [&] {  // +- [1, 2): any slip shows
    state = state * 1664525u + 1013904223u;
    return bf16_t{static_cast<uint16_t>(0x3f80u | ((state >> 16) & 0x807fu))};
  };
  for (bf16_t& value : x) value = random();
  for (bf16_t& value : weight) value = random();
  LinearArgs a{};
  a.x = x, a.weight = weight, a.scratch = scratch;
  a.x_stride = a.weight_stride = a.K = K, a.y_stride = a.N = N, a.M = M;
  a.x_dtype = a.weight_dtype = Dtype::kBFloat16, a.y_dtype = Dtype::kFloat32;
  for (const KernelTable* t : {&kScalarKernels, &table}) {
    if (t->linear_scratch(a) > static_cast<int64_t>(sizeof scratch)) return false;
    a.y = t == &table ? y : wanted;
    t->linear_pack(a, 0, M);
    t->linear(a, 0, t->linear_items(a));
  }
  for (int64_t i = 0; i < M * N; i++) {
    const float error = y[i] - wanted[i];
    if (!(error < 1e-3f && error > -1e-3f)) return false;
  }
  return true;
}

bool has_amx() {
  static const bool works = has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
                            __builtin_cpu_supports("amx-bf16") && may_use_amx() && multiplies_bf16(amx_kernels());
  return works;
}
#endif

// Slowest first. Features, not CPU names: hypervisors hide the latter. CPUs with AMX do bf16 dot products in vector registers at
// half the rate of fp32 (Sapphire Rapids), so there that level is no choice even where the tiles are refused.
const Level kLevels[] = {
    {"scalar", [] { return true; }, []() -> const KernelTable& { return kScalarKernels; }},
#if defined(__x86_64__)
    {"avx2", [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); },
     []() -> const KernelTable& { return kAvx2Kernels; }},
    {"avx512", has_avx512, []() -> const KernelTable& { return kAvx512Kernels; }},
    {"avx512_bf16",
     [] { return has_avx512() && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_supports("amx-bf16"); },
     []() -> const KernelTable& { return kAvx512Bf16Kernels; }},
    {"amx", has_amx, amx_kernels},
    {"amx_emulated", [] { return has_avx512() && multiplies_bf16(amx_emulated_kernels()); }, amx_emulated_kernels, true},
#endif
};

const KernelTable* find(const char* name) {
  for (const Level& level : kLevels)
    if (std::strcmp(level.name, name) == 0 && level.supported()) return &level.table();
  return nullptr;
}

const KernelTable* best() {
  const KernelTable* table = nullptr;
  for (const Level& level : kLevels)
    if (!level.for_tests && level.supported()) table = &level.table();
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
        if (!level.for_tests && level.supported()) {
          if (text[0] != '\0') std::strcat(text, ",");
          std::strcat(text, level.name);
        }
    }
  } names;
  return names.text;
}

}  // namespace sagc
