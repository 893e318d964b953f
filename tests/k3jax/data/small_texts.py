"""Generated Python that the small corpora of these tests are made of."""

import random


def module_source(number: int, lines: int = 60) -> str:
    """Python-like text that is the same for the same number, and no near-duplicate of others."""
    draw = random.Random(number)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 9))) for _ in range(40)]
    out = [f'"""Module {number}."""', ""]
    for _ in range(lines):
        name, argument, value = draw.choices(words, k=3)
        out += [f"def {name}({argument}):", f"    return {argument} + {value}", ""]
    return "\n".join(out) + "\n"
