"""The body of ``async with store.group(key) as group:`` does not await."""

from __future__ import annotations

import ast

from .sources import at, python, report, tree

SUSPENDS = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def suspensions(block: ast.AsyncWith) -> list[ast.expr | ast.stmt]:
    """Where a block may let other tasks run, without the functions that it defines."""
    found: list[ast.expr | ast.stmt] = []
    todo: list[ast.AST] = [*block.body]
    while todo:
        node = todo.pop()
        if isinstance(node, FUNCTIONS):
            continue
        if isinstance(node, SUSPENDS) or (isinstance(node, ast.comprehension) and node.is_async):
            found.append(node if not isinstance(node, ast.comprehension) else node.iter)
        todo += ast.iter_child_nodes(node)
    return found


def is_transaction(block: ast.AsyncWith) -> bool:
    calls = [item.context_expr for item in block.items]
    return any(
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "group"
        for call in calls
    )


def awaits(module: ast.Module) -> list[int]:
    blocks = [node for node in ast.walk(module) if isinstance(node, ast.AsyncWith)]
    return sorted(
        node.lineno for block in blocks if is_transaction(block) for node in suspensions(block)
    )


def test_no_transaction_of_a_group_awaits() -> None:
    problems = [
        f"{at(path, line)}: a transaction of a group awaits while the group may be locked"
        for path in python("src", "tests", "examples", "benchmarks")
        for line in awaits(tree(path))
    ]
    assert not problems, report(problems)


def test_the_rule_sees_every_way_to_wait() -> None:
    found = awaits(
        ast.parse(
            "async def f():\n"
            "    async with store.group(key) as group:\n"
            "        await g()\n"
            "        async for _ in x: pass\n"
            "        [y async for y in x]\n"
            "        def fine(): yield 1\n"
            "        group.settle([1])\n"
            "    await g()\n"
            "    async with other.lock(): await g()\n"
        )
    )
    assert found == [3, 4, 5]
