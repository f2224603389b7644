"""Carrying out a plan: actions bound to memory, launched one after another. Nothing is decided here."""
