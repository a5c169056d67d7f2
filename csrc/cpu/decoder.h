// A decoder: the weights and the KV cache of one generate call, and what runs over them. See decoder.cpp.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "torch_util.h"

namespace sagc {

constexpr int64_t kSliceRows = 256;
constexpr int64_t kHugePages = int64_t{4} << 20;  // from here on a mapping takes them: a fault per 2 MB instead of 512

// Memory that grows to the largest size asked for and goes back to the system with the handle.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { release(); }

  char* get(int64_t bytes) {
    if (bytes > size_) {
      release();
      const int64_t size = (bytes + bytes / 4 + 4095) / 4096 * 4096;
      void* p = mmap(nullptr, static_cast<size_t>(size), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      STD_TORCH_CHECK(p != MAP_FAILED, "The system has no ", size, " bytes for the scratch memory of a step");
      if (size >= kHugePages) madvise(p, static_cast<size_t>(size), MADV_HUGEPAGE);
      data_ = static_cast<char*>(p), size_ = size;
    }
    return data_;
  }
  template <class T>
  T* array(int64_t count) {
    return reinterpret_cast<T*>(get(count * int64_t{sizeof(T)}));
  }

 private:
  void release() {
    if (data_ != nullptr) munmap(data_, static_cast<size_t>(size_));
    data_ = nullptr, size_ = 0;
  }
  char* data_ = nullptr;
  int64_t size_ = 0;
};

struct Matrix {
  const void* weight = nullptr;  // [rows, columns]
  const void* bias = nullptr;    // [rows] or null
  int64_t rows = 0, columns = 0;
  const void* packed = nullptr;  // the weight in the layout of packed_for_, where that has one for it
};

struct Layer {
  const void *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm and k_norm may be null
  Matrix qkv, o, gate_up, down;
  void *k_cache, *v_cache;
};

class Decoder {
 public:
  Decoder(std::vector<Tensor> weights, std::vector<Tensor> caches, int64_t num_heads, double eps);
  // The arrays of the row table that the steps of decode rows read, and the tables of angles; see op_decoder.cpp.
  void bind(std::vector<Tensor> rows, Tensor cos, Tensor sin);
  // At most `most_steps` decode steps of the bound rows `slots`, without those that are over, up to the first step after which no
  // more than `stop_at_rows` of them go on, and no further once a quarter of a second has passed: tokens and log-probabilities,
  // those of a row side by side, and of each step the seconds in the model and in the draw [steps, 2].
  std::tuple<Tensor, Tensor, Tensor> steps(const Tensor& slots, int64_t most_steps, int64_t stop_at_rows);
  Tensor forward(const Tensor& token_ids, const Tensor& cos, const Tensor& sin, const Tensor& cu_query,
                 const Tensor& context_lens, const Tensor& block_tables, const Tensor& share_group,
                 const Tensor& shared_blocks, const Tensor& wanted);
  // The last value: seconds in the language-model head.
  std::tuple<Tensor, Tensor, double> sample(const Tensor& hidden, const Tensor& index, const Tensor& uniform,
                                            const Tensor& temperature);

 private:
  struct Step {
    int64_t T, R;
    const int64_t *token_ids, *wanted;  // wanted: null for all in order
    const float *cos, *sin;
    AttentionLayout layout;
    AttentionPlan plan;
  };

  struct Draw {
    const char* hidden;     // [U, E]
    const int64_t* source;  // [R] rows of hidden, not falling
    int64_t R;
    const double* uniform;
    const float* temperature;
    int64_t* token;
    float* logprob;
  };

  // Of one slot each; the row table of a call, see op_decoder.cpp.
  struct Rows {
    const int64_t *last_token, *num_computed, *num_output, *max_output, *end_set;
    const int64_t *seed, *prompt_id, *sample_index;  // bits of unsigned numbers
    const float* temperature;
    const int32_t *block_tables, *group_index, *shared_blocks;
    const int64_t* end_ids;  // [sets, ids]
    const float *cos, *sin;
    int64_t capacity, columns, num_sets, ids_per_set, num_angles;
  };

  // What the steps of one call of `steps` keep between them.
  struct Burst;

  void pack_weights();
  void run(Step& step, int64_t num_angles, char* hidden);
  double draw(const Draw& d);  // returns the seconds in the language-model head
  void gather(Burst& b, const int64_t* slots, int64_t D, int64_t most_steps) const;
  void check_angles(const Tensor& cos, const Tensor& sin) const;
  void place_tokens(const Step& step, int64_t num_angles);
  void embed(const Step& step);
  void project_and_cache(const Layer& layer, const Step& step, int64_t begin, int64_t rows);
  void attend(const Layer& layer, const Step& step);
  void pick_wanted(const Step& step);
  void feed_forward(const Layer& layer, const void* next_norm, int64_t begin, int64_t rows, void* out);
  LinearArgs product(const Matrix& m) const;
  void multiply(const Matrix& m, const void* x, void* y, int64_t rows);
  void norm(const void* x, const void* weight, void* y, void* residual, int64_t rows) const;

  char* row(Scratch& scratch, int64_t t, int64_t width) const { return scratch.get(0) + t * width * item_; }
  template <class F>
  static void for_slices(int64_t rows, const F& f) {
    for (int64_t begin = 0; begin < rows; begin += kSliceRows) f(begin, std::min(kSliceRows, rows - begin));
  }

  std::vector<Tensor> kept_, bound_;
  Dtype dtype_, cache_dtype_;
  int64_t item_;  // bytes per element of weights and activations
  int64_t E_, H_, K_, D_, F_, V_, num_blocks_, block_size_;
  float eps_;
  const char* embedding_;
  const void* final_norm_;
  Matrix head_;
  std::vector<Layer> layers_;

  Scratch positions_, slots_;               // [T] int64
  Scratch residual_, x_, q_, attended_;     // [T, E], [T, E], [T, H D], [T, H D]
  Scratch qkv_, delta_, normed_, gate_up_, active_;  // of a slice of rows; the logits of some rows lie in gate_up_
  Scratch converted_, hidden_;
  Scratch packed_weights_;
  const KernelTable* packed_for_ = nullptr;
  Rows rows_{};  // capacity 0: none are bound
};

const int64_t* int64_row(const Tensor& t, const char* name);
void check_range(const int64_t* values, int64_t count, int64_t limit, const char* name);

}  // namespace sagc
