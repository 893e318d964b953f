"""Whole models: the only place that knows how layers are stacked."""
