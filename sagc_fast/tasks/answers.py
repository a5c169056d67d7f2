"""Finding the answer in a completion and comparing it, without ever executing model output. Standard library only."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal, InvalidOperation
from fractions import Fraction

from sagc_fast.errors import ConfigError
from sagc_fast.tasks.base import nearest

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MAX_EXPRESSION_CHARACTERS = 500


def extract_answer(text: str, rule: str) -> str | None:
    """The answer in a completion by one of :data:`EXTRACTION_RULES`; None when there is none."""
    answer = EXTRACTION_RULES[rule](text)
    return None if answer is None else answer.strip()


def first_line(text: str) -> str | None:
    return next((line for line in text.splitlines() if line.strip()), None)


def last_line(text: str) -> str | None:
    return next((line for line in reversed(text.splitlines()) if line.strip()), None)


def last_tag(text: str) -> str | None:
    found = _TAG.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """What the last ``\\boxed{...}`` or ``\\fbox{...}`` holds, braces balanced; None when missing or unclosed."""
    start = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if start < 0:
        return None
    start = text.index("{", start) + 1
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def after_hashes(text: str) -> str | None:
    """The rest of the line after the last ``####``, as GSM8K writes its answers."""
    _, mark, rest = text.rpartition("####")
    return rest.strip().split("\n")[0] if mark else None


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def whole_text(text: str) -> str | None:
    return text if text.strip() else None


EXTRACTION_RULES: dict[str, Callable[[str], str | None]] = {
    "first_line": first_line,
    "last_line": last_line,
    "tag": last_tag,
    "boxed": last_boxed,
    "hash": after_hashes,
    "last_number": last_number,
    "text": whole_text,
}


def answers_equal(given: str, gold: str) -> bool:
    """Equal up to white space, or as decimal numbers: ``+01,000.0`` equals ``1000``."""
    if given.split() == gold.split():
        return True
    given_number, gold_number = as_decimal(given), as_decimal(gold)
    return given_number is not None and given_number == gold_number


def as_decimal(text: str) -> Decimal | None:
    """The number that ``text`` is (thousands separators allowed, nothing else around it), or None."""
    text = text.strip()
    if len(text) > 100 or not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None


def are_integers(*texts: str) -> bool:
    """True when every text is an integer and nothing else: then comparing them decides."""
    numbers = [as_decimal(text) for text in texts]
    return all(number is not None and number == number.to_integral_value() for number in numbers)


def evaluate_arithmetic(expression: str) -> tuple[Fraction, list[int]] | None:
    """Exact value of an expression of integers with ``+ - * /``, unary minus and parentheses, and the integers in it.

    None for anything else (a power, a name, a call, a division by zero, too long a text): nothing is executed.
    """
    if len(expression) > MAX_EXPRESSION_CHARACTERS:
        return None
    numbers: list[int] = []
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body, numbers), numbers
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr, numbers: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, numbers)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, numbers), _value(node.right, numbers)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div():
                return left / right
    raise ValueError("not plain arithmetic")


def solves_countdown(expression: str, numbers: Iterable[int], target: int) -> bool:
    """True when ``expression`` uses exactly ``numbers``, each as often as it is given, and equals ``target``."""
    result = evaluate_arithmetic(expression)
    return result is not None and result[0] == target and Counter(result[1]) == Counter(numbers)


_FUNCTIONS = frozenset(
    {
        "Abs", "Rational", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp", "ln",
        "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh",
    }
)  # fmt: skip
_HARMLESS = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.Call,
    ast.operator, ast.unaryop,
)  # fmt: skip
_MAX_POWER = 1000


def is_harmless_expression(text: str) -> bool:
    """True when ``text`` is nothing but numbers, strings, names, lists, operators and calls of known functions, with
    small powers: what may be passed to a library that evaluates it.

    No attribute, index, lambda, comprehension or f-string gets through, and nothing like ``9**9**9``.
    """
    if len(text) > 4 * MAX_EXPRESSION_CHARACTERS:
        return False
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _HARMLESS) and _is_harmless(node) for node in nodes)


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
    if isinstance(node, ast.Name):
        return "__" not in node.id
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.LShift, ast.RShift, ast.Pow)):
        return _is_small_power(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return not any(isinstance(side, (ast.List, ast.Tuple)) or _is_text(side) for side in (node.left, node.right))
    return True


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))


def _is_small_power(node: ast.expr) -> bool:
    """Small numbers and fractions of them; names are symbols to the libraries concerned."""
    for part in ast.walk(node):
        if isinstance(part, ast.BinOp) and not isinstance(part.op, (ast.Add, ast.Sub, ast.Div)):
            return False
        if isinstance(part, ast.Constant):
            if not isinstance(part.value, (int, float)) or abs(part.value) > _MAX_POWER:
                return False
        elif not isinstance(part, (ast.BinOp, ast.UnaryOp, ast.Name, ast.Load, ast.operator, ast.unaryop)):
            return False
    return True


def check_rule(rule: object, where: str) -> None:
    """Raises ConfigError unless ``rule`` names an extraction rule."""
    if rule not in EXTRACTION_RULES:
        best = nearest(rule, EXTRACTION_RULES)
        hint = f" (did you mean {best}?)" if best else ""
        raise ConfigError(f"{where} is {rule!r}; it must be one of {', '.join(EXTRACTION_RULES)}{hint}.")
