"""Attention kernels behind one interface; `reference` is the plain torch one that others are held against."""
