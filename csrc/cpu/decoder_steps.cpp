// Steps of decode rows from the row table to their tokens: as many as the caller allows, in one call.
//
// A row's step needs its newest token, its position and its cache blocks; all but the blocks follow from the step before, and
// the blocks have been reserved. The noise of a draw is keyed (philox.h), the end of a row is a token id or a length: nothing
// in here has to ask the host. Rows that are over drop out and the others close ranks, until so few are left that the host may
// have something else in mind: another row for the place, or drafts.
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
  const SampleArgs args{nullptr, 0, d.uniform, d.temperature, V_, d.token, d.logprob, dtype_};
  const int64_t R = d.R, *source = d.source;
  const int64_t num_hidden = R == 0 ? 0 : source[R - 1] + 1 - source[0];
  const int64_t num_parts = std::max<int64_t>(1, (num_hidden * V_ * item_ + kLogitsBytes - 1) / kLogitsBytes);
  const int64_t most = (num_hidden + num_parts - 1) / num_parts;
  double head_seconds = 0.0;
  for (int64_t first = 0; first < R;) {
    const int64_t u = source[first], rows = std::min(most, source[R - 1] + 1 - u);
    const int64_t last = std::lower_bound(source + first, source + R, u + rows) - source;
    char* logits = gate_up_.get(rows * V_ * item_);
    const Stopwatch watch;
    multiply(head_, d.hidden + u * E_ * item_, logits, rows);
    head_seconds += watch.seconds();
    const double flops = 2 * kFlopsPerElement * static_cast<double>((last - first) * V_);
    parallel(last - first, flops, [&](int64_t begin, int64_t end) {
      for (int64_t r = first + begin; r < first + end; r++) {
        SampleArgs one = args;
        one.logits = logits + (source[r] - u) * V_ * item_;
        one.uniform += r, one.temperature += r, one.token += r, one.logprob += r;
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

// The rows that go on, in order. What the kernels read stands in arrays without gaps.
struct Decoder::Burst {
  struct Row {
    int64_t place;  // among the slots that were passed
    int64_t end_set, num_output, max_output;
    uint64_t seed, prompt_id, sample_index;
  };
  std::vector<Row> rows;
  std::vector<int32_t> cu_query, context_lens, tables, share_group, shared_blocks;
  std::vector<int64_t> newest, source;
  std::vector<float> temperature, logprob;
  std::vector<double> uniform;
  int64_t columns;  // of tables

  int64_t size() const { return static_cast<int64_t>(rows.size()); }

  // Row `from` at the place of row `to`, which may be itself.
  void move_row(size_t from, size_t to) {
    rows[to] = rows[from], temperature[to] = temperature[from];
    newest[to] = newest[from], context_lens[to] = context_lens[from];
    share_group[to] = share_group[from], shared_blocks[to] = shared_blocks[from];
    const auto begin = tables.begin() + static_cast<int64_t>(from) * columns;
    if (to < from) std::copy(begin, begin + columns, tables.begin() + static_cast<int64_t>(to) * columns);
  }
};

// The rows of `slots`, checked for all of the steps.
void Decoder::gather(Burst& b, const int64_t* slots, int64_t D, int64_t most_steps) const {
  const Rows& r = rows_;
  check_range(slots, D, r.capacity, "slot");
  // A row's positions behind its last step.
  auto length = [&](int64_t s) {
    return r.num_computed[s] + std::min(most_steps, std::max<int64_t>(1, r.max_output[s] - r.num_output[s]));
  };
  int64_t longest = 0;
  for (int64_t d = 0; d < D; d++) {
    const int64_t s = slots[d];
    STD_TORCH_CHECK(r.num_computed[s] >= 0 && length(s) <= std::min(r.num_angles, r.columns * block_size_), "slot ", s,
                    " would reach ", length(s), " positions, beyond its table of blocks or the tables of angles");
    longest = std::max(longest, length(s));
  }
  b.columns = (longest + block_size_ - 1) / block_size_;
  b.tables.resize(static_cast<size_t>(D * b.columns));
  for (int64_t d = 0; d < D; d++) {
    const int64_t s = slots[d], blocks = (length(s) + block_size_ - 1) / block_size_;
    const int32_t* table = r.block_tables + s * r.columns;
    for (int64_t i = 0; i < blocks; i++)
      STD_TORCH_CHECK(table[i] >= 0 && table[i] < num_blocks_, "slot ", s, " names block ", table[i], " of ", num_blocks_);
    std::copy(table, table + b.columns, b.tables.begin() + d * b.columns);
    b.rows.push_back({d, r.end_set[s], r.num_output[s], r.max_output[s], static_cast<uint64_t>(r.seed[s]),
                      static_cast<uint64_t>(r.prompt_id[s]), static_cast<uint64_t>(r.sample_index[s])});
    b.context_lens.push_back(static_cast<int32_t>(r.num_computed[s]) + 1);
    b.share_group.push_back(r.group_index[s]), b.shared_blocks.push_back(r.shared_blocks[s]);
    b.newest.push_back(r.last_token[s]), b.temperature.push_back(r.temperature[s]);
    STD_TORCH_CHECK(r.end_set[s] >= 0 && r.end_set[s] < r.num_sets, "slot ", s, " names set ", r.end_set[s],
                    " of ending ids, of ", r.num_sets);
  }
  check_range(b.newest.data(), D, V_, "token id");
  const size_t count = static_cast<size_t>(D);
  b.cu_query.resize(count + 1), b.source.resize(count), b.uniform.resize(count), b.logprob.resize(count);
  std::iota(b.cu_query.begin(), b.cu_query.end(), 0);
  std::iota(b.source.begin(), b.source.end(), int64_t{0});
}

std::tuple<Tensor, Tensor, Tensor> Decoder::steps(const Tensor& slots, int64_t most_steps, int64_t stop_at_rows) {
  STD_TORCH_CHECK(rows_.capacity > 0, "no rows are bound to the decoder");
  STD_TORCH_CHECK(slots.numel() > 0 && most_steps > 0 && stop_at_rows >= 0, "steps need at least one row and one step");
  Burst b{};
  const int64_t D = slots.numel();
  gather(b, int64_row(slots, "slots"), D, most_steps);
  std::vector<int64_t> tokens(static_cast<size_t>(D * most_steps));  // [steps, D]
  std::vector<float> logprobs(tokens.size());
  std::vector<double> seconds;  // [steps, 2]
  int64_t done = 0;
  const Stopwatch all;
  while (done < most_steps && (done == 0 || (b.size() > stop_at_rows && all.seconds() < kPatienceSeconds))) {
    const Stopwatch model;
    Step step{};
    step.T = step.R = b.size();
    step.token_ids = b.newest.data();
    step.cos = rows_.cos, step.sin = rows_.sin;
    step.layout = {b.cu_query.data(),      b.context_lens.data(), b.tables.data(), b.share_group.data(),
                   b.shared_blocks.data(), b.size(),              b.columns};
    char* hidden = hidden_.get(b.size() * E_ * item_);
    run(step, rows_.num_angles, hidden);
    const double model_seconds = model.seconds();

    const Stopwatch drawing;
    for (size_t d = 0; d < b.rows.size(); d++) {
      const Burst::Row& row = b.rows[d];
      b.uniform[d] = keyed_uniform(row.seed, row.prompt_id, static_cast<uint32_t>(row.sample_index),
                                   static_cast<uint32_t>(row.num_output));
    }
    const double head_seconds =
        draw({hidden, b.source.data(), b.size(), b.uniform.data(), b.temperature.data(), b.newest.data(), b.logprob.data()});
    seconds.insert(seconds.end(), {model_seconds + head_seconds, drawing.seconds() - head_seconds});
    size_t kept = 0;
    for (size_t d = 0; d < b.rows.size(); d++) {
      Burst::Row& row = b.rows[d];
      const size_t at = static_cast<size_t>(done * D + row.place);
      tokens[at] = b.newest[d], logprobs[at] = b.logprob[d];
      row.num_output++, b.context_lens[d]++;
      const int64_t* ids = rows_.end_ids + row.end_set * rows_.ids_per_set;
      const bool is_over = row.num_output >= row.max_output ||
                           std::find(ids, ids + rows_.ids_per_set, b.newest[d]) != ids + rows_.ids_per_set;
      if (!is_over) b.move_row(d, kept++);
    }
    b.rows.resize(kept);
    done++;
  }

  Tensor token = empty({D * done}, ScalarType::Long), logprob = empty({D * done}, ScalarType::Float);
  Tensor spent = empty({done, 2}, ScalarType::Double);
  auto* token_out = static_cast<int64_t*>(token.mutable_data_ptr());
  auto* logprob_out = static_cast<float*>(logprob.mutable_data_ptr());
  for (int64_t d = 0; d < D; d++)
    for (int64_t i = 0; i < done; i++) {
      token_out[d * done + i] = tokens[static_cast<size_t>(i * D + d)];
      logprob_out[d * done + i] = logprobs[static_cast<size_t>(i * D + d)];
    }
  std::copy(seconds.begin(), seconds.end(), static_cast<double*>(spent.mutable_data_ptr()));
  return {token, logprob, spent};
}

}  // namespace sagc
