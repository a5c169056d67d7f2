"""After the draw of a decode step on the device: record it, end rows that are over, move the others on.

One thread per row; a handful of numbers each, so the launch is the cost and one launch is all there is.

Shape suffixes: R rows, S sets of ending ids, I ids of a set, K steps of the record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64


@triton.jit(
    do_not_specialize=["stride_ids", "stride_record", "stride_record_logprob", "num_rows", "num_steps", "num_ids"]
)
def advance_rows_kernel(
    drawn_ptr, logprob_ptr, token_ptr, position_ptr, index_ptr, max_output_ptr, live_ptr, end_set_ptr, step_ptr,
    end_ids_ptr, record_ptr, record_logprob_ptr, stride_ids, stride_record, stride_record_logprob, num_rows, num_steps,
    num_ids, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_in = rows < num_rows
    token = tl.load(drawn_ptr + rows, mask=is_in, other=0)
    logprob = tl.load(logprob_ptr + rows, mask=is_in, other=0.0)
    is_live = tl.load(live_ptr + rows, mask=is_in, other=0) > 0
    index = tl.load(index_ptr + rows, mask=is_in, other=0)
    is_over = (index + 1 >= tl.load(max_output_ptr + rows, mask=is_in, other=0)) | (logprob != logprob)
    set_ptrs = end_ids_ptr + tl.load(end_set_ptr + rows, mask=is_in, other=0) * stride_ids
    for i in range(num_ids):
        is_over = is_over | (tl.load(set_ptrs + i, mask=is_in, other=-1) == token)
    step = tl.load(step_ptr + rows, mask=is_in, other=0)
    drawn = tl.where(is_live, tl.where(is_over, -2 - token, token), -1)
    tl.store(record_ptr + step * stride_record + rows, drawn, mask=is_in)
    tl.store(record_logprob_ptr + step * stride_record_logprob + rows, tl.where(is_live, logprob, 0.0), mask=is_in)
    tl.store(step_ptr + rows, tl.where(step + 1 == num_steps, 0, step + 1), mask=is_in)
    goes_on = is_live & (is_over == 0)
    tl.store(token_ptr + rows, token, mask=is_in & goes_on)
    position = tl.load(position_ptr + rows, mask=is_in, other=0)
    tl.store(position_ptr + rows, position + 1, mask=is_in & goes_on)
    tl.store(index_ptr + rows, index + 1, mask=is_in & is_live)
    tl.store(live_ptr + rows, goes_on.to(tl.int32), mask=is_in)


def advance_rows(
    drawn_R: torch.Tensor,
    logprob_R: torch.Tensor,
    token_R: torch.Tensor,
    position_R: torch.Tensor,
    index_R: torch.Tensor,
    max_output_R: torch.Tensor,
    is_live_R: torch.Tensor,
    end_set_R: torch.Tensor,
    step_R: torch.Tensor,
    end_ids_SI: torch.Tensor,
    record_KR: torch.Tensor,
    record_logprobs_KR: torch.Tensor,
) -> None:
    """Take a draw in; everything from ``token_R`` on is state that stays in place (sagc_fast.ops.decode_rows).

    Args:
        drawn_R, logprob_R: int64 and fp32, what the sampling kernels return.
        is_live_R: int32. All other integers are int64.
        end_ids_SI, record_KR, record_logprobs_KR: the last axis contiguous.
    """
    num_rows = len(drawn_R)
    if num_rows:
        advance_rows_kernel[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            drawn_R, logprob_R, token_R, position_R, index_R, max_output_R, is_live_R, end_set_R, step_R, end_ids_SI,
            record_KR, record_logprobs_KR, end_ids_SI.stride(0), record_KR.stride(0), record_logprobs_KR.stride(0),
            num_rows, len(record_KR), end_ids_SI.shape[1], BLOCK=BLOCK_ROWS, num_warps=2,
        )  # fmt: skip
