"""Walks through a traced program, down into the programs inside its equations."""

import jax


def equations(jaxpr):
    """All equations of a jaxpr, and of those inside them."""
    return (equation for equation, _ in runs(jaxpr))


def runs(jaxpr, times=1):
    """(equation, how often it runs) of a jaxpr: once for each step of the scans around it.

    A loop whose length the program does not state counts once.
    """
    for equation in jaxpr.eqns:
        yield equation, times
        steps = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        parameters = list(equation.params.values())
        for inner in jax.tree.leaves(parameters, is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(inner, "eqns"):
                yield from runs(getattr(inner, "jaxpr", inner), times * steps)
