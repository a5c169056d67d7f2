"""The engine's promises to its caller: ends, texts, callbacks, memory, and one clear sentence for bad input."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from sagc_fast.errors import BackendError, ConfigError, KVBudgetError, ModelLoadError, PromptError
from sagc_fast.rollout import engine as engine_module
from sagc_fast.rollout import threads as threads_module
from sagc_fast.rollout.call import Call
from sagc_fast.rollout.engine import RolloutEngine
from sagc_fast.rollout.request import check_request
from sagc_fast.types import MAX_TEMPERATURE, MIN_TEMPERATURE, SamplingParams


class Scripted:
    """Greedy decoding says a fixed text, one byte after another, whatever the prompt of one token."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, config, text: str, eos: bool = True) -> None:
        self.config = config
        self.script = [*text.encode("utf-8"), 256] if eos else list(text.encode("utf-8"))

    def forward_paged(self, token_ids_T, layout, kv):
        return layout.positions_T[layout.logits_rows_R, None].float()

    def logits(self, hidden_RE):
        logits = torch.zeros(len(hidden_RE), self.config.vocab_size)
        for row, position in zip(logits, hidden_RE[:, 0].long().tolist(), strict=True):
            row[self.script[position % len(self.script)]] = 50.0
        return logits


@pytest.fixture
def scripted(tiny_config, byte_tokenizer):
    return lambda text, **kwargs: RolloutEngine(Scripted(tiny_config(), text, **kwargs), byte_tokenizer)


# ---- how completions end ---------------------------------------------------------------------------------------------


def test_stop_string_stays_in_the_tokens_and_leaves_the_text(scripted):
    params = SamplingParams(temperature=0, stop=["\n\n", "zzz"])
    (completion,) = scripted("né ré\n\nrest").generate(["x"], 1, params)[0].completions
    assert completion.text == "né ré"
    assert bytes(completion.token_ids).decode() == "né ré\n\n"
    assert completion.finish_reason == "stop"
    assert len(completion.logprobs) == len(completion.token_ids)


@pytest.mark.parametrize("ids", [[ord("c")], []])
def test_a_stop_string_leaves_the_text_also_where_an_end_token_completes_it(scripted, ids):
    """The string once stayed in the text when its last token was a stop token id as well."""
    params = SamplingParams(temperature=0, stop=["bc"], stop_token_ids=ids)
    (completion,) = scripted("abcd").generate(["x"], 1, params)[0].completions
    assert (completion.text, bytes(completion.token_ids), completion.finish_reason) == ("a", b"abc", "stop")


def test_a_stop_token_without_a_stop_string_stays_in_the_text_unless_it_is_special(scripted):
    params = SamplingParams(temperature=0, stop=["zz"], stop_token_ids=[ord("c")])
    (completion,) = scripted("abcd").generate(["x"], 1, params)[0].completions
    assert (completion.text, completion.finish_reason) == ("abc", "stop")


def test_end_token_stays_in_the_tokens_and_leaves_the_text(scripted):
    (completion,) = scripted("abc").generate(["x"], 1, SamplingParams(temperature=0))[0].completions
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([97, 98, 99, 256], "abc", "stop")


def test_ignore_eos_runs_to_the_cap(scripted):
    params = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=7)
    (completion,) = scripted("abc").generate(["x"], 1, params)[0].completions
    assert (completion.token_ids, completion.finish_reason) == ([97, 98, 99, 256, 97, 98, 99], "length")
    assert completion.is_truncated


def test_ending_at_the_cap_by_its_own_token_is_a_stop(scripted):
    params = SamplingParams(temperature=0, max_new_tokens=4)
    assert scripted("abc").generate(["x"], 1, params)[0].completions[0].finish_reason == "stop"


def test_a_stop_token_of_one_completion_is_none_of_its_sibling(scripted):
    params = [SamplingParams(temperature=0, stop_token_ids=[98]), SamplingParams(temperature=0, stop=["c"])]
    first, second = scripted("abc").generate(["x"], 2, [params])[0].completions
    assert (first.token_ids, first.text) == ([97, 98], "ab")
    assert (second.token_ids, second.text) == ([97, 98, 99], "ab")


def test_the_context_ends_a_completion(helpers):
    engine = RolloutEngine(helpers.Model(context_length=20))
    groups = engine.generate([[1] * 12, [2] * 19], 3, SamplingParams(max_new_tokens=100, ignore_eos=True))
    assert [group.lengths for group in groups] == [[8] * 3, [1] * 3]
    assert {c.finish_reason for group in groups for c in group.completions} == {"length"}


