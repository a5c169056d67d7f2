// Steps of decode rows from the row table to their tokens: as many as the caller allows, in one call.
//
// A row's step needs its newest token, its position and its cache blocks; all but the blocks follow from the step before, and
// the blocks have been reserved. The noise of a draw is keyed (philox.h), the end of a row is a token id or a length: nothing
// in here has to ask the host, until a row is over and the host has another to put in its place.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>

#include "decoder.h"
#include "operations.h"
#include "philox.h"
#include "threads.h"

namespace sagc {
namespace {

constexpr double kPatienceSeconds = 0.25;            // so long may a signal or the caller's display wait
// Logits held at a time: 82 rows of a vocabulary of 151,936 in bf16. More rows are taken in equal parts, each of which reads the
// head once more: of two parts of 64 rows the arithmetic takes several times as long as the reading.
constexpr int64_t kLogitsBytes = int64_t{24} << 20;

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count(); }

 private:
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

const float* widen(const bf16_t* x, float* y, int64_t width) {
  for (int64_t i = 0; i < width; i++) {
    const uint32_t bits = static_cast<uint32_t>(x[i].bits) << 16;
    std::memcpy(y + i, &bits, sizeof bits);
  }
  return y;
}

}  // namespace

std::tuple<Tensor, Tensor, double> Decoder::sample(const Tensor& hidden, const Tensor& index, const Tensor& uniform,
                                                   const Tensor& temperature) {
  STD_TORCH_CHECK(hidden.dim() == 2 && hidden.size(1) == E_ && hidden.is_contiguous() && dtype_of(hidden, "hidden") == dtype_,
                  "hidden must be contiguous [rows, E] of the weights' dtype");
  check_type(uniform, ScalarType::Double, "uniform", "float64");
  check_type(temperature, ScalarType::Float, "temperature", "float32");
  const int64_t U = hidden.size(0), R = index.numel();
  const int64_t* source = int64_row(index, "index");
  check_range(source, R, U, "hidden index");
  STD_TORCH_CHECK(std::is_sorted(source, source + R), "the hidden index must not fall");
  STD_TORCH_CHECK(uniform.is_contiguous() && temperature.is_contiguous() && uniform.numel() == R && temperature.numel() == R,
                  "uniform and temperature must have one entry per sample");
  Tensor token = empty({R}, ScalarType::Long), logprob = empty({R}, ScalarType::Float);
  const Draw d{static_cast<const char*>(hidden.const_data_ptr()),
               source,
               R,
               static_cast<const double*>(uniform.const_data_ptr()),
               static_cast<const float*>(temperature.const_data_ptr()),
               static_cast<int64_t*>(token.mutable_data_ptr()),
               static_cast<float*>(logprob.mutable_data_ptr())};
  const double head_seconds = draw(d);
  return {token, logprob, head_seconds};
}

double Decoder::draw(const Draw& d) {
  const SampleArgs args{nullptr, 0, d.uniform, d.temperature, V_, d.token, d.logprob};
  const int64_t R = d.R, *source = d.source;
  const int64_t num_hidden = R == 0 ? 0 : source[R - 1] + 1 - source[0];
  const int64_t num_parts = std::max<int64_t>(1, (num_hidden * V_ * item_ + kLogitsBytes - 1) / kLogitsBytes);
  const int64_t most = (num_hidden + num_parts - 1) / num_parts;
  float* widened = dtype_ == Dtype::kFloat32 ? nullptr : widened_.array<float>(V_ * num_workers());
  double head_seconds = 0.0;
  for (int64_t first = 0; first < R;) {
    const int64_t u = source[first], rows = std::min(most, source[R - 1] + 1 - u);
    const int64_t last = std::lower_bound(source + first, source + R, u + rows) - source;
    char* logits = gate_up_.get(rows * V_ * item_);
    const Stopwatch watch;
    multiply(head_, d.hidden + u * E_ * item_, logits, rows);
    head_seconds += watch.seconds();
    const double flops = 2 * kFlopsPerElement * static_cast<double>((last - first) * V_);
    parallel_workers(last - first, flops, [&](int worker, int64_t begin, int64_t end) {
      for (int64_t r = first + begin; r < first + end; r++) {
        const char* row = logits + (source[r] - u) * V_ * item_;
        SampleArgs one = args;
        one.uniform += r, one.temperature += r, one.token += r, one.logprob += r;
        one.logits = reinterpret_cast<const float*>(row);
        if (widened != nullptr) {
          one.logits = widen(reinterpret_cast<const bf16_t*>(row), widened + worker * V_, V_);
        }
        kernels().sample(one, 0, 1);
      }
    });
    first = last;
  }
  check_sampled(args.logprob, R);
  return head_seconds;
}

