// The device operations on raw pointers: what library.cpp (torch, g++) knows of the kernels (nvcc, no torch headers).
#pragma once

#include <cstdint>

namespace sagc {

enum class LogitsType : int { kFloat32, kBFloat16, kFloat16 };

// Vocabulary that sample_keyed can serve; shared memory holds two numbers per 1024 tokens of it.
constexpr int64_t kMaxVocab = 1 << 20;

struct SampleArgs {
  const void* logits;  // [R, V], rows `stride` elements apart
  LogitsType type;
  int64_t num_rows, vocab_size, stride;
  const float* temperature;  // [R], 0: greedy
  const int64_t *seed, *prompt_id, *sample_index, *position;  // [R], bits of unsigned numbers
  int64_t* token;   // [R]
  float* logprob;   // [R]
};

// The state of decode rows by row, as sagc_fast/ops/decode_rows.py describes it; rows of tables are `stride` apart.
struct PlaceArgs {
  const int64_t* position;
  int32_t* is_live;
  const int32_t* is_kept;
  const int32_t* shared_blocks;
  const int32_t* tables;  // [R, B]
  int32_t* context;
  int64_t* slot;
  int64_t num_rows, table_stride, block_size, scratch_slot;
};

struct AdvanceArgs {
  const int64_t* drawn;
  const float* logprob;
  int64_t *token, *position, *index;
  const int64_t* max_output;
  int32_t* is_live;
  const int64_t* end_set;
  int64_t* step;
  const int64_t* end_ids;  // [S, I]
  int64_t* record;         // [K, R]
  float* record_logprob;   // [K, R]
  int64_t num_rows, num_ids, num_steps, end_stride, record_stride, record_logprob_stride;
};

}  // namespace sagc

// Enqueue on a stream; 0 or the cudaError_t of the launch.
extern "C" int sagc_cuda_sample_keyed(void* stream, const sagc::SampleArgs* args);
extern "C" int sagc_cuda_place_rows(void* stream, const sagc::PlaceArgs* args);
extern "C" int sagc_cuda_advance_rows(void* stream, const sagc::AdvanceArgs* args);
