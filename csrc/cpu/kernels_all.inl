// Every kernel for the Vec defined before; last comes their table. Included once per instruction set.
#pragma once

// clang-format off
#include "vec_math.inl"
#include "dot_tile.inl"
#include "linear.inl"
#include "attention.inl"
#include "rowwise.inl"
#include "sampling.inl"
#include "varlen.inl"
#include "rowwise_backward.inl"
#include "logits.inl"
// clang-format on

#define SAGC_TRAINING_KERNELS                                                                                          \
  {varlen_scratch, varlen,       varlen_backward, rms_norm_backward, silu_mul_backward, rotary_split, rotary_merge, \
   logits_stats,   logits_grad}

#define SAGC_KERNEL_TABLE(name)                                                                                       \
  { name,     linear_packed_bytes, linear_pack_weight, linear_scratch, linear_pack, linear_items, linear, rms_norm, \
    silu_mul, rope_and_cache,      attention,          sample,         SAGC_TRAINING_KERNELS }