void Decoder::bind(std::vector<Tensor> tensors, Tensor cos, Tensor sin) {
  STD_TORCH_CHECK(tensors.size() == 13, "the decoder needs 13 arrays of rows, not ", tensors.size());
  Rows r{};
  r.capacity = tensors[0].numel();
  size_t place = 0;
  auto next = [&](ScalarType type, int64_t dims) -> const Tensor& {
    const Tensor& t = tensors[place++];
    STD_TORCH_CHECK(t.scalar_type() == type && t.dim() == dims && t.is_contiguous(), "array ", place - 1,
                    " of the rows has the wrong dtype or shape");
    return t;
  };
  auto of_slots = [&](ScalarType type) {
    const Tensor& t = next(type, 1);
    STD_TORCH_CHECK(t.numel() == r.capacity, "array ", place - 1, " of the rows must have ", r.capacity, " entries");
    return t.const_data_ptr();
  };
  for (const int64_t** array : {&r.last_token, &r.num_computed, &r.num_output, &r.max_output, &r.end_set, &r.seed, &r.prompt_id,
                                &r.sample_index})
    *array = static_cast<const int64_t*>(of_slots(ScalarType::Long));
  r.temperature = static_cast<const float*>(of_slots(ScalarType::Float));
  r.group_index = static_cast<const int32_t*>(of_slots(ScalarType::Int));
  r.shared_blocks = static_cast<const int32_t*>(of_slots(ScalarType::Int));
  const Tensor& tables = next(ScalarType::Int, 2);
  STD_TORCH_CHECK(tables.size(0) == r.capacity, "the block tables must have one row per slot");
  r.block_tables = static_cast<const int32_t*>(tables.const_data_ptr()), r.columns = tables.size(1);
  const Tensor& ends = next(ScalarType::Long, 2);
  r.end_ids = static_cast<const int64_t*>(ends.const_data_ptr()), r.num_sets = ends.size(0), r.ids_per_set = ends.size(1);
  check_angles(cos, sin);
  r.cos = static_cast<const float*>(cos.const_data_ptr()), r.sin = static_cast<const float*>(sin.const_data_ptr());
  r.num_angles = cos.size(0);
  rows_ = r;
  bound_ = std::move(tensors);
  bound_.push_back(cos), bound_.push_back(sin);
}

struct Decoder::Burst {
  int64_t D;
  std::vector<int32_t> cu_query, context_lens, tables, share_group, shared_blocks;
  std::vector<int64_t> newest, source, end_set, num_output, max_output;
  std::vector<uint64_t> seed, prompt_id, sample_index;
  std::vector<float> temperature;
  std::vector<double> uniform;
  int64_t columns;
};

