"""All that chunkc takes from torch beyond its public interface, with the versions where it was seen.

A new torch version asks for changes here and nowhere else.
"""
