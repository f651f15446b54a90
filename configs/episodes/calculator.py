"""Sums with a calculator: the model may call a tool, and answers then. Its answer is scored by
reward.* (the last number of what it has said and read), or here with a small price for each call.

    data.train_files=data/chain_sum/train.parquet      # python -m ppo.data.prepare reasoning_gym
    rollout.episode.path=configs/episodes/calculator.py

A model learns nothing from calls that it never makes: begin with one that was trained on tools.
"""

import ast
import operator

PRICE = 0.02
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Calculate with + - * / and parentheses.

    Args:
        expression: for example (17 + 4) * 2

    Returns:
        The result, or what is wrong.
    """
    return f"{value_of(ast.parse(expression[:200], mode='eval').body):.15g}"


def value_of(node: ast.expr) -> float:
    """Value of an expression of numbers. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.operand))
    raise ValueError(f"cannot calculate {ast.unparse(node)}")


async def episode(row, policy) -> dict[str, float]:
    """1 for the right number in the last answer, less PRICE for each call."""
    calls = 0
    policy.score = 0.0  # of an episode that a limit ends
    reply = await policy.chat(tools=[calculate])
    while reply.tool_calls:
        calls += len(reply.tool_calls)
        reply = await policy.chat(await policy.run_tools(reply))
    words = reply.text.replace(",", "").rstrip(". ").split()
    is_right = bool(words) and words[-1] == str(row["ground_truth"])
    return {"score": is_right - PRICE * calls, "is_right": float(is_right)}
