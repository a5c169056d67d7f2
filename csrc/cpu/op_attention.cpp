// torch.ops.sagc_fast.paged_attention
#include "attention_run.h"
#include "operations.h"
#include "torch_util.h"

namespace sagc {
namespace {

const int32_t* int_row(const Tensor& t, int64_t size, const char* name) {
  check_type(t, ScalarType::Int, name, "int32");
  check_contiguous(t, name);
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size, name, " must have ", size, " entries");
  return static_cast<const int32_t*>(t.const_data_ptr());
}

void check_layout(const AttentionLayout& l, int64_t num_tokens, int64_t num_blocks, int64_t block_size) {
  STD_TORCH_CHECK(l.cu_query[0] == 0 && l.cu_query[l.num_sequences] == num_tokens,
                  "cu_query must run from 0 to the number of query tokens");
  for (int64_t s = 0; s < l.num_sequences; s++) {
    const int64_t queries = l.cu_query[s + 1] - l.cu_query[s], context = l.context_lens[s];
    STD_TORCH_CHECK(queries >= 0 && queries <= context, "sequence ", s, " has ", queries, " query tokens but ", context,
                    " positions of context");
    const int64_t blocks = (context + block_size - 1) / block_size;
    STD_TORCH_CHECK(blocks <= l.blocks_per_sequence, "sequence ", s, " needs ", blocks, " blocks but its table has ",
                    l.blocks_per_sequence);
    const int32_t* table = l.block_tables + s * l.blocks_per_sequence;
    for (int64_t b = 0; b < blocks; b++)
      STD_TORCH_CHECK(table[b] >= 0 && table[b] < num_blocks, "sequence ", s, " names block ", table[b], " of ", num_blocks);
  }
}

}  // namespace

AttentionLayout read_layout(const Tensor& cu_query, const Tensor& context_lens, const Tensor& block_tables,
                            const Tensor& share_group, const Tensor& shared_blocks, int64_t num_tokens, int64_t num_blocks,
                            int64_t block_size) {
  STD_TORCH_CHECK(cu_query.dim() == 1 && cu_query.size(0) >= 1, "cu_query must have one entry more than there are sequences");
  const int64_t S = cu_query.size(0) - 1;
  check_type(block_tables, ScalarType::Int, "block_tables", "int32");
  check_contiguous(block_tables, "block_tables");
  STD_TORCH_CHECK(block_tables.dim() == 2 && block_tables.size(0) == S, "block_tables must have one row per sequence");
  const AttentionLayout layout{int_row(cu_query, S + 1, "cu_query"),
                               int_row(context_lens, S, "context_lens"),
                               static_cast<const int32_t*>(block_tables.const_data_ptr()),
                               int_row(share_group, S, "share_group"),
                               int_row(shared_blocks, S, "shared_blocks"),
                               S,
                               block_tables.size(1)};
  check_layout(layout, num_tokens, num_blocks, block_size);
  return layout;
}

namespace {

Tensor paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& cu_query,
                       const Tensor& context_lens, const Tensor& block_tables, const Tensor& share_group,
                       const Tensor& shared_blocks, double scale) {
  check_heads(q, "q");
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.size(3) == q.size(2),
                  "the KV cache must be [blocks, KV heads, block size, head width] with the head width of q");
  for (int64_t d = 0; d < 4; d++) STD_TORCH_CHECK(k_cache.size(d) == v_cache.size(d), "k_cache and v_cache differ in shape");
  check_contiguous(k_cache, "k_cache");
  check_contiguous(v_cache, "v_cache");
  AttentionArgs args{};
  args.dtype = dtype_of(q, "q"), args.cache_dtype = cache_dtype_of(k_cache, "k_cache");
  STD_TORCH_CHECK(cache_dtype_of(v_cache, "v_cache") == args.cache_dtype, "k_cache and v_cache differ in dtype");
  args.num_heads = q.size(1), args.num_kv_heads = k_cache.size(1), args.head_dim = q.size(2), args.block_size = k_cache.size(2);
  STD_TORCH_CHECK(args.num_kv_heads > 0 && args.num_heads % args.num_kv_heads == 0,
                  "the number of query heads must be a multiple of the number of KV heads");
  STD_TORCH_CHECK(args.head_dim > 0 && args.head_dim <= kAttentionMaxHeadDim, "head width must be at most ", kAttentionMaxHeadDim);
  const int64_t T = q.size(0);
  const AttentionLayout layout = read_layout(cu_query, context_lens, block_tables, share_group, shared_blocks, T,
                                             k_cache.size(0), args.block_size);

  Tensor out = empty({T, args.num_heads, args.head_dim}, q.scalar_type());
  const AttentionPlan plan = plan_attention(layout, {args.num_heads, args.num_kv_heads, args.head_dim, args.block_size},
                                            num_workers());
  args.q = q.const_data_ptr(), args.q_stride = q.stride(0);
  args.k_cache = k_cache.const_data_ptr(), args.v_cache = v_cache.const_data_ptr();
  args.out = out.mutable_data_ptr();
  args.block_tables = layout.block_tables, args.block_tables_stride = layout.blocks_per_sequence;
  args.scale = static_cast<float>(scale);
  run_attention(args, plan);
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(sagc_fast, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cu_query, Tensor context_lens, "
      "Tensor block_tables, Tensor share_group, Tensor shared_blocks, float scale) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL(sagc_fast, CPU, m) { m.impl("paged_attention", TORCH_BOX(&paged_attention)); }

}  // namespace sagc
