"""``sagc-fast generate`` from the command line on a tiny model folder with a real byte-level tokenizer."""

from __future__ import annotations

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from sagc_fast.cli import main

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(hf_folder):
    """A random Llama whose tokenizer has one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = hf_folder("llama", vocab_size=300, eos_token_id=256)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
    return path


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_holds_the_groups_and_then_the_statistics(folder, capsys):
    command = [
        "generate",
        "--model",
        str(folder),
        "--prompt",
        "abc",
        "--prompt",
        "é",
        "--n",
        "3",
        "--max-new-tokens",
        "5",
    ]
    assert main([*command, "--json"]) == 0
    *groups, last = lines(capsys)
    assert [len(group["completions"]) for group in groups] == [3, 3]
    assert [len(group["prompt_token_ids"]) for group in groups] == [3, 2]
    assert last["stats"]["num_completions"] == 6
    assert last["stats"]["output_tokens_per_second"] > 0
    assert main([*command, "--json", "--threads", "1", "--kv-gb", "0.01"]) == 0
    assert lines(capsys)[:2] == groups


def test_text_shows_prompts_completions_and_figures(folder, capsys):
    command = ["generate", "--model", str(folder), "--prompt", "hello", "--n", "2", "--max-new-tokens", "4"]
    assert main(command) == 0
    output = capsys.readouterr().out
    for expected in ("hello", "[0] ", "[1] ", "mean log-prob", "output tokens per second", "straggler ratio"):
        assert expected in output


def test_chat_and_prompt_files(folder, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"ab"\n\n{"messages": [{"role": "system", "content": "x"}]}\n{"prompt": [1, 2, 3]}\n')
    command = [
        "generate",
        "--model",
        str(folder),
        "--prompts-file",
        str(file),
        "--n",
        "1",
        "--max-new-tokens",
        "2",
        "--json",
    ]
    assert main([*command, "--chat"]) == 0
    *groups, _ = lines(capsys)
    lengths = [len(group["prompt_token_ids"]) for group in groups]
    assert lengths == [len("<user>ab<assistant>"), len("<system>x<assistant>"), 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "No prompt is given"),
        (["--prompts-file", "{tmp}/none.jsonl"], "none.jsonl cannot be read: No such file or directory; give a file"),
        (["--prompts-file", "{tmp}/nothing.jsonl"], "nothing.jsonl holds no prompt; write one JSON value a line"),
        (["--prompts-file", "{tmp}/binary.jsonl"], "binary.jsonl is not text in UTF-8"),
        (["--prompts-file", "{tmp}/bad.jsonl"], "bad.jsonl line 2 is not JSON"),
        (["--prompts-file", "{tmp}/empty.jsonl"], "empty.jsonl line 1 holds no prompt"),
        (["--prompts-file", "{tmp}/chat.jsonl"], "add --chat"),
        (["--prompt", ""], "Prompt 0 is empty"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens is 0"),
        (["--prompt", "a", "--n", "0"], "group_size is 0"),
        (["--prompt", "a", "--n", "1000000000000"], "asks for 1,000,000,000,000 completions"),
        (["--prompt", "a", "--threads", "100000000"], "threads is 100000000; it must be at most 1024"),
        (["--prompt", "a", "--temperature", "1e300"], "temperature is 1e+300; it must be 0 or from 1e-30 to 1e+06"),
        (["--prompt", "a" * 256], "the model's context 256"),
        (["--prompt", "a", "--kv-gb", "0.000001"], "set kv_budget_gb to at least"),
    ],
)
def test_mistakes_cost_one_sentence_and_status_2(folder, tmp_path, capsys, arguments, message):
    (tmp_path / "bad.jsonl").write_text('"fine"\n{"prompt": \n')
    (tmp_path / "empty.jsonl").write_text("{}\n")
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    (tmp_path / "chat.jsonl").write_text('[{"role": "user", "content": "x"}]\n')
    assert main(["generate", "--model", str(folder), *(a.replace("{tmp}", str(tmp_path)) for a in arguments)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("sagc-fast: ")
    assert message in error


def test_a_folder_without_tokenizer_is_named(hf_folder, capsys):
    path = hf_folder("llama", seed=9)
    assert main(["generate", "--model", str(path), "--prompt", "a"]) == 2
    assert f"Model folder {path} has no tokenizer" in capsys.readouterr().err


def test_the_shipped_policy_goes_by_its_name(capsys):
    assert main(["generate", "--model", "addition", "--prompt", "2+3=", "--n", "2", "--json"]) == 0
    assert len(lines(capsys)[0]["completions"]) == 2


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (float("nan"), "its weight layers.1.down_weight holds NaN or infinity; take an earlier checkpoint"),
        (3e38, "its products overflow in float32 (largest weight 3e+38); take an earlier checkpoint."),
    ],
)
def test_a_model_whose_logits_are_not_finite_is_one_sentence(folder, tmp_path, capsys, value, sentence):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(value)
    save_file(weights, broken / "model.safetensors")
    assert main(["generate", "--model", str(broken), "--prompt", "abc", "--n", "2"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sagc-fast: The policy's logits are not finite: ")
    assert sentence in error
