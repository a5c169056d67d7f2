// torch.ops.sagc_fast.{varlen_attention, varlen_attention_backward}: checks, parts, scratch, and the sum over parts.
#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <tuple>
#include <vector>

#include "threads.h"
#include "torch_util.h"

namespace sagc {
namespace {

// Groups of spans: the first of a group is its prompt, the others its completions.
struct Packed {
  std::vector<Span> spans;
  std::vector<int64_t> groups;  // [groups + 1], first span of each
  int64_t covered = 0;          // rows
  double pairs = 0;             // of a query with a key it sees
};

Packed read_packed(const Tensor& spans, const Tensor& groups, int64_t num_rows) {
  check_type(spans, ScalarType::Long, "spans", "int64");
  check_type(groups, ScalarType::Long, "groups", "int64");
  STD_TORCH_CHECK(spans.dim() == 2 && spans.size(1) == 2 && groups.dim() == 1 && groups.size(0) >= 1,
                  "varlen_attention needs spans [spans, 2] and groups [groups + 1]");
  check_contiguous(spans, "spans");
  check_contiguous(groups, "groups");
  Packed packed;
  const int64_t* s = static_cast<const int64_t*>(spans.const_data_ptr());
  const int64_t* g = static_cast<const int64_t*>(groups.const_data_ptr());
  packed.groups.assign(g, g + groups.size(0));
  std::vector<bool> taken(static_cast<size_t>(num_rows), false);
  for (int64_t i = 0; i < spans.size(0); i++) {
    const Span span{s[2 * i], s[2 * i + 1]};
    STD_TORCH_CHECK(span.start >= 0 && span.length >= 0 && span.start + span.length <= num_rows, "span ", i, " (start ", span.start,
                    ", length ", span.length, ") is outside the ", num_rows, " rows");
    for (int64_t row = span.start; row < span.start + span.length; row++) {
      STD_TORCH_CHECK(!taken[static_cast<size_t>(row)], "row ", row, " is in two spans");
      taken[static_cast<size_t>(row)] = true;
    }
    packed.spans.push_back(span);
    packed.covered += span.length;
  }
  const int64_t count = static_cast<int64_t>(packed.spans.size());
  STD_TORCH_CHECK(packed.groups.front() == 0 && packed.groups.back() == count, "groups must begin with 0 and end with the spans");
  for (size_t i = 0; i + 1 < packed.groups.size(); i++) {
    STD_TORCH_CHECK(packed.groups[i] < packed.groups[i + 1], "group ", i, " has no prompt span");
    const double prompt = static_cast<double>(packed.spans[static_cast<size_t>(packed.groups[i])].length);
    packed.pairs += prompt * (prompt + 1) / 2;
    for (int64_t c = packed.groups[i] + 1; c < packed.groups[i + 1]; c++) {
      const double own = static_cast<double>(packed.spans[static_cast<size_t>(c)].length);
      packed.pairs += own * (prompt + (own + 1) / 2);
    }
  }
  return packed;
}

// The parts of a call. How a group is cut depends on its lengths alone, so that sums over parts repeat to the bit.
struct Parts {
  std::vector<VarlenPart> parts;
  struct Divided {  // a group of several parts: their shares of the prompt's gradients follow each other from `first` on
    Span prompt;
    size_t first_part, num_parts;
  };
  std::vector<Divided> divided;
};

Parts make_parts(const Packed& packed) {
  Parts result;
  for (size_t g = 0; g + 1 < packed.groups.size(); g++) {
    const Span* spans = packed.spans.data() + packed.groups[g];
    const Span prompt = spans[0];
    const int64_t count = packed.groups[g + 1] - packed.groups[g] - 1;
    const size_t first = result.parts.size();
    int64_t begin = 0;
    for (; prompt.length - begin > kVarlenPartRows; begin += kVarlenPartRows)
      result.parts.push_back({{prompt.start, begin + kVarlenPartRows}, begin, begin + kVarlenPartRows, nullptr, 0, nullptr});
    VarlenPart part{prompt, begin, prompt.length, spans + 1, 0, nullptr};
    int64_t rows = prompt.length - begin;
    for (int64_t c = 0; c < count; c++) {
      if (rows > 0 && rows + spans[1 + c].length > kVarlenPartRows) {
        result.parts.push_back(part);
        part = {prompt, prompt.length, prompt.length, spans + 1 + c, 0, nullptr};
        rows = 0;
      }
      part.num_completions++;
      rows += spans[1 + c].length;
    }
    result.parts.push_back(part);
    if (result.parts.size() - first > 1) result.divided.push_back({prompt, first, result.parts.size() - first});
  }
  return result;
}

// Aligned memory for each worker's items, taken when the worker first comes.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : bytes_(static_cast<size_t>(floats) * sizeof(float)), memory_(static_cast<size_t>(num_workers())) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    for (void* p : memory_) ::operator delete(p, kLine);
  }
  float* of(int worker) {
    void*& p = memory_[static_cast<size_t>(worker)];
    if (p == nullptr) p = ::operator new(bytes_, kLine);
    return static_cast<float*>(p);
  }

