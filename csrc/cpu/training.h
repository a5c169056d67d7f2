// Kernels of the update: attention over packed groups, the backward of the row-wise operators, the language-model head.
//
// The same rules as in kernels.h: a half-open range of work items, bits that do not depend on the range. What is summed over
// tokens (gradients of weights, of a prompt's keys) is summed in parts cut by the sizes alone, then part by part in order.
#pragma once

#include <cstdint>

namespace sagc {

enum class Dtype;

struct Span {
  int64_t start, length;  // consecutive rows of the packed batch
};

// A share of one group's query rows: rows [prompt_begin, prompt_end) of the prompt, and whole completions.
struct VarlenPart {
  Span prompt;  // rows that the part attends to: up to prompt_end when it has no completions
  int64_t prompt_begin, prompt_end;
  const Span* completions;
  int64_t num_completions;
  float* prompt_grad;  // fp32 [prompt.length, KV heads, 2, D] (k, v) to be added up later; null: the part is the whole group
};

struct VarlenArgs {
  const void *q, *k, *v;                 // [T, heads, D]; heads of a token are contiguous
  int64_t q_stride, k_stride, v_stride;  // elements between tokens
  void* out;                             // [T, H, D]; written by forward, read by backward
  float* lse;                            // [T, H] log-sum-exp of the scaled scores; likewise
  const void* grad_out;                  // [T, H, D]
  void *grad_q, *grad_k, *grad_v;        // [T, heads, D]
  const VarlenPart* parts;               // work item i is KV head i % num_kv_heads of parts[i / num_kv_heads]
  int64_t num_heads, num_kv_heads, head_dim;
  float scale;
  Dtype dtype;
};

constexpr int kVarlenRows = 24;    // query rows that go through the keys together
constexpr int kVarlenKeys = 256;   // keys per step: scores of a block stay in the L1 cache
constexpr int kVarlenPartRows = 1024;  // query rows per part, as far as completions can be told apart

struct RmsNormBackwardArgs {
  const void *grad_y, *x, *weight;  // [T, E], [T, E], [E]; x as it was normed (after the residual was added)
  const void* grad_sum;             // [T, E] or null: added to grad_x
  void* grad_x;                     // [T, E]
  float* grad_weight;               // [items, E], one row per work item of kRowsPerSum tokens
  int64_t T, E;
  float eps;
  Dtype dtype;
};

constexpr int kRowsPerSum = 64;

struct SiluMulBackwardArgs {
  const void *grad_y, *gate_up;  // [T, F], [T, 2F]
  void* grad_gate_up;            // [T, 2F]
  int64_t F;
  Dtype dtype;
};

// qkv [T, H + 2 K, D] against q [T, H, D] and k, v [T, K, D]: split with q and k turned, or merged with them turned back.
struct RotaryArgs {
  const float *cos, *sin;  // [T, D / 2]
  void *qkv, *q, *k, *v;
  int64_t qkv_stride, q_stride, k_stride, v_stride;  // elements between tokens
  int64_t num_heads, num_kv_heads, head_dim;
  Dtype dtype;
};

// Rows of logits z, of which columns [first_column, first_column + width) are there.
struct LogitsArgs {
  void* logits;
  int64_t stride, width, first_column;
  const int64_t* targets;  // column of the token of each row
  float scale;             // 1 / temperature
  float *logprob, *lse, *entropy;
  const float *grad_logprob, *grad_entropy;
  Dtype dtype;
};

struct TrainingKernels {
  int64_t (*varlen_scratch)(int64_t head_dim, int64_t prompt, int64_t completion, bool backward);  // floats
  void (*varlen)(const VarlenArgs&, float* scratch, int64_t begin, int64_t end);
  void (*varlen_backward)(const VarlenArgs&, float* scratch, int64_t begin, int64_t end);
  void (*rms_norm_backward)(const RmsNormBackwardArgs&, int64_t begin, int64_t end);
  void (*silu_mul_backward)(const SiluMulBackwardArgs&, int64_t begin, int64_t end);
  void (*rotary_split)(const RotaryArgs&, int64_t begin, int64_t end);
  void (*rotary_merge)(const RotaryArgs&, int64_t begin, int64_t end);
  void (*logits_stats)(const LogitsArgs&, int64_t begin, int64_t end);  // whole rows -> logprob, lse, entropy
  void (*logits_grad)(const LogitsArgs&, int64_t begin, int64_t end);   // logits -> their gradient, in place
};

}  // namespace sagc
