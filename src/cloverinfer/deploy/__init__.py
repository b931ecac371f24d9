"""Installs, runs and stops a cluster on hosts that are reached over ssh. Knows no model."""