def test_end_ids_come_from_the_model_the_caller_or_the_tokenizer(tiny_model, byte_tokenizer):
    assert RolloutEngine(tiny_model(eos_token_ids=(1, 2)), byte_tokenizer).eos_token_ids == (1, 2)
    assert RolloutEngine(tiny_model(eos_token_ids=()), byte_tokenizer).eos_token_ids == (256,)
    assert RolloutEngine(tiny_model(), eos_token_ids=[7]).eos_token_ids == (7,)


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_groups_carry_their_prompt_their_id_and_the_policy_version(helpers):
    engine = RolloutEngine(helpers.Model())
    engine.reset()
    engine.reset()
    groups = engine.generate([np.array([1, 2]), torch.tensor([3])], [2, 3], prompt_ids=[2**64 - 1, 7])
    assert [(g.prompt_index, g.prompt_token_ids, g.prompt_id, g.policy_version) for g in groups] == [
        (0, [1, 2], 2**64 - 1, 2),
        (1, [3], 7, 2),
    ]
    assert [[c.sample_index for c in g.completions] for g in groups] == [[0, 1], [0, 1, 2]]


def test_no_prompts_no_groups(helpers):
    engine = RolloutEngine(helpers.Model())
    assert engine.generate([]) == []
    assert engine.stats.num_steps == 0


def test_changed_weights_are_used_at_once(tiny_model):
    model = tiny_model(seed=1)
    engine = RolloutEngine(model)
    params = SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    before = engine.generate([[1, 2, 3]], 1, params)[0].completions[0]
    with torch.no_grad():
        for weight, fresh in zip(model.parameters(), tiny_model(seed=2).parameters(), strict=True):
            weight.copy_(fresh)
    engine.reset()
    after = engine.generate([[1, 2, 3]], 1, params)[0].completions[0]
    expected = RolloutEngine(tiny_model(seed=2)).generate([[1, 2, 3]], 1, params)[0].completions[0]
    assert (after.token_ids, after.logprobs) == (expected.token_ids, expected.logprobs)
    assert after.logprobs != before.logprobs


def test_callback_gets_each_group_when_its_last_completion_ends(helpers):
    engine = RolloutEngine(helpers.Model())
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (9, 2, 5)]
    seen = []
    groups = engine.generate([[1], [2], [3]], 2, params, on_group=seen.append)
    assert [g.prompt_index for g in seen] == [1, 2, 0]
    assert sorted(seen, key=lambda g: g.prompt_index) == groups


def test_a_callback_may_change_its_group_and_the_figures_stay(helpers):
    figures = []
    for on_group in (None, lambda group: [group.prompt_token_ids.clear(), group.completions.clear()]):
        engine = RolloutEngine(helpers.Model())
        groups = engine.generate([[1], [2]], 4, on_group=on_group)
        stats = engine.stats
        figures.append((stats.num_prompt_tokens, stats.num_output_tokens, stats.straggler_ratio_mean, stats.max_length))
    assert figures[0] == figures[1]
    assert groups[0].completions == []


@pytest.mark.parametrize("error", [ValueError("reward"), KeyboardInterrupt()])
def test_what_a_callback_raises_comes_out_and_the_engine_lives_on(helpers, error):
    engine = RolloutEngine(helpers.Model())
    expected = helpers.outcome(engine.generate([[1], [2]], 4))

    def fail(_group):
        raise error

    with pytest.raises(type(error)):
        engine.generate([[1], [2]], 4, on_group=fail)
    assert helpers.outcome(engine.generate([[1], [2]], 4)) == expected


def test_an_interrupt_inside_the_model_leaves_the_engine_usable(helpers):
    model = helpers.Model()
    engine = RolloutEngine(model)
    expected = helpers.outcome(engine.generate([[1], [2]], 4))
    forward, calls = model.forward_paged, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    model.forward_paged = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], 4)
    model.forward_paged = forward
    assert helpers.outcome(engine.generate([[1], [2]], 4)) == expected


def test_an_interrupt_before_a_call_begins_to_work_leaves_the_engine_usable(helpers, monkeypatch):
    """Between taking the engine and the block that gives it back there was a gap, and behind it no call any more."""
    threads, files = torch.get_num_threads(), {threads_module.__file__, engine_module.__file__}
    engine = RolloutEngine(helpers.Model(), threads=threads + 1)
    begun = []
    monkeypatch.setattr(engine_module, "Call", lambda *arguments: begun.append(1) or Call(*arguments))

    def interrupted_at(num_lines):
        """The n-th line that the two files run before there is a call."""

        def trace(frame, event, _argument):
            nonlocal num_lines
            if begun or frame.f_code.co_filename not in files:
                return None
            num_lines -= event == "line"
            if not num_lines and event == "line":
                raise KeyboardInterrupt
            return trace

        return trace

    before, num_lines = sys.gettrace(), 0
    while not begun:
        num_lines += 1
        try:
            sys.settrace(interrupted_at(num_lines))
            engine.generate([[1]], 1)
        except KeyboardInterrupt:
            sys.settrace(before)
            engine.generate([[1]], 1)
            begun.clear()
        finally:
            sys.settrace(before)
        assert torch.get_num_threads() == threads
    assert num_lines > 20


