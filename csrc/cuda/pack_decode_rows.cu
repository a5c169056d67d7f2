// The next decode step's metadata, and the compaction of rows that are over, in one launch without the host.
//
// Every block counts the live rows itself (a byte each, from L2), so that no block waits for another; then it writes
// kRowsPerBlock rows of the result, a warp per row, whose block table is the bulk of the traffic. Rows keep their order,
// so siblings stay side by side. Results must not overlap the table they are read from.
#include "device.cuh"

namespace sagc {
namespace {

constexpr int kRowsPerBlock = 8;
constexpr int kThreads = kRowsPerBlock * kWarp;

__global__ void __launch_bounds__(kThreads) pack_decode_rows_kernel(const PackArgs args) {
  __shared__ int warp_count[kRowsPerBlock];
  __shared__ int source[kRowsPerBlock];  // the slot of each row that this block writes

  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  const int first_row = blockIdx.x * kRowsPerBlock;
  const int num_rows = min(*args.num_rows, static_cast<int>(args.capacity));
  if (thread < kRowsPerBlock) source[thread] = -1;
  int num_live = 0;
  for (int start = 0; start < num_rows; start += kThreads) {
    const int index = start + thread;
    const int slot = index < num_rows ? args.rows[index] : -1;
    const bool is_live = slot >= 0 && !args.is_over[slot];
    const unsigned lives = __ballot_sync(kAll, is_live);
    __syncthreads();  // nobody reads the counts of the round before any more
    if (lane == 0) warp_count[warp] = __popc(lives);
    __syncthreads();
    int rank = num_live + __popc(lives & ((1u << lane) - 1u));
    for (int i = 0; i < kRowsPerBlock; i++) {
      if (i < warp) rank += warp_count[i];
      num_live += warp_count[i];
    }
    if (is_live && rank >= first_row && rank < first_row + kRowsPerBlock) source[rank - first_row] = slot;
  }
  __syncthreads();

  const int64_t row = first_row + warp;
  if (blockIdx.x == 0 && thread == 0) *args.out_num_rows = num_live, args.out_cu_query[0] = 0;
  if (row >= args.bucket) return;
  const int slot = source[warp];
  const bool is_row = slot >= 0;
  const int64_t position = is_row ? args.num_computed[slot] : 0;
  const int64_t used = is_row ? position / args.block_size + 1 : 0;  // columns up to the new token's
  const int32_t* table = args.tables + static_cast<int64_t>(is_row ? slot : 0) * args.num_columns;
  for (int64_t column = lane; column < args.num_columns; column += kWarp) {
    args.out_tables[row * args.num_columns + column] = column < used ? table[column] : 0;
  }
  if (lane == 0) {
    args.out_rows[row] = slot;
    args.out_positions[row] = position;
    args.out_slots[row] = is_row && used <= args.num_columns
                              ? static_cast<int64_t>(table[used - 1]) * args.block_size + position % args.block_size
                              : args.padding_slot;
    args.out_context_lens[row] = is_row ? static_cast<int32_t>(position + 1) : 0;
    args.out_cu_query[row + 1] = min(num_live, static_cast<int>(row) + 1);
    args.out_share_group[row] = is_row ? args.share_group[slot] : -1;
    args.out_shared_blocks[row] = is_row ? args.shared_blocks[slot] : 0;
  }
}

}  // namespace
}  // namespace sagc

extern "C" int sagc_cuda_pack_decode_rows(void* stream, const sagc::PackArgs* args) {
  const int64_t blocks = (args->bucket + sagc::kRowsPerBlock - 1) / sagc::kRowsPerBlock;
  const unsigned grid = static_cast<unsigned>(blocks > 0 ? blocks : 1);
  SAGC_LAUNCH(sagc::pack_decode_rows_kernel, grid, sagc::kThreads, stream, *args);
  return static_cast<int>(cudaGetLastError());
}
