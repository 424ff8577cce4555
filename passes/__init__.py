"""Rewrites of FX graphs that know neither plans nor ranks."""
