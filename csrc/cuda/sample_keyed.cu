// Keyed sampling: one block draws one row's token, with its log-prob, in one launch and one pass over the logits.
//
// A warp takes chunks of 1024 tokens: 32 logits per lane in 16-byte loads, their maximum, and the sum of exp(z - maximum),
// fp32 for eight at a time and fp64 beyond. The chunks' two numbers stay in shared memory; one warp turns them into a
// cumulative sum over the vocabulary in a fixed order and finds the chunk in which it passes u x total; then the block
// reads that chunk once more (L2) and finds the token in it. Bound: V logits per row from memory; with few rows, the
// V exponentials of one multiprocessor.
#include "device.cuh"
#include "philox.cuh"

namespace sagc {
namespace {

constexpr int kThreads = 1024;
constexpr int kNumWarps = kThreads / kWarp;
constexpr int kVector = 8;
constexpr int kLoads = 4;
constexpr int kChunk = kWarp * kVector * kLoads;
constexpr int kMaxChunks = kMaxVocab / kChunk;
constexpr int kNone = 1 << 30;
static_assert(kChunk == kThreads, "the chosen chunk is read with one token per thread");

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(BFloat16 x) { return __uint_as_float(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float widen(Float16 x) { return __half2float(__ushort_as_half(x.bits)); }

// Eight consecutive logits from `first` on; -inf behind the vocabulary.
template <typename T, bool kAligned>
__device__ __forceinline__ void load(const T* logits, int64_t first, int64_t vocab_size, float (&z)[kVector]) {
  if (kAligned && first + kVector <= vocab_size) {
    alignas(16) T values[kVector];
    const uint4* source = reinterpret_cast<const uint4*>(logits + first);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(values) / sizeof(uint4)); i++) reinterpret_cast<uint4*>(values)[i] = source[i];
#pragma unroll
    for (int i = 0; i < kVector; i++) z[i] = widen(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i++) z[i] = first + i < vocab_size ? widen(logits[first + i]) : -INFINITY;
  }
}

template <typename T, bool kAligned>
__global__ void __launch_bounds__(kThreads) sample_keyed_kernel(const SampleArgs args) {
  __shared__ float chunk_largest[kMaxChunks];
  __shared__ double chunk_total[kMaxChunks];
  __shared__ double warp_total[kNumWarps], total, threshold, before;
  __shared__ int warp_hit[kNumWarps], warp_last[kNumWarps], chosen_chunk;
  __shared__ float largest;

  const int64_t row = blockIdx.x;
  const int thread = threadIdx.x, warp = thread / kWarp, lane = thread % kWarp;
  const T* logits = static_cast<const T*>(args.logits) + row * args.stride;
  const int num_chunks = static_cast<int>((args.vocab_size + kChunk - 1) / kChunk);
  const float temperature = args.temperature[row];
  const bool is_greedy = temperature == 0.0f, is_divided = !is_greedy && temperature != 1.0f;

  for (int chunk = warp; chunk < num_chunks; chunk += kNumWarps) {
    float z[kLoads][kVector];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int64_t first = static_cast<int64_t>(chunk) * kChunk + (i * kWarp + lane) * kVector;
      load<T, kAligned>(logits, first, args.vocab_size, z[i]);
    }
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
#pragma unroll
      for (int j = 0; j < kVector; j++) {
        if (is_divided) z[i][j] = __fdiv_rn(z[i][j], temperature);
        most = fmaxf(most, z[i][j]);
      }
    }
    most = warp_max(most);
    const float base = most == -INFINITY ? 0.0f : most;
    double sum = 0.0;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      float part[kVector];
#pragma unroll
      for (int j = 0; j < kVector; j++) part[j] = __expf(z[i][j] - base);
#pragma unroll
      for (int step = kVector / 2; step > 0; step /= 2) {
#pragma unroll
        for (int j = 0; j < step; j++) part[j] += part[j + step];
      }
      sum += part[0];
    }
    sum = warp_sum(sum);  // NaN where a logit is NaN or +inf
    if (lane == 0) chunk_largest[chunk] = most, chunk_total[chunk] = sum;
  }
  __syncthreads();

  if (warp == 0) {
    // Each lane owns consecutive chunks, so that the lanes' cumulative sum runs over the vocabulary in order.
    const int per_lane = (num_chunks + kWarp - 1) / kWarp;
    const int first = min(lane * per_lane, num_chunks), end = min(first + per_lane, num_chunks);
    float most = -INFINITY;
    for (int chunk = first; chunk < end; chunk++) most = fmaxf(most, chunk_largest[chunk]);
    most = warp_max(most);
    const float base = most == -INFINITY ? 0.0f : most;
    double sum = 0.0;
    int greedy = kNone;
    for (int chunk = end - 1; chunk >= first; chunk--) {
      if (chunk_largest[chunk] == most) greedy = chunk;
    }
    for (int chunk = first; chunk < end; chunk++) {
      chunk_total[chunk] *= static_cast<double>(__expf(chunk_largest[chunk] - base));
      sum += chunk_total[chunk];
    }
    const double cumulative = warp_cumulative(sum, lane);
    const double all = __shfl_sync(kAll, cumulative, kWarp - 1);
    const double u = philox_uniform(args.seed[row], args.prompt_id[row], args.sample_index[row], args.position[row]);
    // Below the total even where u was rounded to 1, so that the last positive step is found.
    const double wanted = fmin(u * all, all * 0.9999999999999999);
    double running = __shfl_up_sync(kAll, cumulative, 1), passed = 0.0, last_passed = 0.0;
    if (lane == 0) running = 0.0;
    int hit = kNone, last = kNone;
    for (int chunk = first; chunk < end; chunk++) {
      const double step = chunk_total[chunk];
      if (step > 0.0) {
        last = chunk, last_passed = running;
        if (hit == kNone && running + step > wanted) hit = chunk, passed = running;
      }
      running += step;
    }
    if (is_greedy) hit = greedy;
    // The first lane with a hit; without any (rounding at lane borders) the last chunk that holds probability.
    const unsigned hits = __ballot_sync(kAll, hit != kNone), lasts = __ballot_sync(kAll, last != kNone);
    const int owner = hits != 0 ? __ffs(hits) - 1 : 31 - __clz(lasts | 1u);
    if (lane == owner) {
      chosen_chunk = hits != 0 ? hit : last;
      before = hits != 0 ? passed : last_passed;
      total = all, threshold = wanted, largest = base;
    }
  }
  __syncthreads();

  if (!(total > 0.0)) {  // NaN or +inf among the logits, or nothing but -inf
    if (thread == 0) args.token[row] = 0, args.logprob[row] = __int_as_float(0x7fc00000);
    return;
  }
  const int64_t token = static_cast<int64_t>(chosen_chunk) * kChunk + thread;
  float z = token < args.vocab_size ? widen(logits[token]) : -INFINITY;
  if (is_divided) z = __fdiv_rn(z, temperature);
  z -= largest;
  const double weight = static_cast<double>(__expf(z));
  const double in_warp = warp_cumulative(weight, lane);
  if (lane == kWarp - 1) warp_total[warp] = in_warp;
  __syncthreads();
  double cumulative = in_warp;
  for (int i = 0; i < warp; i++) cumulative += warp_total[i];
  const bool is_hit = is_greedy ? z == 0.0f : weight > 0.0 && cumulative > threshold - before;
  const unsigned hits = __ballot_sync(kAll, is_hit), positive = __ballot_sync(kAll, weight > 0.0);
  if (lane == 0) {
    warp_hit[warp] = hits != 0 ? warp * kWarp + __ffs(hits) - 1 : kNone;
    warp_last[warp] = positive != 0 ? warp * kWarp + 31 - __clz(positive) : -1;
  }
  __syncthreads();
  int place = kNone, last = -1;
  for (int i = 0; i < kNumWarps; i++) place = min(place, warp_hit[i]), last = max(last, warp_last[i]);
  if (place == kNone) place = last;
  if (thread == place) {
    args.token[row] = token;
    args.logprob[row] = static_cast<float>(static_cast<double>(z) - log(total));
  }
}

template <typename T>
void launch(void* stream, const SampleArgs& args) {
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(args.logits) % 16 == 0 && args.stride * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  const unsigned grid = static_cast<unsigned>(args.num_rows);
  if (is_aligned) {
    SAGC_LAUNCH((sample_keyed_kernel<T, true>), grid, kThreads, stream, args);
  } else {
    SAGC_LAUNCH((sample_keyed_kernel<T, false>), grid, kThreads, stream, args);
  }
}

}  // namespace
}  // namespace sagc

extern "C" int sagc_cuda_sample_keyed(void* stream, const sagc::SampleArgs* args) {
  using sagc::LogitsType;
  if (args->num_rows == 0) return 0;
  if (args->type == LogitsType::kFloat32) sagc::launch<float>(stream, *args);
  if (args->type == LogitsType::kBFloat16) sagc::launch<sagc::BFloat16>(stream, *args);
  if (args->type == LogitsType::kFloat16) sagc::launch<sagc::Float16>(stream, *args);
  return static_cast<int>(cudaGetLastError());
}
