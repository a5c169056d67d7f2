// An engine step without a tensor or a call per operation.
//
// A decoder is a handle on the weights and the KV cache of one generate call. It holds references to their tensors, so that
// memory cannot go away under it. Weights that multiply faster in another layout are laid out when it is made, hence once
// per call, whatever the optimizer did before. Each operation is the kernel that the operator of the same name runs, over
// the same values, so the bits are those of the path operator by operator.
//
// Scratch memory belongs to the handle. All that is kept for the whole step is the residual stream, the normalised input of
// the next product, q and the attention's output; products work on slices of rows, whose intermediates stay in the L2 cache
// and bound the scratch for long prefill chunks. Logits are made for as many rows at a time as kLogitsBytes holds.
#include "decoder.h"

#include <cmath>
#include <cstring>

#include "attention_run.h"
#include "linear_run.h"
#include "operations.h"
#include "threads.h"

namespace sagc {
namespace {

// Takes the weights off the list that Python passes, an empty tensor standing for one that the model does not have.
class WeightReader {
 public:
  WeightReader(const std::vector<Tensor>& tensors, Dtype dtype) : tensors_(tensors), dtype_(dtype) {}

  const void* vector(int64_t size) {
    const Tensor& t = next();
    if (t.numel() == 0) return nullptr;
    STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size, "weight ", place_ - 1, " of the decoder must have ", size, " entries");
    return t.const_data_ptr();
  }
  const void* needed(int64_t size) {
    const void* p = vector(size);
    STD_TORCH_CHECK(p != nullptr, "weight ", place_ - 1, " of the decoder is missing");
    return p;
  }
  // Its number of rows is free where `rows` is 0.
  Matrix matrix(int64_t rows, int64_t columns) {
    const Tensor& t = next();
    STD_TORCH_CHECK(t.dim() == 2 && t.size(1) == columns && (rows == 0 || t.size(0) == rows), "weight ", place_ - 1,
                    " of the decoder has the wrong shape");
    return {t.const_data_ptr(), nullptr, t.size(0), columns};
  }
  Matrix matrix_with_bias(int64_t rows, int64_t columns) {
    Matrix m = matrix(rows, columns);
    m.bias = vector(m.rows);
    return m;
  }

 private:
  const Tensor& next() {
    STD_TORCH_CHECK(place_ < tensors_.size(), "the decoder needs more weights than the ", tensors_.size(), " given");
    const Tensor& t = tensors_[place_++];
    if (t.numel() > 0) {
      STD_TORCH_CHECK(dtype_of(t, "weight") == dtype_, "weight ", place_ - 1, " of the decoder has another dtype than the first");
      STD_TORCH_CHECK(t.is_contiguous(), "weight ", place_ - 1, " of the decoder must be contiguous");
    }
    return t;
  }
  const std::vector<Tensor>& tensors_;
  Dtype dtype_;
  size_t place_ = 0;
};

}  // namespace

