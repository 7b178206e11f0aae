"""Ratios against stated opponents, measured in one run: `make bench`."""
