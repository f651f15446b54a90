"""The commands of a shell script, with their variables and arrays filled in; nothing is run.

Owns as much of the shell as launch scripts use: quotes, continuations, comments, arrays,
`${NAME:-default}`, `$((...))`, here-documents. Must not know what the commands are.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|\d+|[@*])(\[[@*]\])?(?:(:?[-=+?])(.*))?", re.DOTALL)
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)([A-Za-z_]\w*)\1")
_BLANK, _ENDS = " \t\r", "\n;&|()"
_BEFORE_A_COMMAND = {
    *("export", "declare", "local", "readonly", "typeset", "exec", "nohup", "time", "!", "{", "}"),
    *("if", "then", "elif", "else", "fi", "while", "until", "do", "done"),
}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class ShellError(ValueError):
    """Text that ends inside of a quote, a bracket or a list."""


def commands_of(text: str, variables: Mapping[str, str] | None = None) -> list[list[str]]:
    """The words of every command, in order; branches of `if` and `case` are all read.

    variables: what the environment has, by name; HOME is ~, PWD is . unless it says more. What
    only a run would tell (`$(...)`, a name that nothing sets) is left as it is written. Words of
    the command line ($@, $1) are none. Raises ShellError.
    """
    return _Shell(text, {"HOME": "~", "PWD": ".", **(variables or {})}).commands()


class _Shell:
    """A position in the text, and what is assigned up to it."""

    def __init__(self, text: str, variables: Mapping[str, str]) -> None:
        self.text, self.at = text, 0
        self.values: dict[str, list[str]] = {name: [value] for name, value in variables.items()}
        self.given = set(variables) - {"HOME", "PWD"}

    def commands(self) -> list[list[str]]:
        found: list[list[str]] = [[]]
        while self._skip_blanks():
            char = self.text[self.at]
            if char in _ENDS:
                self.at += 1
                found.append([])
            elif char in "<>":
                if found[-1] and self.text[self.at - 1].isdigit():  # 2> file
                    found[-1].pop()
                self._redirection()
            elif not (found[-1] or self._assignment()):
                words = self._word()
                found[-1] += [] if words and words[0] in _BEFORE_A_COMMAND else words
            elif found[-1]:
                found[-1] += self._word()
        return [command for command in found if command]

    def _skip_blanks(self) -> bool:
        """To the next word or end of a command; False at the end of the text."""
        while self.at < len(self.text):
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif self.text.startswith("\\\r\n", self.at):
                self.at += 3
            elif self.text[self.at] in _BLANK:
                self.at += 1
            elif self.text[self.at] == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            else:
                return True
        return False

    def _redirection(self) -> None:
        """`> file`, `2>&1`, and the lines of `<< END`."""
        heredoc = _HEREDOC.match(self.text, self.at)
        if heredoc is None:
            while self.at < len(self.text) and self.text[self.at] in "<>&":
                self.at += 1
            if self._skip_blanks() and self.text[self.at] not in _ENDS:
                self._word()
            return
        rest_of_line = self.text.find("\n", self.at)
        end = re.compile(rf"^\s*{heredoc[2]}\s*$", re.MULTILINE).search(self.text, rest_of_line)
        line = self.text[heredoc.end() : rest_of_line]
        self.text = self.text[: self.at] + line + self.text[end.end() if end else len(self.text) :]

    def _assignment(self) -> bool:
        """NAME=value, NAME+=value, NAME=(values), where one begins here."""
        match = _ASSIGNMENT.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        name, appends = match[1], bool(match[2])
        is_array = self.text.startswith("(", self.at)
        words = self._array() if is_array else ["".join(self._word(splits=False))]
        if name in self.given:  # from outside, where the script has a default perhaps
            return True
        old = self.values.get(name, [])
        if appends and not is_array:
            words = ["".join([*old, *words])]
        elif appends:
            words = [*old, *words]
        self.values[name] = words
        return True

    def _array(self) -> list[str]:
        self.at += 1
        words: list[str] = []
        while self._skip_blanks():
            char = self.text[self.at]
            if char == ")":
                self.at += 1
                return words
            if char in _ENDS + "<>":
                self.at += 1
            else:
                words += self._word()
        raise ShellError("a list in ( ) does not end")

    def _word(self, *, splits: bool = True) -> list[str]:
        """One word, or several, or none, where a variable holds so many."""
        words: list[str] = []
        open_word: str | None = None  # None = nothing yet, not even an empty text in quotes
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in _BLANK + _ENDS + "<>":
                break
            if char == "$" or char == "`":
                parts = self._expansion()
                if splits and not any(part.startswith(("$", "`")) for part in parts):
                    parts = [part for text in parts for part in text.split()]
                text = parts.pop(0) if parts else ""
                open_word = (open_word or "") + text if text or open_word is not None else None
                for part in parts:
                    words.append(open_word or "")
                    open_word = part
                continue
            if char == '"':
                pieces = self._double_quoted()
            elif char == "'":
                pieces = [self._until("'")]
            elif char == "\\":
                pieces = [self.text[self.at + 1 : self.at + 2].replace("\n", "")]
                self.at += 2
            else:
                pieces = [char]
                self.at += 1
            if pieces:  # "${none[@]}" is no word
                open_word = (open_word or "") + pieces[0]
                for piece in pieces[1:]:
                    words.append(open_word)
                    open_word = piece
        return words if open_word is None else [*words, open_word]

    def _until(self, quote: str) -> str:
        end = self.text.find(quote, self.at + 1)
        if end < 0:
            raise ShellError(f"a {quote} has no other one: {self.text[self.at : self.at + 40]!r}")
        start, self.at = self.at + 1, end + 1
        return self.text[start:end]

    def _double_quoted(self) -> list[str]:
        start, parts = self.at, [""]
        self.at += 1
        is_list = False
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self.at += 1
                return [] if is_list and parts == [""] else parts
            if char == "\\" and self.text[self.at + 1 : self.at + 2] in [*'$`"\\\n']:
                parts[-1] += self.text[self.at + 1].replace("\n", "")
                self.at += 2
            elif char in "$`":
                found = self._expansion()
                is_list |= len(found) != 1
                parts[-1] += found[0] if found else ""
                parts += found[1:]
            else:
                parts[-1] += char
                self.at += 1
        raise ShellError(f'a " has no other one: {self.text[start : start + 40]!r}')

    def _expansion(self) -> list[str]:
        """What stands for `$...` here: texts of an array, else one."""
        if self.text[self.at] == "`":
            return [f"`{self._until('`')}`"]
        if self.text.startswith("$((", self.at):
            inside = self._bracketed(3, "(", ")", depth=2)
            value = _calculated("".join(_Shell(_dollars(inside), {})._with(self.values)))
            return [f"$(({inside}))" if value is None else str(value)]
        if self.text.startswith("$(", self.at):
            return [f"$({self._bracketed(2, '(', ')')})"]
        if self.text.startswith("${", self.at):
            return self._parameter(self._bracketed(2, "{", "}"))
        self.at += 1
        name = _NAME.match(self.text, self.at)
        if name is not None:
            self.at = name.end()
            return self._value(name[0])
        self.at += 1
        char = self.text[self.at - 1 : self.at]
        return (
            [] if char in ("@", "*") else [""] if char.isdigit() or char in "?!#-" else ["$" + char]
        )

    def _with(self, values: dict[str, list[str]]) -> list[str]:
        """The text as one word in double quotes, with these values."""
        self.values, self.text = values, f'"{self.text}"'
        return self._double_quoted()

    def _bracketed(self, skip: int, opening: str, closing: str, *, depth: int = 1) -> str:
        """The text up to the brackets that close those `skip` letters long."""
        start = self.at = self.at + skip
        total = depth
        while self.at < len(self.text):
            depth += {opening: 1, closing: -1}.get(self.text[self.at], 0)
            self.at += 1
            if depth == 0:
                return self.text[start : self.at - total]
        raise ShellError(f"a {opening} does not end: {self.text[start : start + 40]!r}")

    def _parameter(self, inside: str) -> list[str]:
        """${inside}: a name, an array, a default."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:  # ${NAME##*/}, ${#NAME}
            return ["${" + inside + "}"]
        name, _, operation, text = match.groups()
        is_set = name in self.values and any(self.values[name])
        if operation is None or (is_set and operation[-1] in "-=?"):
            return self._value(name)
        if operation[-1] == "?" or (operation[-1] == "+" and not is_set):
            return [""] if operation[-1] == "+" else ["${" + name + "}"]
        default = ["".join(_Shell(text.strip('"'), {})._with(self.values))]
        if operation[-1] == "=":
            self.values[name] = default
        return default

    def _value(self, name: str) -> list[str]:
        if name in ("@", "*"):
            return []
        if name.isdigit():
            return [""]
        return [*self.values.get(name, ["${" + name + "}"])]


def _dollars(text: str) -> str:
    """Arithmetic with a $ before each name, so that values stand for names."""
    return re.sub(r"(?<![\w${])([A-Za-z_]\w*)", r"$\1", text)


def _calculated(text: str) -> int | None:
    """The value of whole-number arithmetic; None where it is none."""

    def value(node: Any) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None
