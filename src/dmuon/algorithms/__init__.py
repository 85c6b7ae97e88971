"""The arithmetic of each optimizer: stages on pieces, and maps of whole matrices."""