Decoder::Decoder(std::vector<Tensor> weights, std::vector<Tensor> caches, int64_t num_heads, double eps)
    : H_(num_heads), eps_(static_cast<float>(eps)) {
  STD_TORCH_CHECK(weights.size() > 3 && (weights.size() - 3) % 12 == 0 && caches.size() == (weights.size() - 3) / 6,
                  "the decoder needs 3 weights, 12 per layer and 2 caches per layer, not ", weights.size(), " and ", caches.size());
  const Tensor &embedding = weights[0], &cache = caches[0];
  dtype_ = dtype_of(embedding, "the embedding"), cache_dtype_ = cache_dtype_of(cache, "the KV cache");
  item_ = dtype_ == Dtype::kFloat32 ? 4 : 2;
  STD_TORCH_CHECK(embedding.dim() == 2 && cache.dim() == 4, "the embedding must be [V, E], a cache [blocks, K, block size, D]");
  V_ = embedding.size(0), E_ = embedding.size(1);
  num_blocks_ = cache.size(0), K_ = cache.size(1), block_size_ = cache.size(2), D_ = cache.size(3);
  STD_TORCH_CHECK(K_ > 0 && H_ > 0 && H_ % K_ == 0, "the number of query heads must be a multiple of the number of KV heads");
  STD_TORCH_CHECK(D_ > 0 && D_ % 2 == 0 && D_ <= kAttentionMaxHeadDim, "head width must be even and at most ", kAttentionMaxHeadDim);

  WeightReader reader(weights, dtype_);
  embedding_ = static_cast<const char*>(reader.matrix(V_, E_).weight);
  final_norm_ = reader.needed(E_);
  head_ = reader.matrix(V_, E_);
  for (size_t i = 0; i < caches.size() / 2; i++) {
    Layer layer{};
    layer.input_norm = reader.needed(E_);
    layer.qkv = reader.matrix_with_bias((H_ + 2 * K_) * D_, E_);
    layer.q_norm = reader.vector(D_), layer.k_norm = reader.vector(D_);
    layer.o = reader.matrix_with_bias(E_, H_ * D_);
    layer.post_norm = reader.needed(E_);
    layer.gate_up = reader.matrix_with_bias(0, E_);
    F_ = layer.gate_up.rows / 2;
    layer.down = reader.matrix_with_bias(E_, F_);
    for (int j = 0; j < 2; j++) {
      const Tensor& t = caches[2 * i + j];
      STD_TORCH_CHECK(t.dim() == 4 && t.size(0) == num_blocks_ && t.size(1) == K_ && t.size(2) == block_size_ && t.size(3) == D_ &&
                          t.is_contiguous() && cache_dtype_of(t, "the KV cache") == cache_dtype_,
                      "all KV caches must be contiguous and of one shape and dtype");
    }
    layer.k_cache = caches[2 * i].mutable_data_ptr(), layer.v_cache = caches[2 * i + 1].mutable_data_ptr();
    layers_.push_back(layer);
  }
  kept_ = std::move(weights);
  kept_.insert(kept_.end(), caches.begin(), caches.end());
  pack_weights();
}

// Once for all steps of the call: the layouts that the kernels prefer.
void Decoder::pack_weights() {
  constexpr int64_t kLine = 64;
  packed_for_ = &kernels();
  std::vector<Matrix*> matrices{&head_};
  for (Layer& layer : layers_) matrices.insert(matrices.end(), {&layer.qkv, &layer.o, &layer.gate_up, &layer.down});
  std::vector<int64_t> begins;
  int64_t bytes = 0;
  for (const Matrix* m : matrices) {
    begins.push_back(bytes);
    bytes += (packed_for_->linear_packed_bytes(product(*m)) + kLine - 1) / kLine * kLine;
  }
  if (bytes == 0) return;
  char* packed = packed_weights_.get(bytes);
  begins.push_back(bytes);
  const int64_t count = static_cast<int64_t>(matrices.size());
  parallel(count, static_cast<double>(bytes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      if (begins[i] == begins[i + 1]) continue;
      packed_for_->linear_pack_weight(product(*matrices[i]), packed + begins[i]);
      matrices[i]->packed = packed + begins[i];
    }
  });
}

const int64_t* int64_row(const Tensor& t, const char* name) {
  check_type(t, ScalarType::Long, name, "int64");
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.dim() == 1, name, " must have one dimension");
  return static_cast<const int64_t*>(t.const_data_ptr());
}

void check_range(const int64_t* values, int64_t count, int64_t limit, const char* name) {
  for (int64_t i = 0; i < count; i++)
    STD_TORCH_CHECK(values[i] >= 0 && values[i] < limit, name, " ", i, " is ", values[i], ", outside [0, ", limit, ")");
}

void Decoder::check_angles(const Tensor& cos, const Tensor& sin) const {
  check_type(cos, ScalarType::Float, "cos", "float32");
  check_type(sin, ScalarType::Float, "sin", "float32");
  STD_TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.dim() == 2 && sin.dim() == 2 && cos.size(1) == D_ / 2 &&
                      sin.size(1) == D_ / 2 && sin.size(0) == cos.size(0),
                  "cos and sin must be contiguous [positions, head width / 2]");
}

Tensor Decoder::forward(const Tensor& token_ids, const Tensor& cos, const Tensor& sin, const Tensor& cu_query,
                        const Tensor& context_lens, const Tensor& block_tables, const Tensor& share_group,
                        const Tensor& shared_blocks, const Tensor& wanted) {
  Step step{};
  step.T = token_ids.numel(), step.R = wanted.numel();
  step.token_ids = int64_row(token_ids, "token_ids"), step.wanted = int64_row(wanted, "logits_rows");
  check_range(step.token_ids, step.T, V_, "token id");
  check_range(step.wanted, step.R, step.T, "wanted row");
  check_angles(cos, sin);
  step.cos = static_cast<const float*>(cos.const_data_ptr()), step.sin = static_cast<const float*>(sin.const_data_ptr());
  step.layout = read_layout(cu_query, context_lens, block_tables, share_group, shared_blocks, step.T, num_blocks_, block_size_);
  Tensor hidden = empty({step.R, E_}, dtype_ == Dtype::kFloat32 ? ScalarType::Float : ScalarType::BFloat16);
  if (step.T > 0) run(step, cos.size(0), static_cast<char*>(hidden.mutable_data_ptr()));
  return hidden;
}

