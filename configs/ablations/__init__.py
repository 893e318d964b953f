"""One recipe per question: a base recipe `BASE` with `CHANGES`, usually one field, replaced."""