def test_a_callback_may_build_autograd_graphs_but_not_generate(helpers):
    engine = RolloutEngine(helpers.Model())
    seen = []

    def callback(_group):
        weight = torch.ones(2, requires_grad=True)
        (weight * torch.ones(2)).sum().backward()
        with pytest.raises(RuntimeError, match="generating already"):
            engine.generate([[1]], 1)
        seen.append(weight.grad)

    engine.generate([[1]], 1, on_group=callback)
    assert seen[0].tolist() == [1, 1]


def test_history_knows_a_prompt_by_its_tokens(helpers):
    engine = RolloutEngine(helpers.Model())
    engine.generate([[1, 5], [2]], 2, SamplingParams(max_new_tokens=4, ignore_eos=True), prompt_ids=[50, 51])
    assert len(engine.lengths) == 2
    assert engine.lengths.expected(np.array([1, 5])) == 4
    assert engine.lengths.expected(np.array([5, 1])) is None


def test_threads_are_set_for_the_call_and_restored(helpers):
    before = torch.get_num_threads()
    seen = []
    engine = RolloutEngine(helpers.Model(), threads=before + 1)
    engine.generate([[1]], 1, on_group=lambda _g: seen.append(torch.get_num_threads()))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_pool_is_no_larger_than_the_call_can_use_and_is_kept(helpers):
    engine = RolloutEngine(helpers.Model(), kv_budget_gb=2.0)
    params = SamplingParams(max_new_tokens=16)
    engine.generate([[1] * 16], 2, params)
    first = engine._kv
    assert engine.stats.kv_blocks_total <= 8
    assert engine.stats.kv_bytes_total == first.num_bytes
    engine.generate([[1] * 4], 2, SamplingParams(max_new_tokens=3))
    assert engine._kv is first
    engine.generate([[1] * 16], 20, params)
    assert engine._kv.num_blocks > first.num_blocks
    engine.release()
    assert engine._kv is None
    engine.generate([[1]], 2, params)


def test_a_budget_below_one_sequence_is_refused_before_any_work(helpers, engine_with_blocks):
    model = helpers.Model()
    engine = engine_with_blocks(model, 5, block_size=4)
    params = SamplingParams(max_new_tokens=14)
    with pytest.raises(
        KVBudgetError, match=r"Prompt 1 with 8 tokens and max_new_tokens=14 needs 384 bytes.* at least"
    ) as e:
        engine.generate([[1], [2] * 8], 2, params)
    assert model.num_tokens == 0
    engine.kv_budget_gb = float(str(e.value).split("kv_budget_gb to at least ")[1].split()[0])
    engine.generate([[1], [2] * 8], 2, params)
    assert engine_with_blocks(model, 5, block_size=4).generate([[2] * 7], 2, params)  # 7 + 14 - 1 tokens fit exactly


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompts": [[1], []]}, "Prompt 1 is empty"),
        ({"prompts": [[1], [2, 29]]}, "Prompt 1 holds 29 at place 1; token ids are integers from 0 to 28"),
        ({"prompts": [[-1]]}, "Prompt 0 holds -1 at place 0"),
        ({"prompts": [[1, 2.0]]}, "Prompt 0 holds 2.0 at place 1"),
        ({"prompts": [[True]]}, "Prompt 0 holds True"),
        ({"prompts": [[2**70]]}, "Prompt 0 holds 1180591620717411303424"),
        ({"prompts": [["a"]]}, "Prompt 0 holds 'a'"),
        ({"prompts": [5]}, "Prompt 0 is 5; it must be a string or a list of token ids"),
        ({"prompts": [np.array([[1, 2]])]}, "must be a string or a list of token ids"),
        ({"prompts": "text"}, "prompts is 'text'; pass a list"),
        ({"prompts": [[1], "text"]}, "Prompt 1 is a string and the engine has no tokenizer"),
        ({"prompts": [[1] * 128]}, "Prompt 0 has 128 tokens and the model's context 128; at most 127"),
        ({"prompts": [[1], [2]], "group_size": [2, 0]}, "group_size of prompt 1 is 0"),
        ({"prompts": [[1]], "group_size": 2.0}, "group_size is 2.0 for 1 prompts"),
        ({"prompts": [[1], [2]], "group_size": [2]}, "group_size is a list of 1 for 2 prompts"),
        ({"prompts": [[1], [2]], "prompt_ids": [1]}, "prompt_ids is a list of 1 for 2 prompts"),
        ({"prompts": [[1]], "prompt_ids": [2**64]}, r"prompt_ids\[0\] is 18446744073709551616"),
        ({"prompts": [[1], [2]], "prompt_ids": [3, 3]}, "Prompts 0 and 1 have the same prompt id 3 and seed 0"),
        ({"prompts": [[1], [2]], "params": [SamplingParams()]}, "params is a list of 1 for 2 prompts"),
        ({"prompts": [[1]], "params": [[SamplingParams()] * 3]}, r"params\[0\] holds 3 records for 8 completions"),
        ({"prompts": [[1]], "params": [{"seed": 1}]}, r"params\[0\] is \{'seed': 1\}"),
        (
            {"prompts": [[1]], "params": {"seed": 1}},
            r"params is the dict \{'seed': 1\}; pass SamplingParams\(\*\*params",
        ),
        ({"prompts": [[1]], "params": SamplingParams(stop=["x"])}, "Prompt 0 has stop strings .* no tokenizer"),
        ({"prompts": [[1]], "params": SamplingParams(stop_token_ids=[29])}, "Prompt 0 has stop token id 29"),
    ],
)
def test_bad_calls_are_refused_before_any_work(helpers, call, message):
    model = helpers.Model()
    engine = RolloutEngine(model)
    with pytest.raises(PromptError, match=message):
        engine.generate(**call)
    assert model.num_tokens == 0
    assert engine.generate([[1]], 1)


