"""Finds the classes of C++ sources, with their methods and fields. It knows the layout that clang-format gives, and no macros:
members that a macro or an included list makes do not count.
"""

import re

_LITERALS = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'',
    re.S | re.M)
_CLASS = re.compile(r"^(?:(?:static|const|typedef)\s+)*(class|struct|union)\b(?:\s*\[\[\w+\]\])*\s*([\w:]*)")
_NAMESPACE = re.compile(r"^(?:inline\s+)?namespace\s*([\w:]*)")
_LABEL = re.compile(r"^\s*(?:public|private|protected)\s*:")
_ATTRIBUTE = re.compile(r"^\s*(?:\[\[[^\]]*\]\]|__\w+__\b)\s*")
_ALIGNED = re.compile(r"\balignas\s*\([^)]*\)\s*")
_NO_MEMBER = re.compile(r"^(?:using|typedef|friend|static_assert|enum)\b|^(?:class|struct|union)\s+\w+$|^$")
_OPERATOR = re.compile(r"\boperator\s*(?:\(\)|[^\w\s(]+|[^()]+(?=\())")
_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}


class Class:
    """A definition: where, and how much is in it. `line`: of its name; methods as it declares them."""

    def __init__(self, name, line):
        self.name, self.line = name, line
        self.methods = self.fields = 0


def classes(text):
    """All classes, structs and unions that a source defines."""
    found = []
    _block(_LITERALS.sub(_blank, text), 0, (), None, found)
    return found


def _blank(match):
    """As many lines; a literal stays a value."""
    text = match.group()
    kept = '""' if text[0] in "\"'R" else ""
    return kept + "\n" * text.count("\n")


def _closing(text, at):
    """The place of what closes the bracket at `at`."""
    opening, closing, depth = text[at], _PAIRS[text[at]], 0
    for i in range(at, len(text)):
        if text[i] == opening:
            depth += 1
        elif text[i] == closing and not (closing == ">" and text[i - 1] == "-"):
            depth -= 1
            if depth == 0:
                return i
    return len(text) - 1


def _is_template(text, at):
    """Whether the "<" there opens template arguments: clang-format sets spaces around the operator."""
    return text[at] == "<" and re.search(r"\w$|\btemplate $", text[:at][-10:]) is not None


def _skip_template(head):
    while head.startswith("template"):
        at = head.find("<")
        if at < 0:
            break
        head = head[_closing(head, at) + 1:].lstrip()
    return head


def _plain(head):
    """The head of a statement without labels, attributes and template parameters; operators have a name of letters."""
    head = _ALIGNED.sub("", _OPERATOR.sub("operator_", head, count=1))
    while True:
        shorter = _ATTRIBUTE.sub("", _LABEL.sub("", head, count=1), count=1).lstrip()
        shorter = _skip_template(shorter)
        if shorter == head:
            return head
        head = shorter


def _first_delimiter(head):
    """The first of ( = { [ , : outside of template arguments and scopes, and its place; "" at the end."""
    i = 0
    while i < len(head):
        c = head[i]
        if c == "<" and _is_template(head, i):
            i = _closing(head, i)
        elif head.startswith("::", i):
            i += 1
        elif c in "(={[,:":
            return c, i
        i += 1
    return "", len(head)


def _is_method(head):
    c, at = _first_delimiter(head)
    if c == "(" and re.search(r"\b(decltype|explicit|requires)\s*$", head[:at]):
        inner = head[_closing(head, at) + 1:]
        return _is_method(inner)
    return c == "(" and not re.match(r"\(\s*(?:\w+::)*[*&]", head[at:])


def _declarators(statement):
    """How many names a declaration of fields has."""
    count, i = 1, 0
    while i < len(statement):
        if statement[i] in "([{" or _is_template(statement, i):
            i = _closing(statement, i)
        elif statement[i] == ",":
            count += 1
        i += 1
    return count


def _count(statement, owner):
    head = _plain(statement.strip())
    if owner is None or _NO_MEMBER.match(head):
        return
    if _is_method(head):
        owner.methods += not re.search(r"=\s*(delete|default)\s*$", head)
    elif not re.match(r"(?:\w+\s+)*?(?:static|constexpr)\b", head):
        owner.fields += _declarators(head)


def _opens_body(head):
    """Whether a "{" behind the head of a method begins its body, not the value of a member."""
    _, at = _first_delimiter(head)
    rest = head[_closing(head, at) + 1:] if at < len(head) else ""
    initialises = re.search(r"(?<!:):(?!:)", rest) is not None
    return not (initialises and re.search(r"[\w>]\s*$", rest))


def _block(text, line, names, owner, found):
    """Walks through the statements of a namespace, class or function; `line` is that of the text's first."""
    start = i = 0
    while i < len(text):
        c = text[i]
        if c in "([" or _is_template(text, i):
            i = _closing(text, i)
        elif c == ";":
            _count(text[start:i], owner)
            start = i + 1
        elif c == "{":
            end = _closing(text, i)
            head = _plain(text[start:i].strip())
            at_line = line + text.count("\n", 0, i)
            first = line + text.count("\n", 0, start + max(text[start:i].rfind(head), 0))
            start = _inside(text, (start, i, end), head, (first, at_line), names, owner, found)
            i = end
        i += 1


def _inside(text, places, head, lines, names, owner, found):
    """Walks through what stands in braces; where the next statement begins."""
    start, at, end = places
    inner = text[at + 1:end]
    space, kind = _NAMESPACE.match(head), _CLASS.match(head)
    if space:
        _block(inner, lines[1], (*names, *filter(None, space.group(1).split("::"))), None, found)
    elif kind and _first_delimiter(head.split(" : ")[0])[0] not in ("(", "="):
        name = (*names, *(kind.group(2) or "(unnamed)").split("::"))
        made = Class("::".join(name), lines[0] + 1)
        found.append(made)
        _block(inner, lines[1], name, made, found)
        names_behind = text[end + 1:].split(";")[0].strip()
        if owner is not None and names_behind:
            owner.fields += _declarators(names_behind)
        return text.find(";", end) + 1 or end + 1
    elif head.startswith("enum"):
        pass
    elif owner is not None and not _is_method(head):
        return start  # the value of a field
    else:
        if owner is not None and not _opens_body(head):
            return start  # of a member, before the body
        if owner is not None:
            owner.methods += 1
        _block(inner, lines[1], names, None, found)
    return end + 1
