"""The CUDA sources as C++ that the emulator runs: PTX becomes calls, and shared memory lies in the emulator's arena."""

import re
from collections.abc import Iterator
from pathlib import Path

_STRING = r'"(?:[^"\\]|\\.)*"'
_ASM = re.compile(rf"asm volatile\(((?:{_STRING}|[^;\"])*)\);")
_SHARED = re.compile(r"__shared__ ([\w ]+?) (\w+)((?:\[[^\]]*\])*);")
_ACCESS = re.compile(
    r"(?:@(!?)(\w+) )?(ld|st)\.global\.v([24])\.u32 (?:\{([^}]*)\}, \[%(\d+)\]|\[%(\d+)\], \{([^}]*)\})"
)
_TABLE = "    Filled table;"  # of runs, on the host's stack
_SET = re.compile(r"setp\.(ne|eq)\.s32 (\w+), %(\d+), (\d+)")


def translate(csrc: Path, to: Path, replace: dict[str, str] | None = None) -> None:
    """Write the C++ of ``csrc/cuda``, and the headers beside it, to ``to``; replacements must be met."""
    pending = dict(replace or {})
    tables = 0
    for source in [*csrc.glob("*.h"), *csrc.glob("cuda/*")]:
        text = source.read_text()
        for old in [old for old in pending if old in text]:
            text = text.replace(old, pending.pop(old))
        text = _ASM.sub(lambda match: _instructions(match[1]), text)
        text = _SHARED.sub(_shared, text)
        tables += text.count(_TABLE)
        text = text.replace(_TABLE, f"{_TABLE} emulator::poison(&table, sizeof(table));")
        target = to / source.relative_to(csrc)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    if pending or not tables:
        raise ValueError(f"no source contains {list(pending) or _TABLE}")


def _shared(match: re.Match[str]) -> str:
    kind, name, extents = match.groups()
    key = "[] { static char key; return &key; }()"  # one for each instance of a template
    return f"typedef {kind} {name}_shared{extents}; {name}_shared& {name} = emulator::shared<{name}_shared>({key});"


def _instructions(statement: str) -> str:
    """The C++ of an asm statement; what it does not know is an error."""
    text, *lists = _split(statement)
    operands = [operand for part in lists[:2] for operand in re.findall(r'"=?&?[rl]"\(([^()]*)\)', part)]
    outputs = re.findall(r'"=&?r"\(([^()]*)\)', lists[0])
    body = "".join(string[1:-1].replace("\\n", " ") for string in re.findall(_STRING, text))
    body = body[1:-1] if body.startswith("{.reg") else body
    return "{ " + " ".join([*(f"{output} = emulator::kPoison;" for output in outputs), *_lines(body, operands)]) + " }"


def _lines(body: str, operands: list[str]) -> Iterator[str]:
    for instruction in filter(None, (part.strip() for part in body.split(";"))):
        if match := re.fullmatch(r"\.reg \.pred (\w+(?:, \w+)*)", instruction):
            yield from (f"bool {name}_ = false;" for name in match[1].split(", "))
        elif match := re.fullmatch(r"mov\.u32 %(\d+), (\d+)", instruction):
            yield f"{operands[int(match[1])]} = {match[2]};"
        elif match := _SET.fullmatch(instruction):
            yield f"{match[2]}_ = {operands[int(match[3])]} {'!=' if match[1] == 'ne' else '=='} {match[4]};"
        elif match := _ACCESS.fullmatch(instruction):
            negated, predicate, verb, words, loaded, source, target, stored = match.groups()
            names = [operands[int(name.strip()[1:])] for name in (loaded or stored).split(",")]
            if len(names) != int(words) or (verb == "ld") != bool(loaded):
                raise ValueError(f"no such instruction: {instruction}")
            condition = f"if ({negated}{predicate}_) " if predicate else ""
            address = operands[int(source or target)]
            values = ", ".join(f"&{name}" if verb == "ld" else name for name in names)
            yield f"{condition}emulator::{'load' if verb == 'ld' else 'store'}({address}, {values});"
        else:
            raise ValueError(f"the translator does not know the instruction {instruction!r}")


def _split(statement: str) -> list[str]:
    """The parts between colons that are in no string."""
    parts, last = [""], 0
    for match in re.finditer(rf"{_STRING}|:", statement):
        parts[-1] += statement[last : match.start()]
        if match[0] == ":":
            parts.append("")
        else:
            parts[-1] += match[0]
        last = match.end()
    parts[-1] += statement[last:]
    return parts