// Everything in the step but its plan is set and checked; the hidden states of its wanted rows go to `hidden`.
void Decoder::run(Step& step, int64_t num_angles, char* hidden) {
  place_tokens(step, num_angles);
  residual_.get(step.T * E_ * item_), x_.get(step.T * E_ * item_);
  q_.get(step.T * H_ * D_ * item_), attended_.get(step.T * H_ * D_ * item_);
  step.plan = plan_attention(step.layout, {H_, K_, D_, block_size_}, num_workers());
  embed(step);
  for (size_t i = 0; i < layers_.size(); i++) {
    const Layer& layer = layers_[i];
    const bool is_last = i + 1 == layers_.size();
    for_slices(step.T, [&](int64_t begin, int64_t rows) { project_and_cache(layer, step, begin, rows); });
    if (is_last && step.R == 0) break;  // a prefill chunk short of the prompt's end: the keys and values were all
    attend(layer, step);
    if (is_last && step.wanted != nullptr) pick_wanted(step);
    const void* next_norm = is_last ? final_norm_ : layers_[i + 1].input_norm;
    char* out = is_last ? hidden : x_.get(0);
    for_slices(is_last ? step.R : step.T, [&](int64_t begin, int64_t rows) {
      feed_forward(layer, next_norm, begin, rows, out + begin * E_ * item_);
    });
  }
}

void Decoder::place_tokens(const Step& step, int64_t num_angles) {
  const AttentionLayout& l = step.layout;
  int64_t *positions = positions_.array<int64_t>(step.T), *slots = slots_.array<int64_t>(step.T);
  for (int64_t s = 0; s < l.num_sequences; s++) {
    const int32_t* table = l.block_tables + s * l.blocks_per_sequence;
    int64_t position = l.context_lens[s] - (l.cu_query[s + 1] - l.cu_query[s]);
    STD_TORCH_CHECK(l.context_lens[s] <= num_angles, "sequence ", s, " has ", l.context_lens[s], " positions, the tables of angles ",
                    num_angles);
    for (int64_t t = l.cu_query[s]; t < l.cu_query[s + 1]; t++, position++)
      positions[t] = position, slots[t] = table[position / block_size_] * block_size_ + position % block_size_;
  }
}

void Decoder::embed(const Step& step) {
  const int64_t bytes = E_ * item_;
  RmsNormArgs args{};
  args.x = residual_.get(0), args.weight = layers_[0].input_norm, args.y = x_.get(0);
  args.E = E_, args.eps = eps_, args.dtype = dtype_;
  char* residual = residual_.get(0);
  parallel(step.T, kFlopsPerElement * static_cast<double>(step.T * E_), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) std::memcpy(residual + t * bytes, embedding_ + step.token_ids[t] * bytes, bytes);
    kernels().rms_norm(args, begin, end);
  });
}

// q, k and v of a slice of rows: the product, the norms of the heads, the rotation, and the write into the cache.
void Decoder::project_and_cache(const Layer& layer, const Step& step, int64_t begin, int64_t rows) {
  const int64_t width = (H_ + 2 * K_) * D_;
  char* qkv = qkv_.get(rows * width * item_);
  multiply(layer.qkv, row(x_, begin, E_), qkv, rows);
  RopeArgs args{};
  args.q = qkv, args.k = qkv + H_ * D_ * item_, args.v = qkv + (H_ + K_) * D_ * item_;
  args.q_stride = args.k_stride = args.v_stride = width;
  args.cos = step.cos, args.sin = step.sin;
  args.positions = positions_.array<int64_t>(0) + begin, args.slots = slots_.array<int64_t>(0) + begin;
  args.q_out = row(q_, begin, H_ * D_), args.k_cache = layer.k_cache, args.v_cache = layer.v_cache;
  args.num_heads = H_, args.num_kv_heads = K_, args.head_dim = D_, args.block_size = block_size_;
  args.dtype = dtype_, args.cache_dtype = cache_dtype_;
  parallel(rows, kFlopsPerElement * static_cast<double>(rows * width), [&](int64_t b, int64_t e) {
    if (layer.q_norm != nullptr)
      for (int64_t t = b; t < e; t++)
        for (const bool is_key : {false, true}) {
          RmsNormArgs head{};  // in place: a row is read before it is written, element by element
          head.x = head.y = qkv + (t * width + (is_key ? H_ * D_ : 0)) * item_;
          head.weight = is_key ? layer.k_norm : layer.q_norm;
          head.E = D_, head.eps = eps_, head.dtype = dtype_;
          kernels().rms_norm(head, 0, is_key ? K_ : H_);
        }
    kernels().rope_and_cache(args, b, e);
  });
}