 private:
  static constexpr std::align_val_t kLine{64};
  size_t bytes_;
  std::vector<void*> memory_;
};

int64_t scratch_floats(const VarlenArgs& args, const Parts& parts, bool backward) {
  int64_t most = 0;
  for (const VarlenPart& part : parts.parts) {
    int64_t longest = 0;
    for (int64_t c = 0; c < part.num_completions; c++) longest = std::max(longest, part.completions[c].length);
    most = std::max(most, kernels().training.varlen_scratch(args.head_dim, part.prompt.length, longest, backward));
  }
  return most;
}

VarlenArgs read_qkv(const Tensor& q, const Tensor& k, const Tensor& v, double scale) {
  check_heads(q, "q");
  check_heads(k, "k");
  check_heads(v, "v");
  VarlenArgs args{};
  args.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(dtype_of(k, "k") == args.dtype && dtype_of(v, "v") == args.dtype, "q, k and v differ in dtype");
  args.num_heads = q.size(1), args.num_kv_heads = k.size(1), args.head_dim = q.size(2);
  STD_TORCH_CHECK(k.size(0) == q.size(0) && v.size(0) == q.size(0) && v.size(1) == k.size(1) && k.size(2) == q.size(2) &&
                      v.size(2) == q.size(2),
                  "q, k and v must have the same tokens and the same head width");
  STD_TORCH_CHECK(args.num_kv_heads > 0 && args.num_heads % args.num_kv_heads == 0,
                  "the number of query heads must be a multiple of the number of KV heads");
  args.q = q.const_data_ptr(), args.k = k.const_data_ptr(), args.v = v.const_data_ptr();
  args.q_stride = q.stride(0), args.k_stride = k.stride(0), args.v_stride = v.stride(0);
  args.scale = static_cast<float>(scale);
  return args;
}

Tensor new_heads(int64_t T, int64_t heads, int64_t D, ScalarType type, bool has_gaps) {
  Tensor t = empty({T, heads, D}, type);
  if (has_gaps) torch::stable::zero_(t);
  return t;
}

std::tuple<Tensor, Tensor> varlen_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& spans,
                                            const Tensor& groups, double scale) {
  VarlenArgs args = read_qkv(q, k, v, scale);
  const int64_t T = q.size(0);
  const Packed packed = read_packed(spans, groups, T);
  const Parts parts = make_parts(packed);
  const bool has_gaps = packed.covered != T;
  Tensor out = new_heads(T, args.num_heads, args.head_dim, q.scalar_type(), has_gaps);
  Tensor lse = empty({T, args.num_heads}, ScalarType::Float);
  if (has_gaps) torch::stable::zero_(lse);
  args.out = out.mutable_data_ptr(), args.lse = static_cast<float*>(lse.mutable_data_ptr());
  args.parts = parts.parts.data();
  Scratch scratch(scratch_floats(args, parts, false));
  parallel_workers(static_cast<int64_t>(parts.parts.size()) * args.num_kv_heads,
                   4.0 * packed.pairs * static_cast<double>(args.num_heads * args.head_dim),
                   [&](int worker, int64_t begin, int64_t end) { kernels().training.varlen(args, scratch.of(worker), begin, end); });
  return {out, lse};
}

bf16_t to_bf16(float x) {  // round to nearest even; NaN becomes quiet
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  u = x != x ? u | 0x00400000u : u + 0x7fffu + ((u >> 16) & 1u);
  return {static_cast<uint16_t>(u >> 16)};
}

