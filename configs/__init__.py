"""Recipes: Python functions `config()` that return a complete run configuration."""