void Decoder::attend(const Layer& layer, const Step& step) {
  AttentionArgs args{};
  args.q = q_.get(0), args.q_stride = H_ * D_, args.out = attended_.get(0);
  args.k_cache = layer.k_cache, args.v_cache = layer.v_cache;
  args.block_tables = step.layout.block_tables, args.block_tables_stride = step.layout.blocks_per_sequence;
  args.num_heads = H_, args.num_kv_heads = K_, args.head_dim = D_, args.block_size = block_size_;
  args.scale = static_cast<float>(std::pow(static_cast<double>(D_), -0.5));
  args.dtype = dtype_, args.cache_dtype = cache_dtype_;
  run_attention(args, step.plan);
}

// Behind the last attention only the wanted rows matter; they move to the front, in any order and with repeats.
void Decoder::pick_wanted(const Step& step) {
  for (const auto& [scratch, width] : {std::pair<Scratch*, int64_t>{&attended_, H_ * D_}, std::pair<Scratch*, int64_t>{&residual_, E_}}) {
    const int64_t bytes = width * item_;
    const char* from = scratch->get(0);
    char* to = x_.get(std::max(step.R, step.T) * std::max(E_, H_ * D_) * item_);  // free until the next step
    for (int64_t r = 0; r < step.R; r++) std::memcpy(to + r * bytes, from + step.wanted[r] * bytes, bytes);
    std::memcpy(scratch->get(step.R * bytes), to, step.R * bytes);
  }
}

// From the attention's output to the normalised input of what follows, for a slice of rows.
void Decoder::feed_forward(const Layer& layer, const void* next_norm, int64_t begin, int64_t rows, void* out) {
  char *delta = delta_.get(rows * E_ * item_), *normed = normed_.get(rows * E_ * item_), *residual = row(residual_, begin, E_);
  char *gate_up = gate_up_.get(rows * 2 * F_ * item_), *active = active_.get(rows * F_ * item_);
  multiply(layer.o, row(attended_, begin, H_ * D_), delta, rows);
  norm(delta, layer.post_norm, normed, residual, rows);
  multiply(layer.gate_up, normed, gate_up, rows);
  run_silu_mul({gate_up, active, F_, dtype_}, rows);
  multiply(layer.down, active, delta, rows);
  norm(delta, next_norm, out, residual, rows);
}

LinearArgs Decoder::product(const Matrix& m) const {
  LinearArgs args{};
  args.weight = m.weight, args.bias = m.bias;
  args.x_stride = args.weight_stride = m.columns, args.y_stride = m.rows;
  args.N = m.rows, args.K = m.columns;
  args.x_dtype = args.weight_dtype = args.y_dtype = dtype_;
  return args;
}

void Decoder::multiply(const Matrix& m, const void* x, void* y, int64_t rows) {
  LinearArgs args = product(m);
  args.x = x, args.y = y, args.M = rows;
  args.packed_weight = &kernels() == packed_for_ ? m.packed : nullptr;  // the instruction set may have been changed since
  args.scratch = converted_.get(kernels().linear_scratch(args));
  run_linear(args);
}

// y = norm(residual + x), residual += x.
void Decoder::norm(const void* x, const void* weight, void* y, void* residual, int64_t rows) const {
  RmsNormArgs args{};
  args.x = x, args.weight = weight, args.y = y, args.residual = args.new_residual = residual;
  args.E = E_, args.eps = eps_, args.dtype = dtype_;
  run_rms_norm(args, rows);
}

}  // namespace sagc
