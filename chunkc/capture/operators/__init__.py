"""Operators of captured graphs: their FLOPs, bytes and workspace, and which of them Inductor fuses."""