// The gradients of a divided group's prompt: its parts' shares, added in their order.
template <class T, class Narrow>
void add_shares(const VarlenArgs& args, const Parts& parts, Narrow narrow) {
  const int64_t D = args.head_dim, K = args.num_kv_heads;
  for (const Parts::Divided& group : parts.divided)
    for (int64_t j = 0; j < group.prompt.length; j++)
      for (int64_t head = 0; head < K; head++)
        for (int64_t d = 0; d < D; d++) {
          float sums[2] = {0.0f, 0.0f};
          for (size_t p = group.first_part; p < group.first_part + group.num_parts; p++) {
            const VarlenPart& part = parts.parts[p];
            if (j >= part.prompt.length) continue;
            const float* share = part.prompt_grad + (j * K + head) * 2 * D + d;
            sums[0] += share[0], sums[1] += share[D];
          }
          const int64_t at = ((group.prompt.start + j) * K + head) * D + d;
          static_cast<T*>(args.grad_k)[at] = narrow(sums[0]), static_cast<T*>(args.grad_v)[at] = narrow(sums[1]);
        }
}

std::tuple<Tensor, Tensor, Tensor> varlen_attention_backward(const Tensor& grad_out, const Tensor& q, const Tensor& k,
                                                             const Tensor& v, const Tensor& out, const Tensor& lse,
                                                             const Tensor& spans, const Tensor& groups, double scale) {
  VarlenArgs args = read_qkv(q, k, v, scale);
  const int64_t T = q.size(0), H = args.num_heads, K = args.num_kv_heads, D = args.head_dim;
  for (const Tensor* t : {&grad_out, &out}) {
    check_contiguous(*t, "out and its gradient");
    STD_TORCH_CHECK(t->dim() == 3 && t->size(0) == T && t->size(1) == H && t->size(2) == D && t->scalar_type() == q.scalar_type(),
                    "out and its gradient must have the shape and dtype of q");
  }
  check_type(lse, ScalarType::Float, "lse", "float32");
  check_contiguous(lse, "lse");
  STD_TORCH_CHECK(lse.dim() == 2 && lse.size(0) == T && lse.size(1) == H, "lse must be [tokens, query heads]");
  const Packed packed = read_packed(spans, groups, T);
  Parts parts = make_parts(packed);
  const bool has_gaps = packed.covered != T;
  Tensor grad_q = new_heads(T, H, D, q.scalar_type(), has_gaps);
  Tensor grad_k = new_heads(T, K, D, q.scalar_type(), has_gaps);
  Tensor grad_v = new_heads(T, K, D, q.scalar_type(), has_gaps);
  args.grad_out = grad_out.const_data_ptr(), args.out = const_cast<void*>(out.const_data_ptr());
  args.lse = const_cast<float*>(static_cast<const float*>(lse.const_data_ptr()));
  args.grad_q = grad_q.mutable_data_ptr(), args.grad_k = grad_k.mutable_data_ptr(), args.grad_v = grad_v.mutable_data_ptr();

  int64_t shared = 0;
  for (const Parts::Divided& group : parts.divided)
    for (size_t p = 0; p < group.num_parts; p++) shared += parts.parts[group.first_part + p].prompt.length * K * 2 * D;
  const std::unique_ptr<float[]> shares(new float[static_cast<size_t>(shared)]);
  float* at = shares.get();
  for (const Parts::Divided& group : parts.divided)
    for (size_t p = 0; p < group.num_parts; p++) {
      VarlenPart& part = parts.parts[group.first_part + p];
      part.prompt_grad = at;
      at += part.prompt.length * K * 2 * D;
    }
  args.parts = parts.parts.data();
  Scratch scratch(scratch_floats(args, parts, true));
  parallel_workers(
      static_cast<int64_t>(parts.parts.size()) * K, 10.0 * packed.pairs * static_cast<double>(H * D),
      [&](int worker, int64_t begin, int64_t end) { kernels().training.varlen_backward(args, scratch.of(worker), begin, end); });
  if (args.dtype == Dtype::kFloat32)
    add_shares<float>(args, parts, [](float x) { return x; });
  else
    add_shares<bf16_t>(args, parts, to_bf16);
  return {grad_q, grad_k, grad_v};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def(
      "varlen_attention(Tensor q, Tensor k, Tensor v, Tensor spans, Tensor groups, float scale) -> (Tensor out, Tensor lse)");
  m.def(
      "varlen_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor spans, "
      "Tensor groups, float scale) -> (Tensor, Tensor, Tensor)");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) {
  m.impl("varlen_attention", TORCH_BOX(&varlen_attention));
  m.impl("varlen_attention_backward", TORCH_BOX(&varlen_attention_backward));
}

}  // namespace sagc
