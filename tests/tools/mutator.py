"""The mutants of ``mutants.py``: small faults in functions, each behind a switch that is compiled into the module."""

import ast
import copy
from collections import Counter
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).resolve().parents[2] / "src" / "fedspan"
SWITCH = "_is_active_mutant"
"""Name of the function that a mutated module calls with the number of a mutant that is reached."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
EXTREMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}
SILENT = ("log", "logging", "logger", "warnings")


class Mutator(ast.NodeTransformer):
    """Mutates the functions of a module.

    Operators: ``compare`` (``<`` to ``<=``, ``==`` to ``!=``, ``in`` to ``not in`` ...), ``arithmetic`` (also of
    augmented assignments), ``logic`` (``and`` to ``or``), ``not`` (removed), ``constant`` (True to False, n to n + 1),
    ``result`` (a number, tensor or truth value negated), ``guard`` (an ``if`` that only raises, never taken),
    ``statement`` (a call, an assignment to an item or attribute, or a further one to a name, removed) and ``extreme``
    (min to max). Messages of errors, logging, annotations, defaults and representations are left as they are.

    Args:
        path: Path of the module, for the ids.
        text: Its source.
        wanted: The mutants to compile in, numbers by ids; None: find all ids and change nothing.
    """

    def __init__(self, path: str, text: str, wanted: dict[str, int] | None = None) -> None:
        self.path, self.lines, self.wanted = path, text.splitlines(), wanted
        self.ids: list[str] = []
        self._names: list[str] = []
        self._functions: list[tuple[Counter[str], set[str], str]] = []  # ordinals, assigned names, returned type

    def _switch(self, operator: str, node: ast.stmt | ast.expr) -> ast.expr | None:
        """Count a mutant, and create its switch if it is wanted."""
        ordinals = self._functions[-1][0]
        ordinals[operator] += 1
        line = self.lines[node.lineno - 1].strip()
        id = f"{self.path} {'.'.join(self._names)} {operator} {ordinals[operator]}: {line}"
        self.ids.append(id)
        number = None if self.wanted is None else self.wanted.get(id)
        return None if number is None else ast.parse(f"{SWITCH}({number})", mode="eval").body

    def _choose(self, operator: str, node: ast.stmt | ast.expr, mutant: ast.expr, original: ast.expr) -> ast.expr:
        switch = self._switch(operator, node)
        return original if switch is None else ast.IfExp(switch, mutant, original)

    def visit(self, node: ast.AST) -> Any:
        """Leave everything outside of functions as it is, and what no test should observe."""
        if isinstance(node, ast.ClassDef):
            self._names.append(node.name)
            node.body = [self.visit(child) for child in node.body]
            self._names.pop()
            return node
        if isinstance(node, ast.FunctionDef):
            if node.name not in ("__repr__", "__str__"):
                self._visit_function(node)
            return node
        if not self._functions:
            return self.generic_visit(node) if isinstance(node, ast.Module | ast.If) else node
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.pattern) or is_silent(node):
            return node
        return super().visit(node)

    def _visit_function(self, node: ast.FunctionDef) -> None:
        arguments = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        returned = "" if node.returns is None else ast.unparse(node.returns).rpartition(".")[2]
        self._names.append(node.name)
        self._functions.append((Counter(), arguments, returned))
        node.body = [self.visit(child) for child in node.body]
        self._functions.pop()
        self._names.pop()

    def _remove(self, node: ast.stmt, visited: ast.stmt) -> ast.stmt:
        switch = self._switch("statement", node)
        return visited if switch is None else ast.If(ast.UnaryOp(ast.Not(), switch), [visited], [])

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.stmt)
        return self._remove(node, visited) if isinstance(node.value, ast.Call) else visited

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        names = {
            name.id
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        assigned = self._functions[-1][1]
        is_removable = names <= assigned and self._names[-1] != "__init__"  # else most uses fail at once
        assigned.update(names)
        node.value = self.visit(node.value)
        return self._remove(node, node) if is_removable else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        if isinstance(node.target, ast.Name):
            self._functions[-1][1].add(node.target.id)
        node.value = node.value and self.visit(node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.stmt:
        node.value = self.visit(node.value)
        visited: ast.stmt = node
        if type(node.op) in OPERATORS and (switch := self._switch("arithmetic", node)) is not None:
            mutant = ast.AugAssign(node.target, OPERATORS[type(node.op)](), node.value)
            visited = ast.If(switch, [mutant], [node])
        return self._remove(node, visited)

    def visit_If(self, node: ast.If) -> ast.stmt:
        only_raises = len(node.body) == 1 and isinstance(node.body[0], ast.Raise) and not node.orelse
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.If)
        if only_raises:
            visited.test = self._choose("guard", node, ast.Constant(False), visited.test)
        return visited

    def visit_Return(self, node: ast.Return) -> ast.stmt:
        returned = self._functions[-1][2]
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.Return)
        if visited.value is not None and returned in ("bool", "int", "float", "Tensor"):
            negation = ast.UnaryOp(ast.Not() if returned == "bool" else ast.USub(), copy.deepcopy(visited.value))
            visited.value = self._choose("result", node, negation, visited.value)
        return visited

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        visited: ast.expr = node
        node.left, node.comparators = self.visit(node.left), [self.visit(value) for value in node.comparators]
        for index, operator in enumerate(node.ops):
            operators = [*node.ops[:index], COMPARISONS[type(operator)](), *node.ops[index + 1 :]]
            mutant = ast.Compare(copy.deepcopy(node.left), operators, copy.deepcopy(node.comparators))
            visited = self._choose("compare", node, mutant, visited)
        return visited

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        is_text = any(is_string(side) for side in (node.left, node.right))
        node.left, node.right = self.visit(node.left), self.visit(node.right)
        if is_text or type(node.op) not in OPERATORS:
            return node
        mutant = ast.BinOp(copy.deepcopy(node.left), OPERATORS[type(node.op)](), copy.deepcopy(node.right))
        return self._choose("arithmetic", node, mutant, node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        node.values = [self.visit(value) for value in node.values]
        opposite = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self._choose("logic", node, ast.BoolOp(opposite, copy.deepcopy(node.values)), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        node.operand = self.visit(node.operand)
        if not isinstance(node.op, ast.Not):
            return node
        return self._choose("not", node, copy.deepcopy(node.operand), node)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if not isinstance(node.value, bool | int | float):
            return node
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        return self._choose("constant", node, ast.Constant(value), node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.Call)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in EXTREMES:
            return visited
        mutant = copy.deepcopy(visited)
        setattr(mutant.func, "attr" if isinstance(node.func, ast.Attribute) else "id", EXTREMES[name])
        return self._choose("extreme", node, mutant, visited)


def is_string(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def is_silent(node: ast.AST) -> bool:
    """Whether a node is a call that logs or warns, or creates an error."""
    if isinstance(node, ast.Expr):
        node = node.value
    if not isinstance(node, ast.Call):
        return False
    function = ast.unparse(node.func)
    return function.partition(".")[0] in SILENT or function.endswith("Error") or function == "cast"


def mutate(path: Path, wanted: dict[str, int] | None = None) -> tuple[ast.Module, list[str]]:
    """Compile the wanted mutants into a module.

    Returns:
        The module's tree, and the ids of all its mutants.
    """
    text = path.read_text(encoding="utf-8")
    mutator = Mutator(path.relative_to(SOURCE).as_posix(), text, wanted)
    tree = mutator.visit(ast.parse(text))
    return ast.fix_missing_locations(tree), mutator.ids