// The rows of `slots` as arrays without gaps, checked for all of the steps.
void Decoder::gather(Burst& b, const int64_t* slots, int64_t most_steps) const {
  const Rows& r = rows_;
  const size_t D = static_cast<size_t>(b.D);
  check_range(slots, b.D, r.capacity, "slot");
  int64_t longest = 0;
  for (size_t d = 0; d < D; d++) {
    const int64_t s = slots[d], length = r.num_computed[s] + most_steps;
    STD_TORCH_CHECK(r.num_computed[s] >= 0 && length <= std::min(r.num_angles, r.columns * block_size_), "slot ", s,
                    " would reach ", length, " positions, beyond its table of blocks or the tables of angles");
    longest = std::max(longest, length);
  }
  b.columns = (longest + block_size_ - 1) / block_size_;
  b.tables.resize(D * static_cast<size_t>(b.columns));
  for (size_t d = 0; d < D; d++) {
    const int64_t s = slots[d], blocks = (r.num_computed[s] + most_steps + block_size_ - 1) / block_size_;
    const int32_t* table = r.block_tables + s * r.columns;
    for (int64_t i = 0; i < blocks; i++)
      STD_TORCH_CHECK(table[i] >= 0 && table[i] < num_blocks_, "slot ", s, " names block ", table[i], " of ", num_blocks_);
    std::copy(table, table + b.columns, b.tables.begin() + static_cast<int64_t>(d) * b.columns);
    b.context_lens.push_back(static_cast<int32_t>(r.num_computed[s]) + 1);
    b.share_group.push_back(r.group_index[s]), b.shared_blocks.push_back(r.shared_blocks[s]);
    b.newest.push_back(r.last_token[s]), b.end_set.push_back(r.end_set[s]);
    b.num_output.push_back(r.num_output[s]), b.max_output.push_back(r.max_output[s]);
    b.seed.push_back(static_cast<uint64_t>(r.seed[s])), b.prompt_id.push_back(static_cast<uint64_t>(r.prompt_id[s]));
    b.sample_index.push_back(static_cast<uint64_t>(r.sample_index[s]));
    b.temperature.push_back(r.temperature[s]);
  }
  check_range(b.newest.data(), b.D, V_, "token id");
  check_range(b.end_set.data(), b.D, r.num_sets, "set of ending ids");
  b.cu_query.resize(D + 1), b.source.resize(D), b.uniform.resize(D);
  std::iota(b.cu_query.begin(), b.cu_query.end(), 0);
  std::iota(b.source.begin(), b.source.end(), int64_t{0});
}

std::tuple<Tensor, Tensor, double, double> Decoder::steps(const Tensor& slots, int64_t most_steps) {
  STD_TORCH_CHECK(rows_.capacity > 0, "no rows are bound to the decoder");
  STD_TORCH_CHECK(slots.numel() > 0 && most_steps > 0, "steps need at least one row and one step");
  Burst b{};
  const int64_t D = b.D = slots.numel();
  gather(b, int64_row(slots, "slots"), most_steps);
  std::vector<int64_t> tokens(static_cast<size_t>(D * most_steps));  // [steps, D]
  std::vector<float> logprobs(tokens.size());
  double model_seconds = 0.0, draw_seconds = 0.0;
  int64_t done = 0;
  for (bool is_over = false; done < most_steps && !is_over && model_seconds + draw_seconds < kPatienceSeconds; done++) {
    const Stopwatch model;
    Step step{};
    step.T = step.R = D;
    step.token_ids = done == 0 ? b.newest.data() : tokens.data() + (done - 1) * D;
    step.cos = rows_.cos, step.sin = rows_.sin;
    step.layout = {b.cu_query.data(),    b.context_lens.data(), b.tables.data(), b.share_group.data(),
                   b.shared_blocks.data(), D,                     b.columns};
    char* hidden = hidden_.get(D * E_ * item_);
    run(step, rows_.num_angles, hidden);
    model_seconds += model.seconds();

    const Stopwatch drawing;
    for (int64_t d = 0; d < D; d++)
      b.uniform[d] = keyed_uniform(b.seed[d], b.prompt_id[d], static_cast<uint32_t>(b.sample_index[d]),
                                   static_cast<uint32_t>(b.num_output[d] + done));
    int64_t* token = tokens.data() + done * D;
    const double head_seconds =
        draw({hidden, b.source.data(), D, b.uniform.data(), b.temperature.data(), token, logprobs.data() + done * D});
    for (int64_t d = 0; d < D; d++) {
      const int64_t* ids = rows_.end_ids + b.end_set[d] * rows_.ids_per_set;
      const bool is_last = b.num_output[d] + done + 1 >= b.max_output[d];
      is_over |= is_last || std::find(ids, ids + rows_.ids_per_set, token[d]) != ids + rows_.ids_per_set;
      b.context_lens[d]++;
    }
    model_seconds += head_seconds, draw_seconds += drawing.seconds() - head_seconds;
  }

  Tensor token = empty({D * done}, ScalarType::Long), logprob = empty({D * done}, ScalarType::Float);
  auto* token_out = static_cast<int64_t*>(token.mutable_data_ptr());
  auto* logprob_out = static_cast<float*>(logprob.mutable_data_ptr());
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = 0; i < done; i++) {
      token_out[d * done + i] = tokens[static_cast<size_t>(i * D + d)];
      logprob_out[d * done + i] = logprobs[static_cast<size_t>(i * D + d)];
    }
  return {token, logprob, model_seconds, draw_seconds};
}

}  // namespace sagc
