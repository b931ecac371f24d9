"""Measures what a user feels: load on a server or an engine, and what came of it."""
