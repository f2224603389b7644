"""All that chunkc takes from torch beyond its public interface, with the versions where it was seen."""
