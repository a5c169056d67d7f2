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

struct PackArgs {
  const int32_t* rows;          // [C] slots in row order
  const int32_t* num_rows;      // [1] how many of them count
  const bool* is_over;          // [S], all below by slot
  const int64_t* num_computed;  // [S] tokens whose keys and values are in the cache
  const int32_t* tables;        // [S, B]
  const int32_t* share_group;   // [S]
  const int32_t* shared_blocks; // [S]
  int64_t capacity;             // C
  int64_t num_columns;          // B
  int64_t block_size;
  int64_t padding_slot;
  // Results, R rows.
  int64_t bucket;  // R
  int32_t* out_rows;
  int32_t* out_num_rows;
  int64_t* out_positions;
  int64_t* out_slots;
  int32_t* out_context_lens;
  int32_t* out_cu_query;  // [R + 1]
  int32_t* out_tables;    // [R, B]
  int32_t* out_share_group;
  int32_t* out_shared_blocks;
};

}  // namespace sagc

// Enqueue on a stream; 0 or the cudaError_t of the launch.
extern "C" int sagc_cuda_sample_keyed(void* stream, const sagc::SampleArgs* args);
extern "C" int sagc_cuda_pack_decode_rows(void* stream, const sagc::PackArgs* args);
