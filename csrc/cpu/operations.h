// The operations on raw pointers, between the kernels and their two callers: the torch operators of op_*.cpp, which check
// tensors, and the step driver of decoder.cpp. Arguments have been checked here; each operation spreads its kernel's work
// items over the threads.
#pragma once

#include <cstdint>

#include "attention_plan.h"
#include "kernels.h"
#include "torch_util.h"

namespace sagc {

// Operations on rows, counted as this much arithmetic: a norm takes 0.4 to 0.8 ns per element, the time of 40 to 80 operations
// of a product, RoPE with its write 0.3 ns.
constexpr double kFlopsPerElement = 24.0;

void run_rms_norm(const RmsNormArgs& args, int64_t rows);
void run_silu_mul(const SiluMulArgs& args, int64_t rows);
void run_rope_and_cache(const RopeArgs& args, int64_t tokens);

// The layout of tensors. Everything that is dereferenced later is checked here, so that a broken one is an error, not a crash.
AttentionLayout read_layout(const Tensor& cu_query, const Tensor& context_lens, const Tensor& block_tables,
                            const Tensor& share_group, const Tensor& shared_blocks, int64_t num_tokens, int64_t num_blocks,
                            int64_t block_size);

// An error when a sampled row's log-probability says that its logits were not finite.
void check_sampled(const float* logprob, int64_t rows);

}  // namespace sagc
