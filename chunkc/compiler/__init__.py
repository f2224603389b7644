"""From a module to a compiled model: capture, plan, compile and install, and what a call of it goes through.

It joins capture, passes and runtime, which do not know each other.
"""
