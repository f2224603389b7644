"""Everything that chunkc takes of torch beyond its public interface, with the versions on which it was seen.

A new torch version asks for changes here and nowhere else.
"""
