"""Answers are found and compared without executing anything."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sagc_fast.tasks.answers import (
    EXTRACTION_RULES,
    answers_equal,
    are_integers,
    evaluate_arithmetic,
    extract_answer,
    is_harmless_expression,
    last_boxed,
    solves_countdown,
)


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("first_line", " 7\nQuestion: 3 + 4", "7"),
        ("first_line", "\n\n 7 \n8", "7"),
        ("first_line", "  \n ", None),
        ("last_line", "so\n 7 \n\n", "7"),
        ("tag", "<answer>1</answer> no: <answer>\n2 </answer>", "2"),
        ("tag", "<answer>2", None),
        ("boxed", r"\boxed{1}, or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("boxed", r"\fbox{3}", "3"),
        ("boxed", r"\boxed{\frac{1}{2}", None),
        ("hash", "4 + 3\n#### 7 \nNext", "7"),
        ("hash", "#### 7 #### 8", "8"),
        ("hash", "seven", None),
        ("last_number", "from 3 to -1,234.5 apples.", "-1,234.5"),
        ("last_number", "none", None),
        ("text", " a\nb ", "a\nb"),
    ],
)
def test_extraction(rule, text, answer):
    assert extract_answer(text, rule) == answer


@given(st.sampled_from(sorted(EXTRACTION_RULES)), st.text())
def test_extraction_never_fails(rule, text):
    answer = extract_answer(text, rule)
    assert answer is None or answer in text


@given(st.text(alphabet="{}ab\\boxed{", max_size=40))
def test_a_boxed_answer_has_balanced_braces(text):
    answer = last_boxed(text + r"\boxed{" + text.replace("{", "").replace("}", "") + "}")
    assert answer == text.replace("{", "").replace("}", "")


@pytest.mark.parametrize(
    ("given_answer", "gold", "equal"),
    [
        ("7", "7", True),
        ("+01,000.00", "1000", True),
        ("-0", "0", True),
        ("7.", "7", False),
        ("7 apples", "7", False),
        ("17", "7", False),
        ("1  2\n3", "1 2 3", True),
        ("1e3", "1000", False),
        ("nan", "nan", True),
        ("0.1", ".1", True),
        ("9" * 200, "9" * 200, True),
        ("9" * 200 + ".0", "9" * 200, False),
        ("", "7", False),
    ],
)
def test_equality(given_answer, gold, equal):
    assert answers_equal(given_answer, gold) is equal


def test_integers_are_told_from_the_rest():
    assert are_integers("7", "-1,000.0")
    assert not are_integers("7", "1/2")


@pytest.mark.parametrize(
    ("expression", "value", "numbers"),
    [
        ("94*4 - 61 - 6", 309, [94, 4, 61, 6]),
        ("(8 - 3) / 2", Fraction(5, 2), [8, 3, 2]),
        (" -(3) + 3 ", 0, [3, 3]),
        ("1/3 + 1/3 + 1/3", 1, [1, 3, 1, 3, 1, 3]),
    ],
)
def test_arithmetic_is_exact(expression, value, numbers):
    assert evaluate_arithmetic(expression) == (value, numbers)


HOSTILE = [
    "9**9**9**9", "__import__('os')._exit(0)", "1 if 1 else 2", "1//2", "5 % 3", "2 ** 3", "1/0", "", "(", "1.5 + 1",
    "True + 1", "a + 1", "f(1)", "[1][0]", "1\n2", "(" * 300, "1+" * 5000 + "1", "\x00", "１ + １",
    "lambda: 1", "0x10 + 1j",
]  # fmt: skip


@pytest.mark.parametrize("expression", HOSTILE)
def test_anything_but_plain_arithmetic_has_no_value(expression):
    result = evaluate_arithmetic(expression)
    assert result is None or all(isinstance(n, int) for n in result[1])
    assert not solves_countdown(expression, [9, 9, 9, 9], 24)


@given(st.text(max_size=80))
def test_arithmetic_never_fails(text):
    evaluate_arithmetic(text)
    is_harmless_expression(text)


@pytest.mark.parametrize(
    ("expression", "solved"),
    [
        ("94*4 - 61 - 6", True),
        ("309", False),  # the target itself
        ("94*4 - 61 - 6 + 0", False),  # a number too many
        ("94*4 - 67", False),  # other numbers
        ("94*4 - 61 - 3 - 3", False),
        ("94*4 - 61 - 6 = 309", False),
    ],
)
def test_countdown_wants_every_number_once(expression, solved):
    assert solves_countdown(expression, [6, 61, 4, 94], 309) is solved


@pytest.mark.parametrize(
    "expression",
    [
        "-34*x**8/15 - 5*x/4 + C", "sin(x)*exp(-x) + sqrt(2)", "x**(3/2)", "-4*(-2*x - 8)**(3/2)/3 + C",
        "[[1, 0], [0, 1]]", "['_', 'Q']", "x**n", "log(x)**2",
    ],
)  # fmt: skip
def test_mathematics_and_literals_pass_as_harmless(expression):
    assert is_harmless_expression(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')", "open('x')", "exit()", "x.__class__", "().__class__", "[x for x in y]",
        "9**9**9", "2**10**8", "1 << 10**9", "'a' * 10**9", "[0] * 10**9", "10**9 * (0,)", "lambda: 0", "eval('1')",
        "x[0]", "f'{x}'", "sin(x=1)", "(yield)", "integrate(x)", "__builtins__", "x**100000", "2**(5*5*5*5*5*5*5*5)",
        "(1", "{1: 2}", "x**'a'",
    ],
)  # fmt: skip
def test_whatever_could_act_or_blow_up_does_not(expression):
    assert not is_harmless_expression(expression)
