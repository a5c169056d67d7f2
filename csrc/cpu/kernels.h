// The seam between the operators (torch stable ABI, baseline instructions) and the kernels (one table per instruction set).
//
// Every kernel works on a half-open range of independent work items, so that the caller may spread the items over threads.
// The result of an item never depends on the range it was called with: that, and a fixed order of every sum, is what makes
// the bits of a row independent of the other rows, of their order and of the number of threads.
//
// Letters: T tokens, E model width, F feed-forward width, M N K of a matrix product, H query heads, D head width,
// P positions, V vocabulary, R rows to sample.
#pragma once

#include <cstdint>

#include "training.h"

namespace sagc {

struct bf16_t {
  uint16_t bits;
};
struct fp16_t {
  uint16_t bits;
};

enum class Dtype { kFloat32, kBFloat16, kFloat16 };  // kFloat16 only for the KV cache

// y[M, N] = x[M, K] weight[N, K]^T (+ bias[N]); the bias has y_dtype, sums are fp32.
//
// In three steps: scratch of linear_scratch bytes (64-byte aligned; none when that is 0), linear_pack over all M rows of x,
// linear over all linear_items. run_linear (linear_run.h) does all of it.
//
// Some weights multiply faster in another layout, which depends on the table. Who uses one often gives linear_pack_weight
// linear_packed_bytes (none: the layout is as good as any) and passes the result as packed_weight; the bits are the same.
struct LinearArgs {
  const void* x;
  const void* weight;
  const void* packed_weight;  // by the linear_pack_weight of the same table, or null
  const void* bias;  // may be null
  void* y;
  void* scratch;                              // x in the form that the kernel reads
  int64_t x_stride, weight_stride, y_stride;  // elements between rows
  int64_t M, N, K;
  Dtype x_dtype, weight_dtype, y_dtype;
};

struct RmsNormArgs {
  const void* x;         // [T, E]
  const void* residual;  // [T, E] or null: y = norm(x), else y = norm(residual + x)
  const void* weight;    // [E]
  void* y;               // [T, E]
  void* new_residual;    // [T, E], written when residual is given
  int64_t E;
  float eps;
  Dtype dtype;
};

struct SiluMulArgs {
  const void* gate_up;  // [T, 2F]
  void* y;              // [T, F]
  int64_t F;
  Dtype dtype;
};

struct RopeArgs {
  const void *q, *k, *v;                // [T, heads, D]; heads of a token are contiguous
  int64_t q_stride, k_stride, v_stride;  // elements between tokens
  const float *cos, *sin;               // [P, D / 2]
  const int64_t *positions, *slots;     // [T]
  void* q_out;                          // [T, H, D]
  void *k_cache, *v_cache;              // [blocks, K, block_size, D]
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  Dtype dtype, cache_dtype;
};

// A query token with everything attention has to know about it.
struct AttentionToken {
  int32_t token;     // row of q and of the output
  int32_t sequence;  // row of the block tables
  int32_t visible;   // number of KV positions it attends to
};

// Tokens [begin, end) x query heads [head_begin, head_end) of each of the KV heads [kv_begin, kv_end). The tokens may belong to
// several sequences, sequence by sequence with ascending `visible`; all of them see the first `shared` positions (a multiple
// of kAttentionRun), which lie in the same blocks for all of those sequences.
struct AttentionItem {
  int32_t begin, end, head_begin, head_end, kv_begin, kv_end, shared;
};

struct AttentionArgs {
  const void* q;     // [T, H, D]; heads of a token are contiguous
  int64_t q_stride;  // elements between tokens
  const void *k_cache, *v_cache;  // [blocks, K, block_size, D]
  void* out;                      // [T, H, D]
  const int32_t* block_tables;    // [S, block_tables_stride]
  int64_t block_tables_stride;
  int64_t num_heads, num_kv_heads, head_dim, block_size;
  float scale;
  const AttentionToken* tokens;
  const AttentionItem* items;  // the work items of the kernel
  Dtype dtype, cache_dtype;
};

constexpr int kAttentionChunk = 64;  // KV positions per step of the online softmax, aligned to absolute positions
constexpr int kAttentionRun = 16;    // positions that the kernel wants in one piece of memory; divides a chunk
constexpr int kAttentionMaxHeadDim = 512;
constexpr int kAttentionRows = 64;       // query rows (tokens x query heads of one KV head) per item at most
constexpr int kAttentionRowHeads = 256;  // and those of all its KV heads together,
constexpr int kAttentionFloats = kAttentionRows * kAttentionMaxHeadDim;  // of which each takes attention_width floats

constexpr int64_t attention_width(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

struct SampleArgs {
  const void* logits;     // [R, V], fp32 or bf16
  int64_t logits_stride;  // elements between rows
  const double* uniform;      // [R]
  const float* temperature;  // [R]
  int64_t V;
  int64_t* token;  // [R]
  float* logprob;  // [R]
  Dtype dtype;     // of the logits
};

struct KernelTable {
  const char* name;
  int64_t (*linear_packed_bytes)(const LinearArgs&);
  void (*linear_pack_weight)(const LinearArgs&, void* out);            // 64-byte aligned
  int64_t (*linear_scratch)(const LinearArgs&);                        // bytes
  void (*linear_pack)(const LinearArgs&, int64_t begin, int64_t end);  // rows of x into the scratch, if there is any
  int64_t (*linear_items)(const LinearArgs&);
  void (*linear)(const LinearArgs&, int64_t begin, int64_t end);
  void (*rms_norm)(const RmsNormArgs&, int64_t begin, int64_t end);
  void (*silu_mul)(const SiluMulArgs&, int64_t begin, int64_t end);
  void (*rope_and_cache)(const RopeArgs&, int64_t begin, int64_t end);
  void (*attention)(const AttentionArgs&, int64_t begin, int64_t end);
  void (*sample)(const SampleArgs&, int64_t begin, int64_t end);
  TrainingKernels training;
};

extern const KernelTable kScalarKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const KernelTable kAvx512Bf16Kernels;
const KernelTable& amx_kernels();  // call these only on a CPU with AVX-512
const KernelTable& amx_emulated_kernels();
#endif

// The table in use: the best one this CPU has, unless SAGC_CPU_LEVEL or set_level says otherwise.
const KernelTable& kernels();
bool set_level(const char* name);  // false: unknown here
const char* available_levels();    // comma-separated, slowest first

}  // namespace sagc
