// What a decode step does to its rows, on the device: where each row stands before the model runs, and what the draw does
// to it. A thread per row and a handful of numbers each, so that a launch is the cost.
#include "device.cuh"

namespace sagc {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) place_rows_kernel(const PlaceArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.num_rows) return;
  const bool is_live = args.is_live[row] > 0 && args.is_kept[row] > 0;
  const int64_t position = args.position[row];
  args.is_live[row] = is_live;
  // A row that is over attends to its shared blocks and one position, the least that a row may.
  args.context[row] = static_cast<int32_t>(is_live ? position + 1 : args.shared_blocks[row] * args.block_size + 1);
  const int64_t block = args.tables[row * args.table_stride + position / args.block_size];
  args.slot[row] = is_live ? block * args.block_size + position % args.block_size : args.scratch_slot;
}

__global__ void __launch_bounds__(kThreads) advance_rows_kernel(const AdvanceArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= args.num_rows) return;
  const bool is_live = args.is_live[row] > 0;
  const int64_t token = args.drawn[row], index = args.index[row] + 1, step = args.step[row];
  const float logprob = args.logprob[row];
  bool is_over = index >= args.max_output[row] || logprob != logprob;
  const int64_t* ends = args.end_ids + args.end_set[row] * args.end_stride;
  for (int64_t i = 0; i < args.num_ids; i++) is_over = is_over || ends[i] == token;
  args.record[step * args.record_stride + row] = !is_live ? -1 : is_over ? -2 - token : token;
  args.record_logprob[step * args.record_logprob_stride + row] = is_live ? logprob : 0.0f;
  args.step[row] = step + 1 == args.num_steps ? 0 : step + 1;
  if (!is_live) return;
  args.index[row] = index;
  args.is_live[row] = !is_over;
  if (is_over) return;
  args.token[row] = token;
  args.position[row]++;
}

unsigned grid_of(int64_t num_rows) { return static_cast<unsigned>((num_rows + kThreads - 1) / kThreads); }

}  // namespace
}  // namespace sagc

extern "C" int sagc_cuda_place_rows(void* stream, const sagc::PlaceArgs* args) {
  if (args->num_rows == 0) return 0;
  SAGC_LAUNCH(sagc::place_rows_kernel, sagc::grid_of(args->num_rows), sagc::kThreads, stream, *args);
  return static_cast<int>(cudaGetLastError());
}

extern "C" int sagc_cuda_advance_rows(void* stream, const sagc::AdvanceArgs* args) {
  if (args->num_rows == 0) return 0;
  SAGC_LAUNCH(sagc::advance_rows_kernel, sagc::grid_of(args->num_rows), sagc::kThreads, stream, *args);
  return static_cast<int>(cudaGetLastError());
}