def test_one_id_with_two_seeds_is_two_keys(helpers):
    engine = RolloutEngine(helpers.Model())
    first, second = engine.generate([[1], [1]], 4, [SamplingParams(seed=0), SamplingParams(seed=1)], prompt_ids=[3, 3])
    assert [c.token_ids for c in first.completions] != [c.token_ids for c in second.completions]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 1.5}, "max_num_seqs is 1.5"),
        ({"threads": 0}, "threads is 0"),
        ({"kv_budget_gb": 0}, "kv_budget_gb is 0"),
        ({"kv_budget_gb": True}, "kv_budget_gb is True"),
        ({"eos_token_ids": [-1]}, r"eos_token_ids is \[-1\]"),
        ({"eos_token_ids": 5}, "eos_token_ids is 5"),
        ({"kv_dtype": "fp8"}, "dtype is 'fp8'; it must be one of fp32, bf16, fp16"),
    ],
)
def test_bad_settings_are_refused(helpers, settings, message):
    with pytest.raises(ConfigError, match=message):
        RolloutEngine(helpers.Model(), **settings)


def test_a_device_that_is_none_is_refused(hf_folder):
    with pytest.raises(BackendError, match="'nonsense'"):
        RolloutEngine.from_pretrained(hf_folder("llama"), device="nonsense")


def test_folder_without_tokenizer_serves_token_ids_alone(hf_folder, tmp_path):
    engine = RolloutEngine.from_pretrained(hf_folder("llama"))
    assert engine.generate([[5, 6]], 2, SamplingParams(max_new_tokens=3))[0].completions[0].text is None
    with pytest.raises(PromptError, match="no tokenizer"):
        engine.generate(["text"])
    with pytest.raises(ModelLoadError):
        RolloutEngine.from_pretrained(tmp_path / "nowhere")


def test_a_missing_device_is_named(hf_folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendError, match="torch sees no CUDA device"):
        RolloutEngine.from_pretrained(hf_folder("llama"), device="cuda")


def test_text_that_is_not_unicode_is_named() -> None:
    with pytest.raises(PromptError, match=r"Prompt 0 is '\\udcff'; it is not valid Unicode text"):
        check_request(["\udcff"], 1, SamplingParams(), None, vocab_size=5, context_length=9, tokenizer=object())


@pytest.mark.parametrize("top_k", [0, 5])
def test_the_coldest_draw_is_greedy_and_the_hottest_one_uniform(tiny_model, top_k):
    """Logits divided by the least temperature allowed are still finite: nobody is told that the policy diverged."""
    engine = RolloutEngine(tiny_model("llama", seed=3))
    greedy, coldest, hottest = (
        engine.generate([[5, 6, 7]], 1, SamplingParams(temperature=t, max_new_tokens=8, top_k=top_k, ignore_eos=True))
        for t in (0.0, MIN_TEMPERATURE, MAX_TEMPERATURE)
    )
    assert coldest[0].completions[0].token_ids == greedy[0].completions[0].token_ids
    assert coldest[0].completions[0].logprobs == [0.0] * 8
    assert hottest[0].completions[0].logprobs == pytest.approx([-np.log(top_k or 258)] * 8, rel=1e-5)
